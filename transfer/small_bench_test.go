//go:build unix

package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostos"
)

// BenchmarkSmallUploads measures small copies of each size by one goroutine and by several,
// in memory that is not pinned, beside what CUDA does with such memory: cudaMemcpy, and a wait.
//
// On a stream copies return before they are complete; the stream is synchronized after
// every 64. Beside is uploads beside a large one. BothWays is large copies in both directions,
// and the memory that is pinned before and with the ring's extension.
func BenchmarkSmallUploads(b *testing.B) {
	for _, variant := range []string{"transfer", "cuda"} {
		b.Run(variant, func(b *testing.B) {
			r := newFixture(b, Options{})
			for _, goroutines := range []int{1, 16} {
				for _, n := range []int{64, 4 * kib, 32 * kib, 128 * kib, 256 * kib, mib} {
					for _, direction := range []string{"up", "down", "stream"} {
						b.Run(fmt.Sprintf("%s/goroutines=%d/%dB", direction, goroutines, n), func(b *testing.B) {
							benchmarkSmall(b, r, direction, variant == "cuda", goroutines, n)
						})
					}
				}
			}
		})
	}
	b.Run("Beside", func(b *testing.B) {
		r := newFixture(b, Options{})
		n := benchSize(256 << 20)
		large, src := r.device(n), touched(n)
		ctx, cancel := context.WithCancel(b.Context())
		var group sync.WaitGroup
		group.Go(func() {
			for ctx.Err() == nil {
				assert.NoError(b, r.c.Upload(context.Background(), large, src))
			}
		})
		for _, n := range []int{64, 4 * kib, 64 * kib} {
			for _, goroutines := range []int{1, 4} {
				b.Run(fmt.Sprintf("goroutines=%d/%dB", goroutines, n), func(b *testing.B) {
					benchmarkSmall(b, r, "up", false, goroutines, n)
				})
			}
		}
		cancel()
		group.Wait()
	})
	b.Run("BothWays", func(b *testing.B) {
		r := newFixture(b, Options{})
		n := benchSize(2 << 30)
		there, back, src, dst := r.device(n), r.device(n), touched(n), touched(n)
		idle := r.c.Stats().RingBytes
		rate(b, 2*n, func() {
			var group sync.WaitGroup
			group.Go(func() { assert.NoError(b, r.c.Upload(b.Context(), there, src)) })
			group.Go(func() { assert.NoError(b, r.c.Download(b.Context(), dst, back)) })
			group.Wait()
		})
		b.ReportMetric(float64(idle)/mib, "pinned-idle-MiB")
		b.ReportMetric(float64(r.c.Stats().RingBytes)/mib, "pinned-MiB")
	})
}

// benchmarkSmall is b.N copies of n bytes by so many goroutines together.
func benchmarkSmall(b *testing.B, r *fixture, direction string, cuda bool, goroutines, n int) {
	const places = 8 // of each goroutine, so that the caches do not hold the source
	mem, host := r.device(goroutines*n), touched(max(goroutines*places*n, 4096))
	ctx := context.Background()
	took := make([][]time.Duration, goroutines)
	var rounds atomic.Int64
	var group sync.WaitGroup
	streams := make([]*cudart.Stream, goroutines)
	for g := range streams {
		var err error
		switch {
		case cuda:
			streams[g], err = r.dev.StreamFromHandle(0) // cudaMemcpy's
		case direction == "stream":
			streams[g], err = r.dev.NewStream(cudart.StreamOptions{})
		default:
			continue
		}
		require.NoError(b, err)
		defer func() { require.NoError(b, streams[g].Close()) }()
	}
	used := hostos.CPUTime()
	b.ReportAllocs()
	b.ResetTimer()
	for g := range goroutines {
		group.Go(func() {
			at := mem + cudart.DevPtr(g*n)
			v, s := r.c, streams[g]
			if s != nil && !cuda {
				v = v.With(Call{Stream: s})
			}
			for i := rounds.Add(1); i <= int64(b.N); i = rounds.Add(1) {
				part := host[(g*places+int(i)%places)*n:][:n]
				begin := time.Now()
				var err error
				switch {
				case cuda && direction == "down":
					err = r.dev.CopyToHost(unsafe.Pointer(&part[0]), at, n)
				case cuda:
					err = errors.Join(r.dev.CopyToDevice(at, unsafe.Pointer(&part[0]), n), s.SynchronizeBlocking())
				case direction == "down":
					err = v.Download(ctx, part, at)
				default:
					err = v.Upload(ctx, at, part)
				}
				if s != nil && !cuda && len(took[g])%64 == 63 {
					err = errors.Join(err, s.Synchronize(ctx))
				}
				if !assert.NoError(b, err) {
					return
				}
				took[g] = append(took[g], time.Since(begin))
			}
			if s != nil {
				assert.NoError(b, s.Synchronize(ctx))
			}
		})
	}
	group.Wait()
	b.StopTimer()
	all := slices.Concat(took...)
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1e3, "median-µs")
	b.ReportMetric(float64(all[len(all)*99/100].Nanoseconds())/1e3, "p99-µs")
	b.ReportMetric((hostos.CPUTime()-used).Seconds()*1e6/float64(b.N), "cpu-µs")
}
