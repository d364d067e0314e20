//go:build linux && !android && (amd64 || arm64)

package pages_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// BenchmarkPopulate maps and populates 1 GiB with every number of threads, way
// and kind of page. "auto" is what Map does by itself. Unmapping is not timed.
func BenchmarkPopulate(b *testing.B) {
	sys := pages.NewSystem(os.DirFS("/"))
	const n = 1<<30 + 1
	for _, huge := range []pages.HugeMode{pages.HugeAuto, pages.HugeNever} {
		for _, method := range []pages.Method{pages.Touch, pages.Advise} {
			for _, threads := range []int{0, 1, 2, 3, 4, 6, 8, 12, 16} {
				for _, item := range []int{0, 16 << 20, 64 << 20} {
					if item != 0 && threads%2 == 1 {
						continue
					}
					b.Run(fmt.Sprintf("%s/%s/threads=%s/item=%s", kindName(huge), methodName(method), orAuto(threads), orAuto(item>>20)), func(b *testing.B) {
						o := pages.Options{System: sys, HugePages: huge, Populate: &pages.Populate{Threads: threads, Item: item, Method: method}}
						b.SetBytes(n)
						for b.Loop() {
							r, err := pages.Map(b.Context(), n, o)
							require.NoError(b, err)
							b.StopTimer()
							require.NoError(b, r.Unmap())
							b.StartTimer()
						}
					})
				}
			}
		}
	}
}

// BenchmarkMapUnmap is the cost of small regions, populated.
func BenchmarkMapUnmap(b *testing.B) {
	sys := pages.NewSystem(os.DirFS("/"))
	for _, n := range []int{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				r, err := pages.Map(b.Context(), n, pages.Options{System: sys, Populate: &pages.Populate{}})
				require.NoError(b, err)
				require.NoError(b, r.Unmap())
			}
		})
	}
}

func kindName(m pages.HugeMode) string {
	if m == pages.HugeNever {
		return "4KiB"
	}
	return "huge"
}

func methodName(m pages.Method) string {
	return [...]string{pages.Touch: "touch", pages.Advise: "madvise"}[m]
}

func orAuto(n int) string {
	if n == 0 {
		return "auto"
	}
	return fmt.Sprint(n)
}
