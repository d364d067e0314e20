package transfer

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// resident tells whether the first page that begins in mem is in memory, true
// where that cannot be told.
func resident(mem []byte) bool {
	page, ok := innerPages(mem)
	if !ok {
		return true
	}
	var there [1]byte
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&page[0])), uintptr(os.Getpagesize()), uintptr(unsafe.Pointer(&there)))
	return errno != 0 || there[0]&1 != 0
}

// populate makes the pages of mem resident for writing. It is a hint: what it
// leaves out is faulted in by whoever writes.
func populate(mem []byte) {
	if pages, ok := innerPages(mem); ok {
		_ = unix.Madvise(pages, unix.MADV_POPULATE_WRITE)
	}
}

// forget takes the pages of a file's mapping out of it, while they stay in the
// file. Workers do that side by side; unmapping does it all at once, alone.
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
