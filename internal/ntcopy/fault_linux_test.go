package ntcopy

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// guarded returns size bytes, rounded up to whole pages, between two pages in which
// every access faults.
func guarded(t *testing.T, size int) []byte {
	page := os.Getpagesize()
	size = (size + page - 1) &^ (page - 1)
	all, err := unix.Mmap(-1, 0, page+size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Munmap(all)) })
	require.NoError(t, unix.Mprotect(all[:page], unix.PROT_NONE))
	require.NoError(t, unix.Mprotect(all[page+size:], unix.PROT_NONE))
	return all[page : page+size : page+size]
}

// fault calls f and returns the panic of a fault in it, nil if there was none.
func fault(f func()) (recovered any, stack string) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recovered = recover(); recovered != nil {
			stack = string(debug.Stack())
		}
	}()
	f()
	return nil, ""
}

func TestNoAccessOutsideTheSlices(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const most = maxPiece + minCopy
		src, dst := guarded(t, most), guarded(t, most)
		randomize(src, 7)
		require.NoError(t, unix.Mprotect(src, unix.PROT_READ))
		lengths := []int{1, 63, 64, 1000, minCopy - 1, minCopy, minCopy + 1, minCopy + block - 1, maxPiece, maxPiece + 1, maxPiece + block + line}
		for _, n := range lengths {
			for by := range 130 {
				if by+n > most {
					break
				}
				first := func(b []byte) []byte { return b[by : by+n] }
				last := func(b []byte) []byte { return b[len(b)-n-by : len(b)-by] }
				for _, to := range []func([]byte) []byte{first, last} {
					for _, from := range []func([]byte) []byte{first, last} {
						clear(dst)
						d, s := to(dst), from(src)
						recovered, stack := fault(func() { Copy(d, s) })
						require.Nil(t, recovered, "%d bytes, %d away from a guard: %s", n, by, stack)
						require.Equal(t, -1, firstDifference(d, s), "%d bytes, %d away from a guard", n, by)
					}
				}
			}
		}
	})
}

// truncated maps a file of size bytes and cuts the file at the byte given, the
// start of a page.
func truncated(t *testing.T, size, at int) []byte {
	file, err := os.Create(filepath.Join(t.TempDir(), "mapped"))
	require.NoError(t, err)
	defer file.Close()
	content := make([]byte, size)
	randomize(content, 8)
	_, err = file.Write(content)
	require.NoError(t, err)
	mapped, err := unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Munmap(mapped)) })
	require.NoError(t, file.Truncate(int64(at)))
	return mapped
}

// protected maps size bytes, of which those from the byte given on fault.
func protected(t *testing.T, size, at int) []byte {
	mapped, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Munmap(mapped)) })
	randomize(mapped, 9)
	require.NoError(t, unix.Mprotect(mapped[at:], unix.PROT_NONE))
	return mapped
}

// A fault arrives as a signal in the middle of the assembly: SIGBUS past the end
// of a mapped file, SIGSEGV in protected memory.
func TestFaultsArePanics(t *testing.T) {
	page := os.Getpagesize()
	const size = 2 * maxPiece
	memory := map[string]func(t *testing.T, size, at int) []byte{"truncated file": truncated, "protected memory": protected}
	places := map[string]int{"first byte": 0, "first piece": max(page, 3<<12&^(page-1)), "second piece": maxPiece + page, "last page": size - page}
	withEach(t, func(t *testing.T) {
		for kind, mapping := range memory {
			for place, at := range places {
				for _, side := range []string{"source", "destination"} {
					t.Run(kind+", "+place+", "+side, func(t *testing.T) {
						bad, good := mapping(t, size, at), make([]byte, size)
						dst, src := good[5:], bad[5:]
						if side == "destination" {
							dst, src = bad[5:], good[5:]
						}
						recovered, stack := fault(func() { Copy(dst, src) })
						require.NotNil(t, recovered)
						err, ok := recovered.(runtime.Error)
						require.True(t, ok, "%v", recovered)
						assert.Contains(t, stack, "ntcopy.Copy", "the stack of the fault")

						start := uintptr(unsafe.Pointer(&bad[0]))
						// qemu has no address for some faults, and another one for others.
						if address, ok := err.(interface{ Addr() uintptr }); ok && !emulated() {
							assert.GreaterOrEqual(t, address.Addr(), start+uintptr(at))
							assert.Less(t, address.Addr(), start+size)
						} else {
							assert.True(t, emulated(), "a fault without an address: %v", err)
						}
						if side == "source" {
							for i, got := range dst[:max(at-5, 0)] {
								if got != 0 && got != src[i] {
									require.FailNow(t, "wrote what is not in the source", "byte %d", i)
								}
							}
							assert.Equal(t, make([]byte, 5), good[:5], "wrote before the destination")
							assert.Equal(t, -1, firstDifference(good[at:], make([]byte, size-at)), "wrote what it could not read")
						}

						runtime.GC()
						growStack(100)
						rest := make([]byte, size)
						assert.Equal(t, size-5, Copy(rest, good[5:]))
						assert.Equal(t, -1, firstDifference(rest[:size-5], good[5:]), "a copy after the fault")
					})
				}
			}
		}
	})
}

// emulated reports whether the program runs under qemu-user, which accepts any
// advice and loses the address of a bus error.
func emulated() bool {
	b := make([]byte, 2*os.Getpagesize())
	at := -uintptr(unsafe.Pointer(&b[0])) % uintptr(os.Getpagesize())
	return unix.Madvise(b[at:at+1], 999) == nil
}

// Rows end at a page that must not be touched, neither by a load nor by a store: what is
// fetched ahead is never past the last row.
func TestRowsTouchNothingOutside(t *testing.T) {
	withEach(t, func(t *testing.T) {
		const size, n = 4096, 2*maxRows + 1
		src, dst := guarded(t, n*size), guarded(t, n*size)
		randomize(src, 10)
		rows := make([]int, n)
		for i := range rows {
			rows[i] = n - 1 - i
		}
		want := make([]byte, n*size)
		from, to := src[len(src)-n*size:], dst[len(dst)-n*size:]
		copyRows(want, from, size, rows)
		recovered, stack := fault(func() { Rows(to, from, size, rows) })
		require.Nil(t, recovered, stack)
		require.Equal(t, -1, firstDifference(to, want))
	})
}

func TestFaultsInRowsArePanics(t *testing.T) {
	const size, n = 4096, 2 * maxRows
	page := os.Getpagesize()
	withEach(t, func(t *testing.T) {
		for _, side := range []string{"source", "destination"} {
			bad, good := protected(t, n*size, n*size/2&^(page-1)), aligned(n*size)
			dst, src := good, bad
			if side == "destination" {
				dst, src = bad, good
			}
			recovered, stack := fault(func() { Rows(dst, src, size, []int{0, 1, 2, n - 1, 3}) })
			if side == "destination" {
				require.Nil(t, recovered, stack) // the first rows are not protected
				recovered, stack = fault(func() { Rows(dst[n*size/2:], src, size, []int{0, 1}) })
			}
			require.NotNil(t, recovered, side)
			_, ok := recovered.(runtime.Error)
			require.True(t, ok, "%v", recovered)
			assert.Contains(t, stack, "ntcopy.Rows", "the stack of the fault")
		}
	})
}

func TestPrefetchOnlyLooks(t *testing.T) {
	mem := guarded(t, 2*os.Getpagesize())
	randomize(mem, 3)
	before := bytes.Clone(mem)
	require.NoError(t, unix.Mprotect(mem[len(mem)/2:], unix.PROT_NONE))
	recovered, stack := fault(func() {
		for _, part := range [][]byte{nil, mem[:0], mem[:1], mem[1:], mem[len(mem)-1:], mem} {
			Prefetch(part)
		}
		assert.Zero(t, testing.AllocsPerRun(10, func() { Prefetch(mem) }))
	})
	require.Nil(t, recovered, stack)
	require.NoError(t, unix.Mprotect(mem, unix.PROT_READ))
	assert.Equal(t, before, mem)
}
