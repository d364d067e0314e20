package pool

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

var poolSizes = []int{4 << 10, 1 << 20, 16 << 20}

func benchmarkPool(b *testing.B, run func(b *testing.B, p *Pool, s *cudart.Stream, n int)) {
	dev := testgpu.Device(b)
	for _, n := range poolSizes {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			p, err := New(dev, Options{})
			require.NoError(b, err)
			s, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(b, err)
			b.ReportAllocs()
			run(b, p, s, n)
			require.NoError(b, s.Synchronize(context.Background()))
			require.NoError(b, s.Close())
			require.NoError(b, p.Close())
		})
	}
}

// Get and Release when nothing was queued.
func BenchmarkPoolHit(b *testing.B) {
	benchmarkPool(b, func(b *testing.B, p *Pool, _ *cudart.Stream, n int) {
		ctx := context.Background()
		for b.Loop() {
			l, err := p.Get(ctx, n)
			if err == nil {
				err = l.Release()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}

// The same from as many goroutines as -cpu says.
func BenchmarkPoolHitParallel(b *testing.B) {
	benchmarkPool(b, func(b *testing.B, p *Pool, _ *cudart.Stream, n int) {
		b.RunParallel(func(pb *testing.PB) {
			ctx := context.Background()
			for pb.Next() {
				l, err := p.Get(ctx, n)
				if err == nil {
					err = l.Release()
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds()/1e6, "million/s")
	})
}

// Get and Release on a stream, which record an event and ask for one. The time
// of the same two calls alone is "calls".
func BenchmarkPoolStreamRelease(b *testing.B) {
	benchmarkPool(b, func(b *testing.B, p *Pool, s *cudart.Stream, n int) {
		ctx := context.Background()
		for b.Loop() {
			l, err := p.Get(ctx, n)
			if err == nil {
				err = l.Release(s)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
		st := p.Stats()
		b.ReportMetric(float64(st.Misses), "blocks")
	})
}

// What BenchmarkPoolStreamRelease is to be compared with: the two calls alone.
func BenchmarkRecordAndQuery(b *testing.B) {
	dev := testgpu.Device(b)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	e, err := dev.NewEvent(cudart.EventOptions{})
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		err := s.Record(e)
		if err == nil {
			_, err = e.Query()
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	require.NoError(b, e.Close())
	require.NoError(b, s.Synchronize(context.Background()))
	require.NoError(b, s.Close())
}
