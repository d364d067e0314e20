package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// kinds make readers of the same bytes, in all ways that UploadReader knows.
func kinds(t *testing.T, data []byte) map[string]func() io.Reader {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	framed := filepath.Join(dir, "framed")
	require.NoError(t, os.WriteFile(framed, append(append(make([]byte, 777), data...), 1, 2, 3), 0o600))
	open := func(path string) *os.File {
		f, err := os.Open(path)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	return map[string]func() io.Reader{
		"file":            func() io.Reader { return open(path) },
		"section of file": func() io.Reader { return io.NewSectionReader(open(framed), 777, int64(len(data))) },
		"section of section": func() io.Reader {
			return io.NewSectionReader(io.NewSectionReader(open(framed), 700, int64(len(data)+77)), 77, int64(len(data)))
		},
		"section of bytes": func() io.Reader { return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))) },
		"bytes.Reader":     func() io.Reader { return bytes.NewReader(data) },
		"strings.Reader":   func() io.Reader { return strings.NewReader(string(data)) },
		"bytes.Buffer":     func() io.Reader { return bytes.NewBuffer(bytes.Clone(data)) },
		"foreign":          func() io.Reader { return foreign{bytes.NewReader(data)} },
		"plain":            func() io.Reader { return struct{ io.Reader }{bytes.NewReader(data)} },
	}
}

// foreign is a reader that has ReadAt and Seek, of a type that this package does not know.
type foreign struct{ *bytes.Reader }

// UploadReader takes from a reader what io.CopyN takes, and leaves the rest of it.
func TestReadersAreReadAsByCopy(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const size = 3*mib + 11
	data := bytesOf(1, size)
	mem := r.device(2 * size)
	random := rand.New(rand.NewPCG(1, 2))
	for name, kind := range kinds(t, data) {
		for range 4 {
			ours, oracle := kind(), kind()
			at := 0
			for _, n := range []int{random.IntN(1000), random.IntN(size), 0, 1 + random.IntN(size), size, 1} {
				var want bytes.Buffer
				copied, wantErr := io.CopyN(&want, oracle, int64(n))
				done, err := r.c.UploadReader(t.Context(), mem, ours, n)
				if wantErr != nil {
					require.ErrorIs(t, wantErr, io.EOF)
					require.ErrorIs(t, err, io.ErrUnexpectedEOF, name)
				} else {
					require.NoError(t, err, name)
				}
				require.EqualValues(t, copied, done, name)
				require.True(t, bytes.Equal(want.Bytes(), r.onDevice(mem, int(copied))), "%s: %d bytes at %d", name, n, at)
				at += n
			}
			rest, err := io.ReadAll(oracle)
			require.NoError(t, err)
			got, err := io.ReadAll(ours)
			require.NoError(t, err)
			require.True(t, bytes.Equal(rest, got), "%s: what is left of it", name)
		}
	}
}

// After an error the position is behind what is on the device.
func TestPositionsAfterAnError(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{})
	const n, start = 5 * mib, 1000
	data := bytesOf(1, start+n)
	mem := r.device(n)
	for name, kind := range kinds(t, data) {
		if name == "plain" || name == "foreign" {
			continue // of which more may have been read
		}
		for _, nth := range []int{0, 1, 3} {
			reader := kind()
			_, err := io.CopyN(io.Discard, reader, start)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			call := Call{}
			if nth > 0 {
				sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: nth, Code: 1})
			} else { // canceled, when there is something on the device
				call.Progress = func(int, int) { cancel() }
			}
			done, err := r.c.With(call).UploadReader(ctx, mem, reader, n)
			cancel()
			sim.ResetFaults()
			if nth > 0 {
				require.Error(t, err, name)
				require.Less(t, done, n, name)
			}
			require.True(t, bytes.Equal(data[start:start+done], r.onDevice(mem, done)), name)
			rest := make([]byte, 100)
			got, _ := io.ReadFull(reader, rest[:min(100, n-done)])
			require.Equal(t, data[start+done:][:got], rest[:got], "%s: after %d bytes", name, done)
			require.Equal(t, min(100, n-done), got, name)
		}
	}
}

// A small copy that fails has copied nothing.
func TestPositionsAfterASmallCopyFailed(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{})
	mem := r.device(100)
	for _, fn := range []string{"cudaMemcpyAsync", "cudaStreamSynchronize"} {
		b, from := bytes.NewBufferString(strings.Repeat("x", 100)), strings.NewReader("some bytes")
		for _, reader := range []interface {
			io.Reader
			Len() int
		}{b, from} {
			before := reader.Len()
			sim.Fail(fn, cudasim.Fault{Code: 1})
			done, err := r.c.UploadReader(t.Context(), mem, reader, before)
			require.Error(t, err, fn)
			require.Zero(t, done, fn)
			require.Equal(t, before, reader.Len(), fn)
		}
		var w bytes.Buffer
		sim.Fail(fn, cudasim.Fault{Code: 1})
		done, err := r.c.DownloadWriter(t.Context(), &w, mem, 100)
		require.Error(t, err, fn)
		require.Zero(t, done, fn)
		require.Zero(t, w.Len(), fn)
	}
	require.Zero(t, r.c.Stats().StagedBytes)
}

// A position behind which there are no more offsets is an error.
func TestImpossiblePositionsAreErrors(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	mem := r.device(100)
	from := strings.NewReader("text")
	_, err := from.Seek(math.MaxInt64, io.SeekStart)
	require.NoError(t, err)
	_, err = r.c.UploadReader(t.Context(), mem, from, 100)
	require.ErrorContains(t, err, "must not be negative, nor the end more than")
	f, err := os.Create(filepath.Join(t.TempDir(), "closed"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = r.c.UploadReader(t.Context(), mem, f, 100)
	require.ErrorIs(t, err, os.ErrClosed)
}

// Types that embed a file, or another type that is read by several goroutines, and read or
// write otherwise than that.
type (
	upperFile    struct{ *os.File }
	upperSection struct{ *io.SectionReader }
	upperBytes   struct{ *bytes.Reader }
	upperString  struct{ strings.Reader }
	upperBuffer  struct{ *bytes.Buffer }
)

func upper(n int, p []byte, err error) (int, error) {
	copy(p, bytes.ToUpper(p[:max(n, 0)]))
	return n, err
}

func (u upperFile) Read(p []byte) (int, error) { n, err := u.File.Read(p); return upper(n, p, err) }
func (u upperSection) Read(p []byte) (int, error) {
	n, err := u.SectionReader.Read(p)
	return upper(n, p, err)
}
func (u upperBytes) Read(p []byte) (int, error) { n, err := u.Reader.Read(p); return upper(n, p, err) }
func (u *upperString) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	return upper(n, p, err)
}
func (u upperBuffer) Read(p []byte) (int, error)  { n, err := u.Buffer.Read(p); return upper(n, p, err) }
func (u upperFile) Write(p []byte) (int, error)   { return u.File.Write(bytes.ToUpper(p)) }
func (u upperBuffer) Write(p []byte) (int, error) { return u.Buffer.Write(bytes.ToUpper(p)) }

// A reader or writer that embeds another one is used through its own methods.
func TestReadersAndWritersThatEmbedOthers(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = mib
	text := bytes.Repeat([]byte("a file in lower case; "), n)[:n]
	want := bytes.ToUpper(text)
	path := filepath.Join(t.TempDir(), "lower")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	mem := r.device(n)
	for name, open := range map[string]func() io.Reader{
		"file": func() io.Reader {
			f, err := os.Open(path)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, f.Close()) })
			return upperFile{f}
		},
		"section": func() io.Reader { return upperSection{io.NewSectionReader(bytes.NewReader(text), 0, n)} },
		"bytes":   func() io.Reader { return upperBytes{bytes.NewReader(text)} },
		"string":  func() io.Reader { return &upperString{*strings.NewReader(string(text))} },
		"buffer":  func() io.Reader { return upperBuffer{bytes.NewBuffer(bytes.Clone(text))} },
	} {
		r.fill(mem, make([]byte, n))
		done, err := r.c.UploadReader(t.Context(), mem, open(), n)
		require.NoError(t, err, name)
		require.Equal(t, n, done, name)
		require.True(t, bytes.Equal(want, r.onDevice(mem, n)), name)

		r.fill(mem, make([]byte, n))
		copied, err := r.c.NewWriter(t.Context(), mem, n).ReadFrom(open())
		require.NoError(t, err, name)
		require.EqualValues(t, n, copied, name)
		require.True(t, bytes.Equal(want, r.onDevice(mem, n)), name)
	}
	r.fill(mem, text)
	var b upperBuffer
	b.Buffer = new(bytes.Buffer)
	_, err := r.c.DownloadWriter(t.Context(), b, mem, n)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, b.Bytes()))
	to, err := os.Create(path + ".to")
	require.NoError(t, err)
	_, err = r.c.DownloadWriter(t.Context(), upperFile{to}, mem, n)
	require.NoError(t, err)
	require.NoError(t, to.Close())
	got, err := os.ReadFile(path + ".to")
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

// io.Copy hides a file in a type of package os. It is read as the file itself.
func TestFilesHiddenByIOCopyAreReadAtTheirPosition(t *testing.T) {
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	seen := 0
	_, err = io.Copy(readFromFunc(func(r io.Reader) (int64, error) {
		seen++
		of, ok := fileOf(r)
		assert.True(t, ok, "%T", r)
		assert.Same(t, f, of)
		return 0, nil
	}), f)
	require.NoError(t, err)
	require.Equal(t, 1, seen)
	_, ok := fileOf(upperFile{f})
	require.False(t, ok)
}

type readFromFunc func(io.Reader) (int64, error)

func (readFromFunc) Write([]byte) (int, error)             { panic("unused") }
func (f readFromFunc) ReadFrom(r io.Reader) (int64, error) { return f(r) }

// Files are written from their position on, which moves by what was written; other
// writers are written to in order.
func TestWritersAreWrittenAsByCopy(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const size = 3*mib + 11
	data := bytesOf(2, size)
	mem := r.device(size)
	r.fill(mem, data)
	for where, dir := range directories(t) {
		for _, flags := range []int{os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_APPEND} {
			f, err := os.OpenFile(filepath.Join(dir, "to"), flags|os.O_CREATE|os.O_TRUNC, 0o600)
			require.NoError(t, err)
			_, err = f.WriteString("before")
			require.NoError(t, err)
			want := []byte("before")
			for _, n := range []int{1, 70_000, size, 5} {
				done, err := r.c.DownloadWriter(t.Context(), f, mem, n)
				require.NoError(t, err, where)
				require.Equal(t, n, done)
				want = append(want, data[:n]...)
			}
			_, err = f.WriteString("after")
			require.NoError(t, err)
			got, err := os.ReadFile(f.Name())
			require.NoError(t, err)
			require.True(t, bytes.Equal(append(want, "after"...), got), "%s, flags %#x", where, flags)
			require.NoError(t, f.Close())
		}
	}
	var b bytes.Buffer
	b.WriteString("before")
	_, err := r.c.DownloadWriter(t.Context(), &b, mem, size)
	require.NoError(t, err)
	require.Equal(t, "before", string(b.Next(6)))
	require.True(t, bytes.Equal(data, b.Bytes()))
	_, err = r.c.DownloadWriter(t.Context(), &b, mem, 1<<62)
	require.Error(t, err, "more than a slice can have")
}

// What a writer took while the copy failed for another reason is counted.
func TestAWriteDuringAFailureIsCounted(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	const n = 16 * mib
	mem, data := r.device(n), bytesOf(1, n)
	r.fill(mem, data)
	var took bytes.Buffer
	var writing sync.Mutex
	failed := make(chan struct{})
	done, err := r.c.DownloadWriter(t.Context(), writerFunc(func(p []byte) (int, error) {
		writing.Lock()
		defer writing.Unlock()
		if took.Len() == 0 { // the next copy that is queued fails, mostly during a later write
			sim.Fail("cudaMemcpyAsync", cudasim.Fault{Code: 1, After: func() { close(failed) }})
		} else {
			<-failed
			time.Sleep(5 * time.Millisecond) // a copy that does not wait has returned
		}
		return took.Write(p)
	}), mem, n)
	require.Error(t, err)
	writing.Lock()
	defer writing.Unlock()
	require.NotZero(t, done)
	require.Equal(t, took.Len(), done)
	require.True(t, bytes.Equal(data[:done], took.Bytes()))
}

// What a writer took before the device was lost is counted, too.
func TestTheCountWhenTheDeviceIsLost(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	if err != nil {
		t.Skip(err)
	}
	dev, _ := openSim(t, sim)
	c, err := NewCopier(t.Context(), dev, Options{})
	require.NoError(t, err)
	const n = 16 * mib
	mem, err := dev.Malloc(n)
	require.NoError(t, err)
	took := 0
	done, err := c.DownloadWriter(t.Context(), writerFunc(func(p []byte) (int, error) {
		assert.NoError(t, sim.LoseDevice(0))
		took += len(p)
		return len(p), nil
	}), mem, n)
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	require.NotZero(t, done)
	require.Equal(t, took, done)
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// The files of readers and writers at the ends of a pipe.
func TestFilesWithoutAPosition(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = 300 * kib // more than a pipe holds
	mem, other, data := r.device(n), r.device(n), bytesOf(1, n)
	r.fill(mem, data)
	from, to, err := os.Pipe()
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := r.c.DownloadWriter(t.Context(), to, mem, n)
		ended <- errors.Join(err, to.Close())
	}()
	done, err := r.c.UploadReader(t.Context(), other, from, n)
	require.NoError(t, err)
	require.Equal(t, n, done)
	require.NoError(t, <-ended)
	require.True(t, bytes.Equal(data, r.onDevice(other, n)))
	_, err = r.c.UploadReader(t.Context(), other, from, 1)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	assert.NoError(t, from.Close())
}
