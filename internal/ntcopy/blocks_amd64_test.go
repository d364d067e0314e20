//go:build gc && !purego && !noasm && !race && !msan && !asan

package ntcopy

import (
	"bytes"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/cpu"
)

// variants names the implementations that this CPU has, the one that Copy uses first.
func variants() []string {
	if cpu.X86.HasAVX2 {
		return []string{"AVX2", "SSE2"}
	}
	return []string{"SSE2"}
}

func choose(name string) { avx2 = name == "AVX2" }

// Go's atomics and locks wait for non-temporal stores by themselves. A plain store
// does not, and to publish with one is a data race in Go; but it is what the fence
// is for, and what C code and devices may see. Without the fence half of the copies
// are late while the test has two CPUs, and hardly any while it shares one.
func TestCopyIsSeenBeforeALaterStore(t *testing.T) {
	testSeenBeforeALaterStore(t, func(dst, src []byte) { Copy(dst, src) })
}

func TestRowsAreSeenBeforeALaterStore(t *testing.T) {
	testSeenBeforeALaterStore(t, func(dst, src []byte) {
		Rows(dst, src, minRow, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
	})
}

func testSeenBeforeALaterStore(t *testing.T, copies func(dst, src []byte)) {
	withEach(t, func(t *testing.T) {
		const rounds = 500
		sources := [2][]byte{make([]byte, minCopy), bytes.Repeat([]byte{1}, minCopy)}
		dst := aligned(minCopy) // no tail, which ordinary stores would write
		var round, seen struct {
			_     [line]byte
			value uint32
			_     [line]byte
		}
		wait := func(p *uint32, value uint32) {
			for i := 1; atomic.LoadUint32(p) != value; i++ {
				if i%10_000 == 0 { // about 10 us, in which both goroutines get a thread
					runtime.Gosched()
				}
			}
		}
		done := make(chan int)
		go func() {
			early := 0
			for i := uint32(1); i <= rounds; i++ {
				wait(&round.value, i)
				if want := byte(i % 2); dst[minCopy-1] != want || dst[minCopy-line] != want || dst[minCopy-2*line] != want {
					early++
				}
				atomic.StoreUint32(&seen.value, i)
			}
			done <- early
		}()
		for i := uint32(1); i <= rounds; i++ {
			copies(dst, sources[i%2])
			storePlain(&round.value, i)
			wait(&seen.value, i)
		}
		assert.Zero(t, <-done, "copies that another CPU saw too late, of %d", rounds)
	})
}

//go:noinline
func storePlain(p *uint32, value uint32) { *p = value }
