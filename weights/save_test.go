package weights_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// A toSave is tensors on devices and in host memory, with their bytes.
type toSave struct {
	tensors []weights.SavedTensor
	bytes   map[string][]byte
}

// newToSave makes tensors of all types: some neighbours in the memory of each device, others alone, others in host memory.
func newToSave(t testing.TB, devs []*cudart.Device) *toSave {
	t.Helper()
	s := &toSave{bytes: map[string][]byte{}}
	random := rand.New(rand.NewPCG(1, 2))
	add := func(name string, d weights.DType, shape []int, to func(b []byte) (weights.Memory, []byte)) {
		n := wantSize(d, shape)
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		m, host := to(b)
		s.tensors = append(s.tensors, weights.SavedTensor{Name: name, DType: d, Shape: shape, Memory: m, Host: host})
		s.bytes[name] = b
	}
	upload := func(m weights.Memory, at int, b []byte) weights.Memory {
		if len(b) > 0 {
			testgpu.CopyToDevice(t, m.Device, m.Ptr+cudart.DevPtr(at), b)
		}
		return weights.Memory{Device: m.Device, Ptr: m.Ptr + cudart.DevPtr(at), Bytes: len(b)}
	}
	for i, dev := range devs {
		m, at := memoryOf(t, dev, 3*mib), 0
		neighbour := func(b []byte) (weights.Memory, []byte) {
			at += len(b)
			return upload(m, at-len(b), b), nil
		}
		for j, d := range safetensorsTypes {
			add(fmt.Sprintf("layer%d.%d.%s", i, j, d), d, []int{8, 4}, neighbour)
		}
		add(fmt.Sprint("large", i), weights.F32, []int{512, 1024}, neighbour)
		add(fmt.Sprint("empty", i), weights.BF16, []int{0, 7}, neighbour)
		for j := range 80 {
			add(fmt.Sprintf("scattered%d.%d", i, j), weights.U8, []int{1000 + j}, func(b []byte) (weights.Memory, []byte) {
				at += len(b) + 24
				return upload(m, at-len(b), b), nil
			})
		}
		add(fmt.Sprint("odd", i), weights.U8, []int{4097}, func(b []byte) (weights.Memory, []byte) {
			return upload(memoryOf(t, dev, len(b)+5), 5, b), nil
		})
	}
	add("of the host", weights.F64, []int{3, 5}, func(b []byte) (weights.Memory, []byte) { return weights.Memory{}, b })
	add(`"quoted" <&> ü`, weights.I16, nil, func(b []byte) (weights.Memory, []byte) { return weights.Memory{}, append(bytes.Clone(b), 9, 9) })
	return s
}

// check checks that a model has the tensors, and nothing else.
func (s *toSave) check(t testing.TB, path string) {
	t.Helper()
	m, err := weights.OpenModel(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	n := 0
	for tensor := range m.Tensors() {
		n++
		got := make([]byte, tensor.Size)
		if len(got) > 0 {
			_, err := tensor.File.Reader().ReadAt(got, tensor.Offset)
			require.NoError(t, err)
		}
		require.True(t, bytes.Equal(s.bytes[tensor.Name], got), "the bytes of %s", tensor.Name)
		i := slices.IndexFunc(s.tensors, func(saved weights.SavedTensor) bool { return saved.Name == tensor.Name })
		require.GreaterOrEqual(t, i, 0, tensor.Name)
		assert.Equal(t, s.tensors[i].DType, tensor.DType)
		assert.Equal(t, append([]int{}, s.tensors[i].Shape...), tensor.Shape)
		if align := wantSize(tensor.DType, []int{8}) / 8; align > 0 {
			assert.Zero(t, tensor.Offset%int64(align), "the alignment of %s", tensor.Name)
		}
	}
	assert.Equal(t, len(s.tensors), n)
}

// save saves, and waits.
func save(ctx context.Context, path string, tensors []weights.SavedTensor, o weights.SaveOptions) error {
	s, err := weights.Save(ctx, path, tensors, o)
	if err != nil {
		return err
	}
	return s.Wait(context.WithoutCancel(ctx))
}

func filesOf(t testing.TB, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestSaveAndLoad(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	s := newToSave(t, devs)
	ctx := t.Context()
	for _, o := range []weights.SaveOptions{{}, {DirectIO: true, DropCache: true}} {
		dir := t.TempDir()
		path := filepath.Join(dir, "model.safetensors")
		o.Metadata = map[string]string{"format": "pt", "é": "<&>"}
		last := [2]int{}
		o.Progress = func(done, total int) {
			assert.GreaterOrEqual(t, done, last[0])
			last = [2]int{done, total}
		}
		for range 2 { // over none, and over a model
			last = [2]int{}
			require.NoError(t, save(ctx, path, s.tensors, o))
			assert.Equal(t, last[1], last[0], "progress")
			assert.Positive(t, last[0])
			s.check(t, path)
			assert.Equal(t, []string{"model.safetensors"}, filesOf(t, dir))
		}
		file, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Zero(t, (8+binary.LittleEndian.Uint64(file))%4096, "where the data starts")
		f, err := weights.OpenFile(path)
		require.NoError(t, err)
		for key, want := range o.Metadata {
			got, _ := f.Metadata(key)
			assert.Equal(t, want, got)
		}
		require.NoError(t, f.Close())

		l, err := weights.LoadModel(ctx, devs[0], path, weights.LoadOptions{})
		require.NoError(t, err)
		var loaded []weights.SavedTensor
		for part := range l.All() {
			p, err := part.Ptr()
			require.NoError(t, err)
			loaded = append(loaded, weights.SavedTensor{
				Name: part.Tensor.Name, DType: part.Tensor.DType, Shape: part.Tensor.Shape,
				Memory: weights.Memory{Device: devs[0], Ptr: p, Bytes: part.Size},
			})
		}
		again := filepath.Join(dir, "again.safetensors")
		require.NoError(t, save(ctx, again, loaded, weights.SaveOptions{Metadata: o.Metadata}))
		require.NoError(t, l.Close())
		s.check(t, again)
	}
}

func TestSaveInShards(t *testing.T) {
	t.Parallel()
	s := newToSave(t, devicesOf(t, 1))
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o600))
	three := []string{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json"}
	for _, c := range []struct {
		shardBytes int
		files      []string
	}{
		{mib, three}, // the large tensor, and what comes before and after it
		{mib, []string{"model.2-00001-of-00003.safetensors", "model.2-00002-of-00003.safetensors", "model.2-00003-of-00003.safetensors", "model.safetensors.index.json"}},
		{2*mib + 6<<10, []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}},
		{1 << 40, []string{"model.safetensors"}},
		{mib, three},
	} {
		require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{ShardBytes: c.shardBytes}))
		assert.Equal(t, append([]string{"config.json"}, c.files...), filesOf(t, dir))
		s.check(t, dir)
		s.check(t, filepath.Join(dir, c.files[0]))
	}
}

func TestSaveOfNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "none.safetensors")
	require.NoError(t, save(t.Context(), path, nil, weights.SaveOptions{}))
	(&toSave{}).check(t, path)
}

func TestSaveRefuses(t *testing.T) {
	t.Parallel()
	dev := devicesOf(t, 1)[0]
	m := memoryOf(t, dev, 64)
	host := func(name string, d weights.DType, shape ...int) weights.SavedTensor {
		return weights.SavedTensor{Name: name, DType: d, Shape: shape, Host: make([]byte, 64)}
	}
	device := func(m weights.Memory) weights.SavedTensor {
		return weights.SavedTensor{Name: "w", DType: weights.U8, Shape: []int{64}, Memory: m}
	}
	both := device(m)
	both.Host = make([]byte, 64)
	for _, c := range []struct {
		says    string
		tensors []weights.SavedTensor
		o       weights.SaveOptions
	}{
		{says: "empty name", tensors: []weights.SavedTensor{host("", weights.U8)}},
		{says: "not UTF-8", tensors: []weights.SavedTensor{host("\xff", weights.U8)}},
		{says: "zero byte", tensors: []weights.SavedTensor{host("a\x00", weights.U8)}},
		{says: "two tensors of this name", tensors: []weights.SavedTensor{host("a", weights.U8), host("a", weights.U8)}},
		{says: "keeps this name", tensors: []weights.SavedTensor{host("__metadata__", weights.U8)}},
		{says: "not one of safetensors", tensors: []weights.SavedTensor{host("a", "Q4_0", 32)}},
		{says: "not one of safetensors", tensors: []weights.SavedTensor{host("a", "")}},
		{says: "negative dimension", tensors: []weights.SavedTensor{host("a", weights.U8, 3, -1)}},
		{says: "do not fill bytes", tensors: []weights.SavedTensor{host("a", weights.F4, 3)}},
		{says: "65 dimensions", tensors: []weights.SavedTensor{host("a", weights.U8, slices.Repeat([]int{1}, 65)...)}},
		{says: "64 bytes of host memory, F32 of shape [17] has 68", tensors: []weights.SavedTensor{host("a", weights.F32, 17)}},
		{says: "want 64", tensors: []weights.SavedTensor{device(weights.Memory{Device: dev, Ptr: m.Ptr, Bytes: 63})}},
		{says: "address 0", tensors: []weights.SavedTensor{device(weights.Memory{Device: dev, Bytes: 64})}},
		{says: "nil device", tensors: []weights.SavedTensor{device(weights.Memory{Ptr: m.Ptr, Bytes: 64})}},
		{says: "no cudart.Runtime", tensors: []weights.SavedTensor{device(weights.Memory{Device: &cudart.Device{}, Ptr: m.Ptr, Bytes: 64})}},
		{says: "is not memory of", tensors: []weights.SavedTensor{device(weights.Memory{Device: dev, Ptr: 0x10, Bytes: 64})}},
		{says: "device memory and host memory", tensors: []weights.SavedTensor{both}},
		{says: "ShardBytes is -1", o: weights.SaveOptions{ShardBytes: -1}},
		{says: "nil stream", o: weights.SaveOptions{Streams: []*cudart.Stream{nil}}},
		{says: "is not UTF-8", o: weights.SaveOptions{Metadata: map[string]string{"a": "\xff"}}},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "m.safetensors")
		err := save(t.Context(), path, c.tensors, c.o)
		require.ErrorContains(t, err, c.says)
		require.ErrorContains(t, err, "weights: save "+path)
		assert.Empty(t, filesOf(t, dir), c.says)
	}
	dir := t.TempDir()
	for _, name := range []string{"m.bin", ".safetensors", ""} {
		require.ErrorContains(t, save(t.Context(), filepath.Join(dir, name), nil, weights.SaveOptions{}), "ends in .safetensors")
	}
	var none context.Context
	require.ErrorContains(t, save(none, filepath.Join(dir, "m.safetensors"), nil, weights.SaveOptions{}), "context is nil")
	require.ErrorIs(t, save(t.Context(), filepath.Join(dir, "none", "m.safetensors"), nil, weights.SaveOptions{}), os.ErrNotExist)
	assert.Empty(t, filesOf(t, dir))
	beyond := weights.SavedTensor{Name: "a", DType: weights.U8, Shape: []int{1 << 36}, Memory: weights.Memory{Device: dev, Ptr: m.Ptr, Bytes: 1 << 36}}
	require.ErrorContains(t, save(t.Context(), filepath.Join(dir, "m.safetensors"), []weights.SavedTensor{beyond}, weights.SaveOptions{}), "is not memory of")
	beyond.Shape, beyond.Memory.Bytes = []int{1 << 50}, 1<<50
	require.ErrorContains(t, save(t.Context(), filepath.Join(dir, "m.safetensors"), []weights.SavedTensor{beyond}, weights.SaveOptions{}), "set ShardBytes or NoChecksums")
	require.ErrorContains(t, save(t.Context(), filepath.Join(dir, "m.safetensors"), []weights.SavedTensor{beyond}, weights.SaveOptions{NoChecksums: true}), "is not memory of")
}

// A save that a context or CUDA ends leaves the model before, and says which tensor it was.
func TestSaveInterrupted(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls fail on the simulated GPU alone")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	s := newToSave(t, rt.Devices())
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	before, err := os.ReadFile(path)
	require.NoError(t, err)
	requireBefore := func(what string) {
		t.Helper()
		now, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, bytes.Equal(before, now), what)
		require.Equal(t, []string{"model.safetensors"}, filesOf(t, dir), what)
	}
	failed := 0
	for at := int64(1); at <= 61; at += 4 {
		for _, ends := range []bool{false, true} {
			ctx, cancel := context.WithCancel(t.Context())
			var calls atomic.Int64
			sim.OnCall(func(fn string, _ int) {
				switch {
				case calls.Add(1) != at:
				case ends:
					cancel()
				case strings.HasPrefix(fn, "cudaMemcpy") || fn == "cudaStreamCreateWithPriority" || fn == "cudaPointerGetAttributes":
					sim.Fail(fn, cudasim.Fault{Code: cudart.ErrLaunchFailure})
				}
			})
			err := save(ctx, path, s.tensors, weights.SaveOptions{})
			sim.OnCall(nil)
			sim.ResetFaults()
			cancel()
			if err == nil {
				continue // after the last copy, or in a call that does not matter
			}
			failed++
			if ends {
				require.ErrorIs(t, err, context.Canceled)
			} else {
				require.True(t, errors.Is(err, cudart.ErrLaunchFailure), "%v", err)
			}
			requireBefore(fmt.Sprintf("call %d: %v", at, err))
		}
	}
	assert.Greater(t, failed, 10)
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	requireBefore("the same again")
}

// What a save left that was killed, the next one removes, and not what another one writes.
func TestSaveRemovesWhatIsLeft(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a[b]*.safetensors")
	for _, name := range []string{".a[b]*.KILLED.tmp", ".ab.OTHER.tmp", ".other.KILLED.tmp"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600))
	}
	require.NoError(t, save(t.Context(), path, nil, weights.SaveOptions{}))
	want := []string{".ab.OTHER.tmp", ".other.KILLED.tmp", "a[b]*.safetensors"}
	if runtime.GOOS != "linux" {
		want = append([]string{".a[b]*.KILLED.tmp"}, want...)
	}
	assert.Equal(t, want, filesOf(t, dir))
}

// Savers of one path leave the model of one of them.
func TestSaversOfOnePath(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	const savers = 6
	ended := make(chan error, savers)
	for i := range savers {
		go func() {
			var tensors []weights.SavedTensor
			for j := range 4 {
				tensors = append(tensors, weights.SavedTensor{Name: fmt.Sprint(j), DType: weights.U8, Shape: []int{100}, Host: bytes.Repeat([]byte{byte(i)}, 100)})
			}
			ended <- save(context.Background(), path, tensors, weights.SaveOptions{ShardBytes: 100 * (1 + i%3)})
		}()
	}
	for range savers {
		require.NoError(t, <-ended)
	}
	m, err := weights.OpenModel(dir)
	require.NoError(t, err)
	of := map[byte]bool{}
	for tensor := range m.Tensors() {
		b := make([]byte, tensor.Size)
		_, err := tensor.File.Reader().ReadAt(b, tensor.Offset)
		require.NoError(t, err)
		for _, v := range b {
			of[v] = true
		}
	}
	assert.Len(t, of, 1, "tensors of one saver")
	assert.Len(t, filesOf(t, dir), len(m.Files())+1, "and an index")
	require.NoError(t, m.Close())
}
