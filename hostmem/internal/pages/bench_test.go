//go:build linux && !android && (amd64 || arm64)

package pages_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// BenchmarkPopulate maps and populates 1 GiB with every number of threads and kind of
// page. "auto" is the default. Unmapping is not timed.
func BenchmarkPopulate(b *testing.B) {
	sys := pages.NewSystem(os.DirFS("/"))
	const n = 1<<30 + 1
	for _, noHuge := range []bool{false, true} {
		for _, threads := range []int{0, 1, 2, 3, 4, 6, 8, 12, 16} {
			for _, item := range []int{0, 16 << 20, 64 << 20} {
				if item != 0 && threads%2 == 1 {
					continue
				}
				b.Run(fmt.Sprintf("%s/threads=%s/item=%s", kindName(noHuge), orAuto(threads), orAuto(item>>20)), func(b *testing.B) {
					b.SetBytes(n)
					for b.Loop() {
						r := populated(b, n, pages.Options{System: sys, NoHuge: noHuge}, pages.Populate{Threads: threads, Item: item})
						b.StopTimer()
						require.NoError(b, r.Unmap())
						b.StartTimer()
					}
				})
			}
		}
	}
}

func populated(b *testing.B, n int, o pages.Options, p pages.Populate) *pages.Region {
	r, err := pages.Map(b.Context(), n, o)
	require.NoError(b, err)
	require.NoError(b, r.Populate(b.Context(), p))
	return r
}

// BenchmarkMapUnmap is the cost of small regions, populated.
func BenchmarkMapUnmap(b *testing.B) {
	sys := pages.NewSystem(os.DirFS("/"))
	for _, n := range []int{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				require.NoError(b, populated(b, n, pages.Options{System: sys}, pages.Populate{}).Unmap())
			}
		})
	}
}

func kindName(noHuge bool) string {
	if noHuge {
		return "4KiB"
	}
	return "huge"
}

func orAuto(n int) string {
	if n == 0 {
		return "auto"
	}
	return fmt.Sprint(n)
}
