package transfer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline/transfer.c and transfer.py measure the same, under the same
// names.

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

// rate runs one, which copies n bytes.
func rate(b *testing.B, n int, one func()) {
	one() // warm up
	for b.Loop() {
		one()
	}
	b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
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
	r := newRig(b, Options{})
	n := benchSize(2 << 30)
	dst, src := r.device(n), touched(n)
	b.Run("pageable/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() { require.NoError(b, r.c.Upload(b.Context(), dst, src)) })
	})
	for _, n := range []int{64, 4 * kib, 64 * kib, 256 * kib, mib, 4 * mib, 16 * mib, 64 * mib} {
		b.Run(fmt.Sprintf("pageable/%dB", n), func(b *testing.B) {
			rate(b, n, func() { require.NoError(b, r.c.Upload(b.Context(), dst, src[:n])) })
		})
	}
	b.Run("pinned/"+benchName(n), func(b *testing.B) {
		buf, err := hostmem.Alloc(b.Context(), r.dev, n, hostmem.Options{})
		require.NoError(b, err)
		defer func() { require.NoError(b, buf.Close()) }()
		rate(b, n, func() { require.NoError(b, r.c.Upload(b.Context(), dst, buf.Bytes())) })
	})
}

func BenchmarkDownload(b *testing.B) {
	r := newRig(b, Options{})
	n := benchSize(2 << 30)
	src, dst := r.device(n), touched(n)
	b.Run("pageable/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() { require.NoError(b, r.c.Download(b.Context(), dst, src)) })
	})
	for _, n := range []int{64, 4 * kib, 64 * kib, 256 * kib, mib, 4 * mib, 16 * mib, 64 * mib} {
		b.Run(fmt.Sprintf("pageable/%dB", n), func(b *testing.B) {
			rate(b, n, func() { require.NoError(b, r.c.Download(b.Context(), dst[:n], src)) })
		})
	}
	n = benchSize(1 << 30)
	b.Run("new/"+benchName(n), func(b *testing.B) {
		rate(b, n, func() {
			mem, err := r.c.DownloadNew(b.Context(), src, n)
			require.NoError(b, err)
			b.StopTimer()
			require.NoError(b, mem.Close())
			b.StartTimer()
		})
	})
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

func BenchmarkFile(b *testing.B) {
	r := newRig(b, Options{})
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
	}
}

// BenchmarkBothWays is an upload and a download at once, and the sum of both.
func BenchmarkBothWays(b *testing.B) {
	r := newRig(b, Options{})
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
	r := newRig(b, Options{})
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
