package cudart_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A scatter is pieces of memory on both sides, each at an odd place.
type scatter struct {
	host []byte
	mem  cudart.DevPtr
	at   []piece
}

type piece struct{ host, mem, n int }

// newScatter places pieces of 1 to maximum bytes, in different orders on both sides.
func newScatter(t *testing.T, dev *cudart.Device, pieces, maximum int) *scatter {
	slot := maximum + 3
	s := &scatter{host: pinned(t, dev, pieces*slot), mem: device(t, dev, pieces*slot)}
	random := rand.New(rand.NewPCG(1, 2))
	to := random.Perm(pieces)
	for i, from := range random.Perm(pieces) {
		s.at = append(s.at, piece{host: from*slot + i%3, mem: to[i]*slot + i%2, n: 1 + random.IntN(maximum)})
	}
	return s
}

func (s *scatter) pointer(p piece) unsafe.Pointer { return unsafe.Pointer(&s.host[p.host]) }

func TestCopyBatch(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		const pieces, maximum = 500, 300
		ctx := context.Background()
		s := stream(t, dev)
		sc := newScatter(t, dev, pieces, maximum)
		size := len(sc.host)
		var b cudart.CopyBatch
		require.NoError(t, s.CopyBatch(&b), "an empty list is ignored")
		require.ErrorContains(t, s.CopyBatch(nil), "the batch is nil")
		b.ToDevice(sc.mem, pointer(sc.host), 0)
		require.Zero(t, b.Len(), "a copy of 0 bytes is ignored")

		if v := dev.Runtime().Library().Runtime; v < 12080 {
			require.False(t, dev.Runtime().Library().CopyBatch)
			b.ToDevice(sc.mem, pointer(sc.host), 1)
			err := s.CopyBatch(&b)
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "CUDA 12.8")
			return
		}
		require.True(t, dev.Runtime().Library().CopyBatch)

		fill(sc.host, 6)
		require.NoError(t, s.Memset(sc.mem, 0xee, size))
		want := make([]byte, size)
		for i := range want {
			want[i] = 0xee
		}
		for _, p := range sc.at {
			b.ToDevice(sc.mem+cudart.DevPtr(p.mem), sc.pointer(p), p.n)
			b.ToDevice(sc.mem, pointer(sc.host), 0)
			copy(want[p.mem:], sc.host[p.host:p.host+p.n])
		}
		require.Equal(t, pieces, b.Len())
		require.NoError(t, s.CopyBatch(&b))
		b.Reset() // the arrays are C's no more
		require.Zero(t, b.Len())
		got := make([]byte, size)
		require.NoError(t, s.Synchronize(ctx))
		require.NoError(t, dev.CopyToHost(pointer(got), sc.mem, size))
		require.Equal(t, want, got, "to the device: every piece, and nothing beside them")

		b.Reset()
		clear(sc.host)
		clear(want)
		for _, p := range sc.at {
			b.ToHost(sc.pointer(p), sc.mem+cudart.DevPtr(p.mem), p.n)
			copy(want[p.host:], got[p.mem:p.mem+p.n])
		}
		for range 2 {
			require.NoError(t, s.CopyBatch(&b), "a list can be queued again")
		}
		require.NoError(t, s.Synchronize(ctx))
		require.Equal(t, want, sc.host, "to the host")
	})
}

func TestCopyBatchRefusals(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{Version: v})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			s := stream(t, dev)
			mem, host := device(t, dev, 64), pinned(t, dev, 64)
			var b cudart.CopyBatch
			b.ToDevice(mem, pointer(host), 8)
			b.ToDevice(mem+8, pointer(host), 57)
			err = s.CopyBatch(&b)
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			if v < 13000 {
				require.ErrorContains(t, err, "copy 1 of 2: 57 bytes")
			} else {
				require.ErrorContains(t, err, "2 copies on")
			}
			require.Equal(t, cudart.Code(0), rt.PendingError())
			sim.Fail("cudaMemcpyBatchAsync", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
			err = s.CopyBatch(&b)
			require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
			require.ErrorContains(t, err, "2 copies on", "an error that is not one copy's")

			calls := sim.Calls("cudaMemcpyBatchAsync")
			b.Reset()
			b.ToHost(pointer(host), mem, 8)
			b.ToHost(pointer(host[8:]), mem, -8)
			b.ToHost(pointer(host[8:]), mem, -9)
			err = s.CopyBatch(&b)
			require.ErrorIs(t, err, cudart.ErrInvalidValue)
			require.ErrorContains(t, err, "copy 1")
			require.ErrorContains(t, err, "size -8")
			require.Equal(t, calls, sim.Calls("cudaMemcpyBatchAsync"), "refused before the call")

			b.Reset()
			b.ToHost(pointer(host), mem, 8)
			require.NoError(t, s.CopyBatch(&b), "Reset removes the copy that was refused")
			require.NoError(t, s.Synchronize(context.Background()))
			closed, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			require.NoError(t, closed.Close())
			require.ErrorIs(t, closed.CopyBatch(&b), cudart.ErrClosed)
		})
	}
}

// A library of 12.8 runs on drivers of 12.0, which cannot do this.
func TestCopyBatchNeedsADriverToo(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Version: 12080, DriverVersion: 12040})
	require.False(t, rt.Library().CopyBatch)
}

// Batches of several goroutines on one stream and on several.
func TestCopyBatchFromManyGoroutines(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	const goroutines, pieces, maximum = 8, 40, 100
	sc := newScatter(t, dev, goroutines*pieces, maximum)
	fill(sc.host, 8)
	streams := []*cudart.Stream{stream(t, dev), stream(t, dev), stream(t, dev)}
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			var b cudart.CopyBatch
			s := streams[g%len(streams)]
			for range 5 {
				b.Reset()
				for _, p := range sc.at[g*pieces : (g+1)*pieces] {
					b.ToDevice(sc.mem+cudart.DevPtr(p.mem), sc.pointer(p), p.n)
				}
				assert.NoError(t, s.CopyBatch(&b))
			}
			assert.NoError(t, s.Synchronize(context.Background()))
		})
	}
	wg.Wait()
	got := make([]byte, len(sc.host))
	require.NoError(t, dev.CopyToHost(pointer(got), sc.mem, len(got)))
	for i, p := range sc.at {
		require.Equal(t, sc.host[p.host:p.host+p.n], got[p.mem:p.mem+p.n], "piece %d", i)
	}
}
