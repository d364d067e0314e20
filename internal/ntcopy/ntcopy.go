// Package ntcopy copies memory without filling the CPU's caches with the copy.
//
// A plain copy first reads each cache line of the destination, then keeps the
// line in the cache, where it takes the place of data that is still in use.
// Non-temporal stores write whole lines to memory instead. They suit the way out
// of a pinned ring that a GPU has written: the ring stays in the cache, the
// memory bandwidth goes to the bytes that are copied, and the large destination
// is not read again soon. A destination that is read at once, or that is in the
// cache already, is better written with copy.
//
// # Implementations
//
// On amd64 and arm64 the stores are in assembly; on other architectures Copy is
// as fast as copy. The build tags purego and noasm select the portable version
// everywhere. So do the race detector and the memory and address sanitizers
// (go build -race, -msan, -asan): they do not see what assembly reads and writes,
// and would miss a race or a bad access in the caller's memory.
package ntcopy

import (
	"fmt"
	"unsafe"
)

const (
	// minCopy is the number of bytes from which Copy uses non-temporal stores. Each
	// run of them ends in a fence that waits for memory (Zen 5: 80 to 120 ns), with which
	// copies of 4 KiB break even.
	minCopy = 8 << 10

	// line is the size of a cache line in bytes. A store that fills no whole line
	// of the destination would read and write memory twice.
	line = 64

	// block is the number of bytes that one pass of the loops in assembly copies.
	block = 128

	// maxPiece is the maximum of bytes that one call of assembly copies. The Go runtime
	// cannot preempt assembly, so a stop of the world, as for a garbage collection,
	// waits for the end of the piece: about 30 us at 10 GB/s. Smaller pieces cost
	// speed, because each ends in a fence: 64 KiB up to 13%, 256 KiB up to 3%.
	maxPiece = 256 << 10

	// Rows of minRow to maxRow bytes are copied together. Smaller ones take as long for
	// their addresses as for their bytes, larger ones are as fast with Copy.
	minRow, maxRow = 512, 8 << 10
	// maxRows is the number of rows that are copied together.
	maxRows = maxPiece / maxRow
)

// Prefetch begins to bring mem into the caches, if the processor has memory bandwidth to spare, and
// returns before it is there. The less of mem is in the caches, the longer it takes. Bytes are
// neither read nor written: it cannot fault, and the race detector sees no access.
func Prefetch(mem []byte) {
	if len(mem) > 0 {
		prefetch(mem)
	}
}

// Copy copies min(len(dst), len(src)) bytes from src to dst and returns that
// number, as the built-in copy does. Any lengths and alignments are allowed.
//
// dst and src must not overlap, unless they start at the same byte: if they
// overlap otherwise, the contents of dst are undefined. Copy never accesses memory
// outside the two slices.
//
// When Copy returns, the bytes are ordered like those of plain stores: any
// synchronization that publishes the result of copy to other goroutines, threads
// or devices also publishes the result of Copy.
//
// A fault while Copy accesses a slice, such as in a mapped file that was truncated,
// is a panic if [runtime/debug.SetPanicOnFault] is set, as it is for copy. The
// contents of dst are undefined then.
//
// Copy does not allocate. Goroutines may call it at the same time.
func Copy(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < minCopy {
		return copy(dst, src)
	}
	dst, src = dst[:n], src[:n]

	// The alignment lasts for all pieces: heap memory does not move, and the runtime
	// moves a goroutine's stack only by multiples of a line.
	head := int(-uintptr(unsafe.Pointer(&dst[0])) % line)
	copy(dst[:head], src)
	dst, src = dst[head:], src[head:]
	for len(dst) >= block {
		size := min(len(dst)/block*block, maxPiece)
		blocks(dst[:size], src)
		dst, src = dst[size:], src[size:]
	}
	copy(dst, src)
	return n
}

// Together reports whether Rows is quicker than a Copy for each row: if the CPU has AVX2,
// and rows are whole cache lines of dst, and neither tiny nor large.
func Together(dst []byte, size int) bool {
	return gathers() && size >= minRow && size <= maxRow && size%line == 0 && len(dst) > 0 && uintptr(unsafe.Pointer(&dst[0]))%line == 0
}

// Rows copies rows of size bytes of src into dst, one after the other, and returns the number
// of bytes. Row r of src is at r*size. The rows may be in any order, and repeat. Rows panics
// if src has no such row, or dst is too small.
//
// Rows has the properties of Copy, for rows that are too small for Copy: there is one fence
// for many rows, and while one row is copied the next is fetched.
func Rows(dst, src []byte, size int, rows []int) int {
	if size == 0 {
		return 0
	}
	count := len(src) / size // rows of src; with more, products below would wrap
	if size < 0 || len(rows) > len(dst)/size {
		panic(fmt.Sprintf("ntcopy: no room for %d rows of %d bytes in %d", len(rows), size, len(dst)))
	}
	dst = dst[:len(rows)*size]
	together := Together(dst, size)
	for at := 0; at < len(rows); {
		some := rows[at:min(at+maxRows, len(rows))]
		to := dst[at*size : (at+len(some))*size]
		at += len(some)
		for _, r := range some {
			if uint(r) >= uint(count) {
				panic(fmt.Sprintf("ntcopy: row %d of %d rows of %d bytes", r, count, size))
			}
		}
		if !together {
			for i, r := range some {
				Copy(to[i*size:(i+1)*size], src[r*size:(r+1)*size])
			}
			continue
		}
		var from [maxRows]unsafe.Pointer
		for i, r := range some {
			from[i] = unsafe.Pointer(&src[r*size])
		}
		gather(to, from[:len(some)], size)
	}
	return len(dst)
}
