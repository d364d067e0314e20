package transfer

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// resident reports whether the first whole page of mem is in memory (mincore).
// It is true for memory without whole pages, and if the call fails.
func resident(mem []byte) bool {
	page, ok := innerPages(mem)
	if !ok {
		return true
	}
	var there [1]byte
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&page[0])), uintptr(os.Getpagesize()), uintptr(unsafe.Pointer(&there)))
	return errno != 0 || there[0]&1 != 0
}

// populate makes the whole pages of mem resident for writing
// (MADV_POPULATE_WRITE, since Linux 5.14). If it fails, writing faults them in.
func populate(mem []byte) {
	if pages, ok := innerPages(mem); ok {
		_ = unix.Madvise(pages, unix.MADV_POPULATE_WRITE)
	}
}

// forget removes the pages of a file's mapping, while they stay in the file
// (MADV_DONTNEED). Workers do that side by side; munmap does it with one thread.
func forget(mem []byte) {
	if pages, ok := innerPages(mem); ok {
		_ = unix.Madvise(pages, unix.MADV_DONTNEED)
	}
}

// innerPages is the part of mem that is whole pages.
func innerPages(mem []byte) ([]byte, bool) {
	page := os.Getpagesize()
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) & (page - 1)
	if skip+page > len(mem) {
		return nil, false
	}
	whole := mem[skip:]
	return whole[:len(whole)&^(page-1)], true
}
