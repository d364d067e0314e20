//go:build unix

package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline/transfer.py measures the same, under the same names; transfer.c has those of
// internal/benchmarks.

// benchSize is what is copied; on a real host that much is worth measuring.
func benchSize(n int) int {
	if testgpu.Real() {
		return n
	}
	return n >> 5
}

func benchName(n int) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%dGiB", n>>30)
	}
	return fmt.Sprintf("%dMiB", n>>20)
}

// rate runs one, which copies n bytes, and reports GB/s and CPU seconds a GB.
func rate(b *testing.B, n int, one func()) {
	one() // warm up
	used := hostos.CPUTime()
	for b.Loop() {
		one()
	}
	gb := float64(n) * float64(b.N) / 1e9
	b.ReportMetric((hostos.CPUTime()-used).Seconds()/gb, "cpu-s/GB")
	b.ReportMetric(gb/b.Elapsed().Seconds(), "GB/s")
}

// touched returns memory that is resident.
func touched(n int) []byte {
	b := make([]byte, n)
	copyFresh(b, b)
	for i := 0; i < n; i += 4096 {
		b[i] = byte(i >> 12)
	}
	return b
}

func BenchmarkUpload(b *testing.B) {
	r := newFixture(b, Options{})
	n := benchSize(2 << 30)
	dst, src := r.device(n), touched(n)
	b.Run("pageable/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() { require.NoError(b, r.c.Upload(b.Context(), dst, src)) })
	})
	b.Run("pinned/"+benchName(n), func(b *testing.B) {
		buf, err := hostmem.Alloc(b.Context(), r.dev, n, hostmem.Options{})
		require.NoError(b, err)
		defer func() { require.NoError(b, buf.Close()) }()
		rate(b, n, func() { require.NoError(b, r.c.Upload(b.Context(), dst, buf.Bytes())) })
	})
}

func BenchmarkDownload(b *testing.B) {
	r := newFixture(b, Options{})
	n := benchSize(2 << 30)
	src, dst := r.device(n), touched(n)
	b.Run("pageable/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() { require.NoError(b, r.c.Download(b.Context(), dst, src)) })
	})
	n = benchSize(1 << 30)
	// All stay in use: the runtime has to clear memory that it uses again.
	var all [][]byte
	b.Run("make/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() {
			b.StopTimer()
			all = append(all, make([]byte, n))
			b.StartTimer()
			require.NoError(b, r.c.Download(b.Context(), all[len(all)-1], src))
		})
	})
	runtime.KeepAlive(all)
}

// BenchmarkSizes is copies of each size, beside what cudaMemcpy takes for the same. Its
// uploads of pageable memory may return before the device has the bytes, as "queued" ones
// do, on a stream; "synced" are those with a wait for that, which is what Upload promises.
func BenchmarkSizes(b *testing.B) {
	r := newFixture(b, Options{})
	total := benchSize(1 << 30)
	mem, host := r.device(total), touched(total)
	pointer := func(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
	def, err := r.dev.NewStream(cudart.StreamOptions{Blocking: true}) // it waits for cudaMemcpy's stream
	require.NoError(b, err)
	defer func() { require.NoError(b, def.Close()) }()
	legacy, err := r.dev.StreamFromHandle(0) // cudaMemcpy's stream
	require.NoError(b, err)
	defer func() { require.NoError(b, legacy.Close()) }()
	for _, n := range []int{1, 4 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, mib, 2 * mib, 4 * mib, 16 * mib, 32 * mib, 64 * mib, 256 * mib, 1 << 30} {
		if n > total {
			break
		}
		at := 0 // elsewhere each time, so that the caches do not hold the source
		next := func() []byte {
			at = (at + 1) % 8
			off := at * (total / 8) % (total - n + 1)
			return host[off : off+n]
		}
		ctx := context.Background()
		for _, variant := range []struct {
			name string
			one  func() error
		}{
			{"up/transfer", func() error { return r.c.Upload(ctx, mem, next()) }},
			{"up/cudaMemcpy", func() error { return r.dev.CopyToDevice(mem, pointer(next()), n) }},
			{"up/queued", func() error { return r.c.With(Call{Stream: def}).Upload(ctx, mem, next()) }},
			{"up/synced", func() error {
				return errors.Join(r.dev.CopyToDevice(mem, pointer(next()), n), legacy.SynchronizeBlocking())
			}},
			{"down/transfer", func() error { return r.c.Download(ctx, next(), mem) }},
			{"down/cudaMemcpy", func() error { return r.dev.CopyToHost(pointer(next()), mem, n) }},
		} {
			b.Run(fmt.Sprintf("%dB/%s", n, variant.name), func(b *testing.B) {
				rate(b, n, func() { require.NoError(b, variant.one()) })
			})
		}
	}
}

// BenchmarkMany is 16 goroutines that upload 1 MiB each, again and again.
func BenchmarkMany(b *testing.B) {
	const goroutines, n = 16, mib
	r := newFixture(b, Options{})
	mem, host := r.device(goroutines*n), touched(benchSize(1<<30))
	took := make([][]time.Duration, goroutines)
	var rounds atomic.Int64
	used := hostos.CPUTime()
	b.ResetTimer()
	var group sync.WaitGroup
	for g := range goroutines {
		group.Go(func() {
			for i := rounds.Add(1); i <= int64(b.N); i = rounds.Add(1) {
				off := int(i) * n % (len(host) - n)
				begin := time.Now()
				if !assert.NoError(b, r.c.Upload(context.Background(), mem+cudart.DevPtr(g*n), host[off:off+n])) {
					return
				}
				took[g] = append(took[g], time.Since(begin))
			}
		})
	}
	group.Wait()
	b.StopTimer()
	gb := float64(n) * float64(b.N) / 1e9
	all := slices.Concat(took...)
	slices.Sort(all)
	b.ReportMetric(gb/b.Elapsed().Seconds(), "GB/s")
	b.ReportMetric((hostos.CPUTime()-used).Seconds()/gb, "cpu-s/GB")
	b.ReportMetric(float64(all[len(all)/2].Microseconds()), "median-µs")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-µs")
}

func BenchmarkFile(b *testing.B) {
	r := newFixture(b, Options{})
	n := benchSize(4 << 30)
	mem := r.device(n)
	for _, dir := range []string{"/dev/shm", os.TempDir()} {
		name := filepath.Join(dir, "pinned-bench")
		b.Cleanup(func() { _ = os.Remove(name) })
		open := func(b *testing.B) *os.File {
			f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
			require.NoError(b, err)
			return f
		}
		b.Run("download"+dir+"/new/"+benchName(n), func(b *testing.B) {
			rate(b, n, func() {
				b.StopTimer()
				_ = os.Remove(name)
				f := open(b)
				b.StartTimer()
				_, err := r.c.DownloadTo(b.Context(), f, 0, mem, n)
				require.NoError(b, err)
				require.NoError(b, f.Close())
			})
		})
		b.Run("download"+dir+"/again/"+benchName(n), func(b *testing.B) {
			f := open(b)
			defer f.Close()
			rate(b, n, func() {
				_, err := r.c.DownloadTo(b.Context(), f, 0, mem, n)
				require.NoError(b, err)
			})
		})
		b.Run("upload"+dir+"/"+benchName(n), func(b *testing.B) {
			f := open(b)
			defer f.Close()
			_, err := r.c.DownloadTo(b.Context(), f, 0, mem, n)
			require.NoError(b, err)
			rate(b, n, func() {
				_, err := r.c.UploadFrom(b.Context(), mem, f, 0, n)
				require.NoError(b, err)
			})
		})
		b.Run("reader"+dir+"/"+benchName(n), func(b *testing.B) {
			f := open(b)
			defer f.Close()
			rate(b, n, func() {
				_, err := f.Seek(0, io.SeekStart)
				require.NoError(b, err)
				_, err = r.c.UploadReader(b.Context(), mem, f, n)
				require.NoError(b, err)
			})
		})
	}
}

// BenchmarkBothWays is an upload and a download at once, and the sum of both.
func BenchmarkBothWays(b *testing.B) {
	r := newFixture(b, Options{})
	n := benchSize(2 << 30)
	there, back := r.device(n), r.device(n)
	both := func(b *testing.B, src, dst []byte) {
		rate(b, 2*n, func() {
			var group sync.WaitGroup
			group.Go(func() { assert.NoError(b, r.c.Upload(b.Context(), there, src)) })
			group.Go(func() { assert.NoError(b, r.c.Download(b.Context(), dst, back)) })
			group.Wait()
		})
	}
	b.Run("pinned/"+benchName(n), func(b *testing.B) {
		var mem [2][]byte
		for i := range mem {
			buf, err := hostmem.Alloc(b.Context(), r.dev, n, hostmem.Options{})
			require.NoError(b, err)
			defer func() { require.NoError(b, buf.Close()) }()
			mem[i] = buf.Bytes()
		}
		both(b, mem[0], mem[1])
	})
	b.Run("pageable/"+benchName(n), func(b *testing.B) { both(b, touched(n), touched(n)) })
}

// BenchmarkScattered is 10,000 copies of 4 KiB, scattered on both sides.
func BenchmarkScattered(b *testing.B) {
	const count, n = 10_000, 4096
	r := newFixture(b, Options{})
	mem, host := r.device(2*count*n), touched(2*count*n)
	order := rand.New(rand.NewPCG(1, 2)).Perm(count)
	parts := make([]Part, count)
	for i, at := range rand.New(rand.NewPCG(3, 4)).Perm(count) {
		parts[i] = Part{Device: mem + cudart.DevPtr(2*at*n), Host: host[2*order[i]*n:][:n]}
	}
	for name, all := range map[string]func(context.Context, []Part) error{"upload": r.c.UploadAll, "download": r.c.DownloadAll} {
		b.Run(name, func(b *testing.B) {
			rate(b, count*n, func() { require.NoError(b, all(b.Context(), parts)) })
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*count), "ns/copy")
		})
	}
}
