package ntcopy

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// copyRows is what Rows should do.
func copyRows(dst, src []byte, size int, rows []int) {
	for i, r := range rows {
		copy(dst[i*size:(i+1)*size], src[r*size:])
	}
}

// someRows returns n numbers of rows, of which there are as many as given.
func someRows(n, of int, seed uint64) []int {
	r := rand.New(rand.NewPCG(seed, 1))
	rows := make([]int, n)
	for i := range rows {
		rows[i] = r.IntN(of)
	}
	return rows
}

func TestRows(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const of = 50
		for _, size := range []int{1, 63, line, 100, minRow - line, minRow, minRow + 1, minRow + line, 4096, 4096 + 3*line, maxRow - 1, maxRow, maxRow + line, maxPiece + line} {
			src := aligned(of*size + 17)
			randomize(src, uint64(size))
			for _, n := range []int{0, 1, 2, maxRows - 1, maxRows, maxRows + 1, 3 * maxRows} {
				if n*size > 8<<20 {
					continue
				}
				rows := someRows(n, of, uint64(n))
				if n > 1 {
					rows[0], rows[n-1] = of-1, 0
				}
				want := make([]byte, n*size)
				for _, at := range []struct{ dst, src int }{{0, 0}, {line, 17}, {1, 0}, {32, 1}} {
					from := src[at.src : at.src+of*size]
					copyRows(want, from, size, rows)
					around := aligned(margin + at.dst + n*size + margin)
					for i := range around {
						around[i] = fill
					}
					dst := around[margin+at.dst : margin+at.dst+n*size]
					what := fmt.Sprintf("%d rows of %d bytes, to offset %d", n, size, at.dst)
					require.Equal(t, n*size, Rows(dst, from, size, rows), what)
					require.Equal(t, -1, firstDifference(dst, want), what)
					require.True(t, filled(around[:margin+at.dst]) && filled(around[margin+at.dst+n*size:]), "%s: wrote outside", what)
				}
			}
		}
	})
}

func TestRowsTogether(t *testing.T) {
	if !gathers() {
		assert.False(t, Together(aligned(4096), 4096), "there is no assembly")
		return
	}
	dst := aligned(1 << 20)
	for _, size := range []int{minRow, 4096, 4096 + line, maxRow} {
		assert.True(t, Together(dst, size), "%d bytes", size)
		assert.True(t, Together(dst[line:], size), "%d bytes, the second line", size)
		assert.False(t, Together(dst[1:], size), "%d bytes, no whole lines", size)
	}
	for _, size := range []int{1, line, minRow - line, minRow + 1, maxRow + line} {
		assert.False(t, Together(dst, size), "%d bytes", size)
	}
	assert.False(t, Together(nil, 4096))
	choose("none")
	defer choose(variants()[0])
	assert.False(t, Together(dst, 4096), "a CPU without AVX2")
}

func TestRowsPanicsOutsideTheSlices(t *testing.T) {
	withEach(t, func(t *testing.T) {
		for _, size := range []int{100, 4096} {
			dst, src := aligned(3*size), aligned(5*size)
			// The product of the last ones and of a size is 0, or less than len(src), in 64 bits.
			for _, rows := range [][]int{{5}, {-1}, {0, 1, 5}, {0, 1, 2, 3}, {1 << 52}, {1 << 55}, {1 << 62}, {math.MaxInt}, {math.MinInt}, {0, 1<<62 + 1}} {
				assert.Panics(t, func() { Rows(dst, src, size, rows) }, "%v of 5 rows of %d bytes, with room for 3", rows, size)
			}
		}
		dst, src := aligned(minRow), aligned(minRow)
		assert.Panics(t, func() { Rows(dst, src, minRow, []int{1 << 55}) }, "2^64 bytes from the start")
		for _, size := range []int{-1, math.MinInt, 1 << 62, math.MaxInt} {
			assert.Panics(t, func() { Rows(dst, src, size, []int{0, 0, 0, 0}) }, "rows of %d bytes", size)
		}
		assert.Zero(t, Rows(dst, src, 0, []int{0, math.MaxInt}), "rows without bytes are everywhere")
	})
}

func TestRowsAllocatesNothing(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const n = maxRows + 3
		dst, src, rows := aligned(n*4096), aligned(9*4096), someRows(n, 9, 1)
		assert.Zero(t, testing.AllocsPerRun(10, func() { Rows(dst, src, 4096, rows) }))
	})
}

// As TestDestinationOnAStackThatMoves, for the addresses that Rows has collected.
func TestRowsOnAStackThatMoves(t *testing.T) {
	withEach(t, func(t *testing.T) {
		dst, rows := aligned(8*1024), someRows(8, 4, 2)
		wrong := make(chan int)
		go func() {
			growStack(40)
			var src [4 * 1024]byte // does not escape
			bad := 0
			for round := range 200 {
				randomize(src[:], uint64(round))
				if round%50 == 0 {
					runtime.GC()
				}
				Rows(dst, src[:], 1024, rows)
				for i, r := range rows {
					if !bytes.Equal(dst[i*1024:(i+1)*1024], src[r*1024:(r+1)*1024]) {
						bad++
					}
				}
			}
			wrong <- bad
		}()
		assert.Zero(t, <-wrong)
	})
}

func FuzzRows(f *testing.F) {
	f.Add([]byte("pinned"), uint16(4096), uint16(40), uint8(0))
	f.Add([]byte{9, 0, 9}, uint16(minRow), uint16(maxRows), uint8(64))
	f.Add([]byte{1}, uint16(100), uint16(3), uint8(7))
	f.Fuzz(func(t *testing.T, numbers []byte, size, n uint16, dstAt uint8) {
		if len(numbers) == 0 {
			return
		}
		const of = 64
		bytes, count := int(size)%(2*maxRow)+1, int(n)%(3*maxRows)
		src := aligned(of * bytes)
		randomize(src, uint64(size))
		rows := make([]int, count)
		for i := range rows {
			rows[i] = int(numbers[i%len(numbers)]) % of
		}
		want := make([]byte, count*bytes)
		copyRows(want, src, bytes, rows)
		for _, name := range variants() {
			choose(name)
			dst := aligned(int(dstAt) + count*bytes)[dstAt:]
			Rows(dst, src, bytes, rows)
			require.Equal(t, -1, firstDifference(dst, want), name)
		}
		choose(variants()[0])
	})
}

// BenchmarkRows is rows in random order, out of memory that caches do not hold, into
// memory that they do.
func BenchmarkRows(b *testing.B) {
	for _, size := range []int{512, 1024, 4096, 8192} {
		src, dst := aligned(512<<20), aligned(512<<10)
		for i := 0; i < len(src); i += 4096 {
			src[i] = 1
		}
		rows := someRows(len(dst)/size, len(src)/size, 1)
		for name, f := range map[string]func(){
			"copy": func() { copyRows(dst, src, size, rows) },
			"Rows": func() { Rows(dst, src, size, rows) },
		} {
			b.Run(fmt.Sprintf("%d/%s", size, name), func(b *testing.B) {
				b.SetBytes(int64(len(dst)))
				round := uint64(2)
				for b.Loop() {
					b.StopTimer()
					copy(rows, someRows(len(rows), len(src)/size, round))
					round++
					b.StartTimer()
					f()
				}
			})
		}
	}
}
