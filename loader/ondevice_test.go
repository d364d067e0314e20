package loader

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

const invertPTX = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry invert(.param .u64 p, .param .u64 n) { ret; }\n"

// inverting returns a device with a kernel that inverts bytes, and a hook that launches it on each field.
func inverting(t *testing.T, link cudasim.Link, fields ...int) (*cudasim.Sim, *cudart.Device, func(*cudart.Stream, *Batch) error) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{
		Devices: []cudasim.DeviceConfig{{Link: link}},
		Kernels: map[string]cudasim.KernelFunc{"invert": func(l *cudasim.Launch) {
			invert([][]byte{l.Write(cudasim.Arg[cudart.DevPtr](l, 0), cudasim.Arg[int](l, 1))})
		}},
	})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	m, err := kernel.Load(t.Context(), dev, []byte(invertPTX))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, m.Close()) })
	k, err := m.Kernel(t.Context(), "invert")
	require.NoError(t, err)
	return sim, dev, func(s *cudart.Stream, b *Batch) error {
		for f, size := range fields {
			n := b.Len() * size
			if err := k.Launch(s, kernel.Threads(n, 256), kernel.Arg(b.Field(f)), kernel.Arg(n)); err != nil {
				return err
			}
		}
		return nil
	}
}

// A batch of any source has been transformed when its consumer's stream reads it, once, also if several batches share a copy.
func TestBatchesAreTransformedOnTheDevice(t *testing.T) {
	t.Parallel()
	fields := []int{8, 100}
	sim, dev, hook := inverting(t, cudasim.Link{HostToDevice: late(50 * time.Microsecond)}, fields...)
	s := stream(t, dev)
	pinned, _ := pinnedOf(t, dev, 50, fields...)
	for name, src := range map[string]Source{
		"workers": numbered(50, fields...), "memory": memoryOf(t, 50, fields...), "pinned": pinned,
		"shards": shardsOf(t, 1<<20, []int{20, 30}, fields...),
	} {
		for _, o := range []Options{
			{BatchSize: 7, Shuffle: true},
			{BatchSize: 1, Prefetch: 15, Workers: 3},
			{BatchSize: 4, Unordered: true, Workers: 5, Prefetch: 3},
		} {
			t.Run(fmt.Sprintf("%s/%+v", name, o), func(t *testing.T) {
				var called [2][50]int // by epoch and number
				o.OnDevice = func(s *cudart.Stream, b *Batch) error {
					called[b.Epoch()][b.Number()]++
					return hook(s, b)
				}
				l := newLoaderFor(t, dev, src, o)
				for epoch := range 2 {
					batches := 0
					for b, err := range l.Batches(t.Context()) {
						require.NoError(t, err)
						batches++
						require.NoError(t, b.Use(s))
						require.NoError(t, s.Synchronize(t.Context()))
						for f, size := range fields {
							got, err := download(dev, b.Field(f), b.Len()*size)
							require.NoError(t, err)
							want := make([]byte, size)
							for at, i := range b.Indices() {
								writeSample(want, i, f)
								invert([][]byte{want})
								require.Equal(t, want, got[at*size:][:size], "%v: sample %d, place %d, field %d", b, i, at, f)
							}
						}
					}
					require.Equal(t, slices.Repeat([]int{1}, batches), called[epoch][:batches], "each once")
				}
			})
		}
	}
	require.Empty(t, sim.Misuses())
}

// The consumer's stream waits for the kernels: nothing has run on the device when its work is queued.
func TestUseWaitsForWorkOfOnDevice(t *testing.T) {
	t.Parallel()
	const n, batch, width = 12, 4, 64
	sim, dev, hook := inverting(t, cudasim.Link{}, width)
	l := newLoaderFor(t, dev, onlyRead{inverted{numbered(n, width)}}, Options{BatchSize: batch, Prefetch: 3, OnDevice: hook})
	all := newLog(t, stream(t, dev), n/batch, batch*width)
	sim.Hold()
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		all.add(b)
		if len(all.seen) == n/batch {
			sim.Release()
			require.NoError(t, b.Wait(t.Context()))
		}
	}
	all.requireAll()
}

// onlyRead hides the other methods of a source.
type onlyRead struct{ Source }

// A batch on which OnDevice fails ends the epoch, after those before it; the next epoch is whole.
func TestOnDeviceThatFails(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{HostToDevice: late(50 * time.Microsecond)})
	s := stream(t, dev)
	bad := errors.New("bad")
	for name, fail := range map[string]struct {
		fail func() error
		want string
	}{
		"error": {func() error { return bad }, "bad"},
		"panic": {func() error { panic("ouch") }, "panic: ouch"},
		"exit":  {func() error { runtime.Goexit(); return nil }, "a callback ended its goroutine"},
	} {
		for _, o := range []Options{
			{BatchSize: 4, Workers: 2, Prefetch: 2},
			{BatchSize: 4, Workers: 1, Prefetch: 11},
			{BatchSize: 4, Workers: 3, Prefetch: 2, Unordered: true},
		} {
			t.Run(fmt.Sprintf("%s/%+v", name, o), func(t *testing.T) {
				var failed atomic.Bool
				o.OnDevice = func(_ *cudart.Stream, b *Batch) error {
					if b.Number() == 5 && !failed.Swap(true) {
						return fail.fail()
					}
					return nil
				}
				l := newLoaderFor(t, dev, numbered(30, 8), o)
				var last error
				var numbers []int
				for b, err := range l.Batches(t.Context()) {
					if last = err; err == nil {
						requireBatch(t, b, s, 8)
						numbers = append(numbers, b.Number())
					}
				}
				require.ErrorContains(t, last, "loader: Options.OnDevice of batch 5 of epoch 0: "+fail.want)
				if name == "error" {
					require.ErrorIs(t, last, bad)
				}
				if !o.Unordered {
					require.Equal(t, slices.Collect(count(5)), numbers)
				}
				require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 30, "the next epoch")
			})
		}
	}
}

// A batch that is not delivered yet can be read by its addresses and numbers alone.
func TestABatchWithinOnDevice(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	user := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(8, 8), Options{BatchSize: 4, OnDevice: func(s *cudart.Stream, b *Batch) error {
		assert.NotNil(t, s)
		assert.NotZero(t, b.Field(0))
		assert.Equal(t, 4, b.Len())
		assert.Len(t, b.Indices(), 4)
		assert.Zero(t, b.Position())
		b.Retain()
		assert.ErrorIs(t, b.Use(user), errReleased)
		assert.ErrorIs(t, b.Wait(t.Context()), errReleased)
		assert.ErrorIs(t, b.Release(), errReleased)
		assert.Nil(t, b.Host(0))
		return nil
	}})
	require.Len(t, epochOf(t, l, user, 8), 2)
	require.Zero(t, l.Stats().Retained)

	_, err := NewHost(numbered(8, 8), Options{BatchSize: 4, OnDevice: func(*cudart.Stream, *Batch) error { return nil }},
		func(n int) ([]byte, error) { return make([]byte, n), nil })
	require.EqualError(t, err, "loader: new host: Options.OnDevice: the loader has no device: NewHost has made it")
}
