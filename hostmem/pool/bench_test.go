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

// Get and Release with a stream. With nothing queued in between no call into CUDA is
// made. With a copy of 64 bytes in each round an event is recorded, and one is queried
// for: the C program testdata/baseline/calls.c has the same by hand, for a few buffers.
func BenchmarkPoolStreamRelease(b *testing.B) {
	for _, name := range []string{"nothing_queued", "copy64_reuse"} {
		b.Run(name, func(b *testing.B) {
			queue := name != "nothing_queued"
			benchmarkPool(b, func(b *testing.B, p *Pool, s *cudart.Stream, n int) {
				ctx := context.Background()
				dst, err := s.Device().Malloc(64)
				require.NoError(b, err)
				for b.Loop() {
					l, err := p.Get(ctx, n)
					if err == nil && queue {
						err = l.CopyToDevice(s, dst, 0, 64)
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
				require.NoError(b, s.Device().Free(dst))
				b.ReportMetric(float64(p.Stats().Misses), "blocks")
			})
		})
	}
}

// A small Get that has to cut a new block, where arenas are fragmented: every second run
// is free, and too short. It must not take long however many arenas there are.
func BenchmarkPoolCutFragmented(b *testing.B) {
	dev := testgpu.Device(b)
	ctx := context.Background()
	for _, size := range []int{16 << 20, 256 << 20} {
		b.Run(fmt.Sprintf("%dMiB", size>>20), func(b *testing.B) {
			p, err := New(dev, Options{IdleTime: -1})
			require.NoError(b, err)
			const n, longer = singleRun, 2 * singleRun
			var leases []Lease
			for range size / n {
				l, err := p.Get(ctx, n)
				require.NoError(b, err)
				leases = append(leases, l)
			}
			c := p.core
			for i, l := range leases {
				if i%2 == 1 {
					require.NoError(b, l.Release())
				}
			}
			_, err = p.Trim(context.Background(), 0) // the free blocks become free runs
			require.NoError(b, err)
			class, short := classOf(longer), classOf(n)
			b.ReportAllocs()
			for b.Loop() {
				c.mu.Lock()
				for _, a := range c.arenas {
					if s := a.cut(class); s != nil { // the last arena has a free run
						a.join(s)
						break
					}
				}
				// A run that was cut and is free again makes an arena worth a look.
				if s := c.arenas[0].cut(short); s != nil {
					c.arenas[0].join(s)
				}
				c.mu.Unlock()
			}
			b.StopTimer()
			for i, l := range leases {
				if i%2 == 0 {
					require.NoError(b, l.Release())
				}
			}
			require.NoError(b, p.Close())
		})
	}
}
