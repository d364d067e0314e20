package weights_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
	"github.com/gopinned/pinned/weights/httpfs"
)

// flip flips a bit of a file.
func flip(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], off)
	require.NoError(t, err)
	b[0] ^= 1
	_, err = f.WriteAt(b[:], off)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// Wherever a bit of a file is flipped, Verify and a load name the tensor and the bytes.
func TestFlippedBitsAreFound(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	s := newToSave(t, devs)
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{ShardBytes: 2 * mib}))
	require.NoError(t, weights.Verify(t.Context(), dir))
	load := func() error {
		l, err := weights.LoadModel(t.Context(), devs[len(devs)-1], dir, weights.LoadOptions{Checksums: true})
		if err == nil {
			require.NoError(t, l.Close())
		}
		return err
	}
	require.NoError(t, load())

	m, err := weights.OpenModel(dir)
	require.NoError(t, err)
	var tensors []*weights.Tensor
	for tensor := range m.Tensors() {
		if tensor.Size > 0 {
			tensors = append(tensors, tensor)
		}
	}
	require.NoError(t, m.Close())
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 12 {
		tensor := tensors[random.IntN(len(tensors))]
		if i < 4 { // in a large one
			for tensor.Size < mib {
				tensor = tensors[random.IntN(len(tensors))]
			}
		}
		at := tensor.Offset + random.Int64N(int64(tensor.Size))
		flip(t, tensor.File.Name(), at)
		for what, err := range map[string]error{"verify": weights.Verify(t.Context(), dir), "load": load()} {
			var wrong *weights.ChecksumError
			require.ErrorAs(t, err, &wrong, what)
			assert.Equal(t, tensor.Name, wrong.Tensor, what)
			assert.Equal(t, tensor.File.Name(), wrong.File, what)
			assert.True(t, wrong.Offset <= at && at < wrong.Offset+int64(wrong.Size) && wrong.Size <= mib, "%s: %d bytes at %d, the bit is at %d", what, wrong.Size, wrong.Offset, at)
			assert.False(t, wrong.InCopy)
			require.ErrorContains(t, err, fmt.Sprintf("tensor %q: wrong checksum of %d bytes from offset %d", tensor.Name, wrong.Size, wrong.Offset))
			var loading *weights.LoadError
			if errors.As(err, &loading) {
				assert.Equal(t, tensor.Name, loading.Tensor.Name)
				assert.Equal(t, wrong.Offset, loading.Offset)
				assert.Equal(t, devs[len(devs)-1:], loading.Devices)
				assert.Len(t, loading.Complete, len(s.tensors)-1)
			}
		}
		flip(t, tensor.File.Name(), at)
	}
	require.NoError(t, weights.Verify(t.Context(), dir))
}

// A bit of the header that still can be read is found too.
func TestFlippedBitsOfHeaders(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "m.safetensors")
	tensors := []weights.SavedTensor{{Name: "first", DType: weights.U8, Shape: []int{3}, Host: []byte{1, 2, 3}}}
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{Metadata: map[string]string{"k": "v"}}))
	require.NoError(t, weights.Verify(t.Context(), path))
	found, refused := 0, 0
	for at := range 400 {
		flip(t, path, int64(at))
		err := weights.Verify(t.Context(), path)
		require.Error(t, err, "byte %d", at)
		var wrong *weights.ChecksumError
		if errors.As(err, &wrong) {
			found++
		} else {
			refused++
		}
		flip(t, path, int64(at))
	}
	assert.Greater(t, found, 15)
	assert.Greater(t, refused, 50)
	require.NoError(t, weights.Verify(t.Context(), path))
}

// A flippingReader reads a bit wrong the first time.
type flippingReader struct {
	*os.File
	at      int64
	flipped atomic.Bool
}

func (r *flippingReader) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.File.ReadAt(p, off)
	if i := r.at - off; i >= 0 && i < int64(n) && !r.flipped.Swap(true) {
		p[i] ^= 1
	}
	return n, err
}

// Bytes that change between the file and the device are found, and the file is not blamed.
func TestFlippedBitsInMemory(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 1)
	s := newToSave(t, devs)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	opened, err := os.Open(path)
	require.NoError(t, err)
	defer opened.Close()
	info, err := opened.Stat()
	require.NoError(t, err)
	r := &flippingReader{File: opened, at: -1}
	f, err := weights.Parse(r, info.Size(), path)
	require.NoError(t, err)
	large, ok := f.Tensor("large0")
	require.True(t, ok)
	r.at = large.Offset + mib + 5
	plan, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{})
	require.NoError(t, err)
	_, err = plan.LoadNew(t.Context(), devs, weights.LoadOptions{Checksums: true})
	var wrong *weights.ChecksumError
	require.ErrorAs(t, err, &wrong)
	assert.Equal(t, weights.ChecksumError{File: path, Tensor: "large0", Offset: large.Offset + mib, Size: mib, InCopy: true}, *wrong)
	require.ErrorContains(t, err, "they changed between the file and the device")
	l, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{Checksums: true})
	require.NoError(t, err)
	require.NoError(t, l.Close())
}

// Rows and columns of several devices are compared, by blocks that are read once more where a load has only a part.
func TestPartsAreCompared(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	s := newToSave(t, devs)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	for _, dim := range []int{0, 1} {
		for _, all := range []bool{true, false} {
			f, err := weights.OpenFile(path)
			require.NoError(t, err)
			large := fmt.Sprint("large", len(devs)-1)
			tensor, ok := f.Tensor(large)
			require.True(t, ok)
			var shares []weights.Share
			for d := range devs {
				part, err := tensor.Slice(dim, d*100, d*100+100)
				require.NoError(t, err)
				shares = append(shares, weights.Share{Part: part, Device: d})
				if all && len(devs) > 1 {
					shares = append(shares, weights.Share{Part: part, Device: 1 - d})
				}
			}
			plan, err := weights.PlanShares(shares, weights.PlanOptions{})
			require.NoError(t, err)
			load := func() error {
				l, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{Checksums: true})
				if err != nil {
					return err
				}
				return l.Close()
			}
			require.NoError(t, load(), "dimension %d", dim)
			flip(t, path, tensor.Offset+4096*3)
			var wrong *weights.ChecksumError
			require.ErrorAs(t, load(), &wrong)
			assert.Equal(t, large, wrong.Tensor)
			flip(t, path, tensor.Offset+4096*3)
			require.NoError(t, f.Close())
		}
	}
}

func TestVerifyRefuses(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 1)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	tensors := []weights.SavedTensor{{Name: "a", DType: weights.U8, Shape: []int{3}, Host: []byte{1, 2, 3}}}
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{NoChecksums: true}))
	require.ErrorIs(t, weights.Verify(t.Context(), path), weights.ErrNoChecksums)
	_, err := weights.LoadModel(t.Context(), devs[0], path, weights.LoadOptions{Checksums: true})
	require.ErrorIs(t, err, weights.ErrNoChecksums)

	// Those of another file do not come along.
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{NoChecksums: true, Metadata: map[string]string{"pinned.crc32c": "x"}}))
	require.ErrorIs(t, weights.Verify(t.Context(), path), weights.ErrNoChecksums)
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{Metadata: map[string]string{"pinned.crc32c": "x"}}))
	require.NoError(t, weights.Verify(t.Context(), path))

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, weights.Verify(ctx, path), context.Canceled)
	var none context.Context
	require.ErrorContains(t, weights.Verify(none, path), "the context is nil")
	require.ErrorIs(t, weights.Verify(t.Context(), path+"x"), os.ErrNotExist)

	// A hundred blocks are listed at most.
	many := []weights.SavedTensor{}
	for i := range 120 {
		many = append(many, weights.SavedTensor{Name: fmt.Sprint(i), DType: weights.U8, Shape: []int{1}, Host: []byte{1}})
	}
	require.NoError(t, save(t.Context(), path, many, weights.SaveOptions{}))
	info, err := os.Stat(path)
	require.NoError(t, err)
	for i := range 120 {
		flip(t, path, info.Size()-int64(i)-1)
	}
	for _, err := range []error{weights.Verify(t.Context(), path), func() error {
		_, err := weights.LoadModel(t.Context(), devs[0], path, weights.LoadOptions{Checksums: true})
		return err
	}()} {
		require.Error(t, err)
		assert.Equal(t, 100, strings.Count(err.Error(), "wrong checksum of 1 bytes"))
	}
}

// The checksums that Save has written are compared in files of any file system, also by ranges of a server.
func TestChecksumsOfFilesFromAnywhere(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 1)
	s := newToSave(t, devs)
	dir := t.TempDir()
	require.NoError(t, save(t.Context(), filepath.Join(dir, "model.safetensors"), s.tensors, weights.SaveOptions{ShardBytes: 3 * mib}))
	var requests atomic.Int64
	files := http.FileServer(http.Dir(dir))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		files.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	remote, _, err := httpfs.New(t.Context(), server.URL+"/", httpfs.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = remote.Close() })
	for what, fsys := range map[string]fs.FS{"directory": os.DirFS(dir), "server": remote} {
		m, err := weights.OpenModelFS(fsys, ".")
		require.NoError(t, err, what)
		load := func() error {
			plan, err := weights.NewPlan(m.Tensors(), nil, weights.PlanOptions{})
			require.NoError(t, err)
			loaded, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{Checksums: true})
			if err == nil {
				require.NoError(t, loaded.Close())
			}
			return err
		}
		requests.Store(0)
		require.NoError(t, m.Verify(t.Context()), what)
		require.LessOrEqual(t, requests.Load(), int64(len(m.Files())*(runtime.GOMAXPROCS(0)+2)), "one range for many blocks")
		require.NoError(t, load(), what)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, m.Verify(ended), context.Canceled, what)

		var last *weights.Tensor
		for tensor := range m.Tensors() {
			if tensor.Size > mib {
				last = tensor
			}
		}
		path := filepath.Join(dir, filepath.Base(last.File.Name()))
		at := last.Offset + int64(last.Size) - 1
		info, err := os.Stat(path)
		require.NoError(t, err)
		flip(t, path, at)
		require.NoError(t, os.Chtimes(path, time.Time{}, info.ModTime())) // a server would tell that it is another file
		for _, err := range []error{m.Verify(t.Context()), load()} {
			var wrong *weights.ChecksumError
			require.ErrorAs(t, err, &wrong, what)
			require.Equal(t, last.Name, wrong.Tensor)
			require.LessOrEqual(t, wrong.Offset, at)
		}
		flip(t, path, at)
		require.NoError(t, os.Chtimes(path, time.Time{}, info.ModTime()))
		require.NoError(t, m.Close())
	}
	var none context.Context
	require.ErrorContains(t, (&weights.Model{}).Verify(none), "context")
	require.NoError(t, (*weights.Model)(nil).Verify(t.Context()))
}

// A lyingRange is a range whose reads and Close are functions.
type lyingRange struct {
	read  func(p []byte) (int, error)
	close func() error
}

func (r *lyingRange) Read(p []byte) (int, error) { return r.read(p) }
func (r *lyingRange) Close() error               { return r.close() }

// A lyingFile is a file that opens ranges of another kind than its ReadAt has.
type lyingFile struct {
	*os.File
	open func(*io.SectionReader) io.ReadCloser
}

func (f lyingFile) OpenRange(_ context.Context, off, n int64) (io.ReadCloser, error) {
	return f.open(io.NewSectionReader(f.File, off, n)), nil
}

type lyingFS struct {
	fs.FS
	open func(*io.SectionReader) io.ReadCloser
}

func (l lyingFS) Open(name string) (fs.File, error) {
	f, err := l.FS.Open(name)
	if err != nil {
		return nil, err
	}
	return lyingFile{f.(*os.File), l.open}, nil
}

// Ranges that break the rules of readers are errors of Verify and of loads, no panics and no endless loops.
func TestRangesThatLie(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 1)
	dir := t.TempDir()
	require.NoError(t, save(t.Context(), filepath.Join(dir, "model.safetensors"), newToSave(t, devs).tensors, weights.SaveOptions{}))
	closes := func() error { return nil }
	for name, tt := range map[string]struct {
		open func(r *io.SectionReader) io.ReadCloser
		want string // "" for success
	}{
		"nil":         {func(*io.SectionReader) io.ReadCloser { return nil }, "nil reader"},
		"a typed nil": {func(*io.SectionReader) io.ReadCloser { return (*lyingRange)(nil) }, "memory"},
		"no bytes": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func([]byte) (int, error) { return 0, nil }, closes}
		}, io.ErrNoProgress.Error()},
		"an early end": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func([]byte) (int, error) { return 0, io.EOF }, closes}
		}, "unexpected EOF"},
		"too many": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func(p []byte) (int, error) { return len(p) + 1, nil }, closes}
		}, "bytes where"},
		"negative": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func([]byte) (int, error) { return -1, nil }, closes}
		}, "-1"},
		"a panic": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func([]byte) (int, error) { panic("boom") }, closes}
		}, "panic: boom"},
		"other bytes": {func(*io.SectionReader) io.ReadCloser {
			return &lyingRange{func(p []byte) (int, error) { clear(p); return len(p), nil }, closes}
		}, "wrong checksum"},
		"a byte at a time": {func(r *io.SectionReader) io.ReadCloser {
			return &lyingRange{iotest.OneByteReader(iotest.DataErrReader(r)).Read, closes}
		}, ""},
		"an error of Close": {func(r *io.SectionReader) io.ReadCloser {
			return &lyingRange{r.Read, func() error { return errors.New("boom") }}
		}, ""},
		"a panic of Close": {func(r *io.SectionReader) io.ReadCloser {
			return &lyingRange{r.Read, func() error { panic("boom") }}
		}, ""},
	} {
		m, err := weights.OpenModelFS(lyingFS{os.DirFS(dir), tt.open}, ".")
		require.NoError(t, err, name)
		err = m.Verify(t.Context())
		if tt.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, tt.want, name)
			assert.Equal(t, 1, strings.Count(err.Error(), "weights: "), "%s: %v", name, err)
		}
		plan, err := weights.NewPlan(m.Tensors(), nil, weights.PlanOptions{})
		require.NoError(t, err)
		l, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{Checksums: true})
		if err == nil {
			require.NoError(t, l.Close())
		}
		require.True(t, tt.want == "" || err != nil, name)
		require.NoError(t, m.Close())
	}
}
