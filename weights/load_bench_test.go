//go:build unix

package weights_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// benchEnv is the size of BenchmarkLoad's file in MiB.
const benchEnv = "PINNED_BENCH_WEIGHTS_MIB"

// benchBytes is the size of a file: 4 GiB for real GPUs (1 GiB with -short), and 64 MiB
// for simulated ones.
func benchBytes(b *testing.B) int {
	if v := os.Getenv(benchEnv); v != "" {
		n, err := strconv.Atoi(v)
		require.NoError(b, err, benchEnv)
		return n * mib
	}
	switch {
	case !testgpu.Real():
		return 64 * mib
	case testing.Short():
		return 1024 * mib
	}
	return 4096 * mib
}

// layers writes a safetensors file of n bytes of tensors, as a language model has
// them: large matrices and small norms, of sizes at random. It is in memory where the
// system has /dev/shm, else in the page cache.
func layers(b *testing.B, n int) *weights.Model {
	b.Helper()
	dir := b.TempDir()
	if shared, err := os.MkdirTemp("/dev/shm", "weights"); err == nil {
		b.Cleanup(func() { _ = os.RemoveAll(shared) })
		dir = shared
	}
	var header bytes.Buffer
	for off, i := 0, 0; off < n; i++ {
		size := min([]int{48 * mib, 16 * mib, 8192, 4*mib + 2}[i%4], n-off)
		fmt.Fprintf(&header, `,"layers.%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}`, i, size, off, off+size)
		off += size
	}
	path := filepath.Join(dir, "model.safetensors")
	f, err := os.Create(path)
	require.NoError(b, err)
	_, err = f.Write(st("{"+header.String()[1:]+"}", 0))
	require.NoError(b, err)
	block := bytes.Repeat([]byte("pinned weights. "), mib/16)
	for left := n; left > 0; {
		k, err := f.Write(block[:min(left, len(block))])
		require.NoError(b, err)
		left -= k
	}
	require.NoError(b, f.Close())
	m, err := weights.OpenModel(path)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, m.Close()) })
	return m
}

// BenchmarkLoad loads a file from memory onto 1, 2, 4 and 8 of the devices there are:
// each its own share of the tensors, and all of them to each. GB/s are of the file. A
// Fanout that is open keeps the rings.
func BenchmarkLoad(b *testing.B) {
	n := benchBytes(b)
	m := layers(b, n)
	all := devicesOf(b, 8)
	for count := 1; count <= len(all); count *= 2 {
		for _, how := range []string{"split", "replicated"} {
			if count == 1 && how == "replicated" {
				continue
			}
			b.Run(fmt.Sprintf("%d/%s/%dMiB", count, how, n/mib), func(b *testing.B) {
				var shares []weights.Share
				before := 0
				for t := range m.Tensors() {
					for d := range count {
						if how == "replicated" || d == before*count/n {
							shares = append(shares, weights.Share{Part: t.Whole(), Device: d})
						}
					}
					before += t.Size
				}
				plan, err := weights.PlanShares(shares, weights.PlanOptions{})
				require.NoError(b, err)
				open, err := transfer.NewFanout(b.Context(), all[:count], transfer.Options{})
				require.NoError(b, err)
				defer func() { require.NoError(b, open.Close()) }()
				p := (&bench{}).planned(b, all[:count], plan)
				load := func() { require.NoError(b, plan.Load(b.Context(), p.memory, weights.LoadOptions{})) }
				load() // warm up
				used := hostos.CPUTime()
				for b.Loop() {
					load()
				}
				gb := float64(n) * float64(b.N) / 1e9
				b.ReportMetric((hostos.CPUTime()-used).Seconds()/gb, "cpu-s/GB")
				b.ReportMetric(gb/b.Elapsed().Seconds(), "GB/s")
			})
		}
	}
}
