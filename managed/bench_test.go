package managed

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

func benchRig(b *testing.B) (*cudart.Device, *Allocator) {
	dev := testgpu.Device(b)
	a, err := New(dev, Options{AllowExclusive: true})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, a.Close()) })
	return dev, a
}

// Get and Release of a pool when nothing was queued.
func BenchmarkPoolHit(b *testing.B) {
	_, a := benchRig(b)
	p, err := a.NewPool(PoolOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, p.Close(context.Background())) }()
	ctx := context.Background()
	b.Run("one", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			l, err := p.Get(ctx, 1<<20)
			if err == nil {
				err = l.Release()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				l, err := p.Get(ctx, 1<<20)
				if err == nil {
					err = l.Release()
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}

// Get for a stream, work of 64 bytes on it, and Release to the same stream.
func BenchmarkPoolStream(b *testing.B) {
	dev, a := benchRig(b)
	p, err := a.NewPool(PoolOptions{})
	require.NoError(b, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		l, err := p.GetFor(ctx, s, 1<<20)
		if err == nil {
			err = s.Memset(l.DevPtr(), 1, 64)
		}
		if err == nil {
			err = l.Release(s)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	require.NoError(b, s.Synchronize(ctx))
	require.NoError(b, s.Close())
	require.NoError(b, p.Close(ctx))
}

// Alloc and Close beside the two calls of CUDA that they make, one after the other: the
// difference is what counting takes.
func BenchmarkAlloc(b *testing.B) {
	dev, a := benchRig(b)
	b.Run("managed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			m, err := a.Alloc(1 << 20)
			if err == nil {
				err = m.Close()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cudaMallocManaged", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p, err := dev.MallocManaged(1<<20, cudart.ManagedGlobal)
			if err == nil {
				err = dev.Free(cudart.DevPtr(uintptr(p)))
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}
