package ntcopy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	margin = 256  // bytes around the destination that Copy must leave alone
	fill   = 0xa5 // what is there, and in the destination before the copy
)

// withEach runs the test with every implementation that this CPU has.
func withEach(t *testing.T, test func(t *testing.T)) {
	for _, name := range variants() {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { choose(variants()[0]) })
			choose(name)
			test(t)
		})
	}
}

// An arena holds a source and a destination for copies of up to size bytes, each
// at any offset from 0 to 127 from the start of a line.
type arena struct {
	src, dst []byte
	blank    []byte // as long as dst, full of fill
}

func newArena(size int) *arena {
	a := &arena{src: aligned(size + 128), dst: aligned(size + 128 + 2*margin)}
	a.blank = bytes.Repeat([]byte{fill}, len(a.dst))
	randomize(a.src, 1)
	return a
}

// aligned returns n bytes that start on a multiple of 128.
func aligned(n int) []byte {
	b := make([]byte, n+127)
	for uintptr(unsafe.Pointer(&b[0]))%128 != 0 {
		b = b[1:]
	}
	return b[:n]
}

func randomize(b []byte, seed uint64) {
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	_, _ = r.Read(b)
}

// check copies n bytes from one offset to another and looks at the destination
// and its surroundings.
func (a *arena) check(t testing.TB, dstAt, srcAt, n int) {
	at := margin + dstAt
	around := a.dst[at-margin : at+n+margin]
	copy(around, a.blank)
	src := a.src[srcAt : srcAt+n]
	dst := around[margin : margin+n : margin+n]
	if got := Copy(dst, src); got != n {
		require.FailNow(t, "wrong count", "%d bytes from offset %d to offset %d: returned %d", n, srcAt, dstAt, got)
	}
	if i := firstDifference(dst, src); i >= 0 {
		require.FailNow(t, "wrong copy", "%d bytes from offset %d to offset %d: byte %d is %#x and should be %#x", n, srcAt, dstAt, i, dst[i], src[i])
	}
	if !filled(around[:margin]) || !filled(around[margin+n:]) {
		require.FailNow(t, "wrote outside the destination", "%d bytes from offset %d to offset %d", n, srcAt, dstAt)
	}
}

// firstDifference returns -1 if a and b are equal.
func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

func filled(b []byte) bool { return bytes.Count(b, []byte{fill}) == len(b) }

func TestEveryAlignment(t *testing.T) {
	withEach(t, func(t *testing.T) {
		lengths := []int{100, minCopy - 1, minCopy, minCopy + 77, minCopy + block + 63}
		a := newArena(lengths[len(lengths)-1])
		for dstAt := range 128 {
			for srcAt := range 128 {
				for _, n := range lengths {
					a.check(t, dstAt, srcAt, n)
				}
			}
		}
	})
}

func TestEveryLength(t *testing.T) {
	withEach(t, func(t *testing.T) {
		a := newArena(minCopy + 1100)
		for n := range 1100 {
			for _, at := range []struct{ dst, src int }{{0, 0}, {1, 0}, {0, 1}, {63, 17}} {
				a.check(t, at.dst, at.src, n)
				a.check(t, at.dst, at.src, minCopy-2+n)
			}
		}
	})
}

func TestLengthsAroundThePieces(t *testing.T) {
	withEach(t, func(t *testing.T) {
		a := newArena(3*maxPiece + 2*block)
		for _, pieces := range []int{1, 2, 3} {
			for _, by := range []int{-block - 1, -block, -line - 1, -line, -1, 0, 1, line - 1, line, line + 1, block - 1, block, block + 1} {
				for _, at := range []struct{ dst, src int }{{0, 0}, {1, 0}, {63, 0}, {64, 5}, {17, 127}} {
					a.check(t, at.dst, at.src, pieces*maxPiece+by)
					a.check(t, at.dst, at.src, pieces*maxPiece+by+(-at.dst&(line-1))) // the pieces and no tail
				}
			}
		}
	})
}

func TestRandomLengths(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const largest = 5 << 20
		a := newArena(largest)
		r := rand.New(rand.NewPCG(1, 2))
		for range 60 {
			a.check(t, r.IntN(128), r.IntN(128), r.IntN(largest))
		}
	})
}

func TestTheShorterSliceCounts(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for _, n := range []int{0, 1, 100, minCopy - 1, minCopy, minCopy + 1, maxPiece + 5} {
			long := make([]byte, n+300)
			randomize(long, 3)

			dst := bytes.Repeat([]byte{fill}, n+300)
			assert.Equal(t, n, Copy(dst, long[:n]), "from the shorter one, %d bytes", n)
			assert.True(t, bytes.Equal(dst[:n], long[:n]), "%d bytes", n)
			assert.True(t, filled(dst[n:]), "wrote past %d bytes", n)

			dst = bytes.Repeat([]byte{fill}, n+300)
			assert.Equal(t, n, Copy(dst[:n], long), "into the shorter one, %d bytes", n)
			assert.True(t, bytes.Equal(dst[:n], long[:n]), "%d bytes", n)
			assert.True(t, filled(dst[n:]), "wrote past the length of %d bytes, into the capacity", n)
		}
		assert.Zero(t, Copy(nil, make([]byte, minCopy)))
		assert.Zero(t, Copy(make([]byte, minCopy), nil))
		assert.Zero(t, Copy(nil, nil))
	})
}

func TestSliceOntoItself(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for _, n := range []int{100, minCopy + 1, maxPiece + block + 1} {
			b := make([]byte, n)
			randomize(b, 4)
			want := bytes.Clone(b)
			assert.Equal(t, n, Copy(b, b))
			assert.True(t, bytes.Equal(want, b), "%d bytes", n)
		}
	})
}

// The source is shared, the destinations touch each other within a line, and a
// plain atomic says that a part is complete.
func TestGoroutinesCopyAtTheSameTime(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const part, parts, rounds = maxPiece + minCopy + 37, 8, 20
		src, dst := make([]byte, part), make([]byte, parts*part)
		randomize(src, 5)
		for range rounds {
			clear(dst)
			var complete [parts]atomic.Bool
			var wg sync.WaitGroup
			for i := range parts {
				wg.Go(func() {
					Copy(dst[i*part:(i+1)*part], src)
					complete[i].Store(true)
				})
			}
			for i := range parts {
				for !complete[i].Load() {
					runtime.Gosched()
				}
				require.Equal(t, -1, firstDifference(dst[i*part:(i+1)*part], src), "part %d", i)
			}
			wg.Wait()
		}
	})
}

// Copy runs on a stack that has grown, so a garbage collection moves it to a
// smaller one: at the entry of a function, such as the one that Copy calls after it
// has found the alignment of the destination.
func TestDestinationOnAStackThatMoves(t *testing.T) {
	withEach(t, func(t *testing.T) {
		src := make([]byte, minCopy+500)
		randomize(src, 6)
		for at := 0; at < 128; at += 17 {
			var collected atomic.Int32
			wrong := make(chan int)
			go func() {
				growStack(40)
				var dst [minCopy + 700]byte // does not escape
				bad := 0
				for collected.Load() < 2 {
					clear(dst[:])
					if n := Copy(dst[at:], src); n != len(src) || !bytes.Equal(dst[at:at+n], src) {
						bad++
					}
				}
				wrong <- bad
			}()
			for range 2 {
				runtime.GC()
				collected.Add(1)
			}
			assert.Zero(t, <-wrong, "offset %d", at)
		}
	})
}

// growStack uses depth KiB of stack.
//
//go:noinline
func growStack(depth int) byte {
	var frame [1 << 10]byte
	if depth > 0 {
		frame[depth] = growStack(depth - 1)
	}
	return frame[depth] + 1
}

func TestCopyAllocatesNothing(t *testing.T) {
	withEach(t, func(t *testing.T) {
		dst, src := make([]byte, maxPiece+minCopy), make([]byte, maxPiece+minCopy)
		for _, n := range []int{100, minCopy, maxPiece + minCopy} {
			assert.Zero(t, testing.AllocsPerRun(10, func() { Copy(dst, src[:n]) }), "%d bytes", n)
		}
	})
}

func FuzzCopy(f *testing.F) {
	f.Add([]byte("pinned"), uint8(0), uint8(0), uint32(minCopy), uint32(minCopy))
	f.Add([]byte{0, 1, 2}, uint8(63), uint8(1), uint32(maxPiece+100), uint32(maxPiece+block))
	f.Add([]byte{}, uint8(0), uint8(0), uint32(0), uint32(1))
	f.Fuzz(func(t *testing.T, content []byte, dstAt, srcAt uint8, dstLen, srcLen uint32) {
		const most = 2*maxPiece + minCopy
		src := make([]byte, int(srcAt)+int(srcLen%most))
		for i := range src {
			src[i] = byte(i >> 8)
			if len(content) > 0 {
				src[i] += content[i%len(content)]
			}
		}
		src = src[srcAt:]
		dst := bytes.Repeat([]byte{fill}, int(dstAt)+int(dstLen%most)+margin)
		want := bytes.Clone(dst)
		end := len(dst) - margin
		for _, name := range variants() {
			choose(name)
			n := Copy(dst[dstAt:end], src)
			assert.Equal(t, copy(want[dstAt:end], src), n, name)
			require.Equal(t, -1, firstDifference(dst, want), name)
			copy(dst, bytes.Repeat([]byte{fill}, len(dst)))
		}
		choose(variants()[0])
	})
}

// BenchmarkCopy copies out of a source that stays in the cache, up to 512 KiB, or
// out of one as large as the copy, into destinations that do not fit.
func BenchmarkCopy(b *testing.B) {
	const ring, target, goroutines = 512 << 10, 256 << 20, 2
	var srcs, dsts [goroutines][]byte
	for g := range goroutines {
		srcs[g], dsts[g] = make([]byte, 64<<20), make([]byte, target)
		randomize(srcs[g], uint64(g))
		randomize(dsts[g], uint64(g))
	}
	copies := map[string]func(dst, src []byte) int{
		"copy": func(dst, src []byte) int { return copy(dst, src) },
	}
	order := []string{"copy"}
	for _, name := range variants() {
		copies[name] = Copy
		order = append(order, name)
	}
	for _, size := range []int{4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 4 << 20, 64 << 20} {
		for using := 1; using <= goroutines; using++ {
			for _, name := range order {
				b.Run(fmt.Sprintf("KiB=%d/goroutines=%d/%s", size>>10, using, name), func(b *testing.B) {
					if name != "copy" {
						choose(name)
						defer choose(variants()[0])
					}
					f := copies[name]
					b.SetBytes(int64(using * size))
					var wg sync.WaitGroup
					for g := range using {
						wg.Go(func() {
							src, dst := srcs[g][:max(size, ring)], dsts[g]
							for i := range b.N {
								from, to := i*size%len(src), i*size%len(dst)
								f(dst[to:to+size], src[from:from+size])
							}
						})
					}
					wg.Wait()
					b.ReportMetric(float64(using*size)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
				})
			}
		}
	}
}
