package hostos

import (
	"errors"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A FileMapping is a shared mapping of a range of a file, for reading and writing. The offset in the file and the
// address have the same remainder by HugePage, so that a file in memory can have huge pages.
type FileMapping struct {
	Bytes []byte
	base  unsafe.Pointer // of the page that has the first byte
	size  uintptr
	small atomic.Bool // no more huge pages are made
}

// MapFile maps n bytes at an offset of a file.
func MapFile(fd int, off int64, n int) (*FileMapping, error) {
	skip := int(off & int64(os.Getpagesize()-1))
	off -= int64(skip)
	m := &FileMapping{size: uintptr(skip + n)}
	room := m.size + HugePage
	start, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	before := (uintptr(off) - uintptr(start)) & (HugePage - 1)
	m.base = unsafe.Add(start, before)
	_, err = unix.MmapPtr(fd, off, m.base, m.size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("mmap", err), os.NewSyscallError("munmap", unix.MunmapPtr(start, room)))
	}
	if before > 0 {
		_ = unix.MunmapPtr(start, before)
	}
	if used := m.size + uintptr(-int(m.size)&(os.Getpagesize()-1)); before+used < room {
		_ = unix.MunmapPtr(unsafe.Add(m.base, used), room-before-used)
	}
	m.Bytes = unsafe.Slice((*byte)(unsafe.Add(m.base, skip)), n)
	return m, nil
}

// Unmap unmaps the file. Bytes must not be used any more.
func (m *FileMapping) Unmap() error {
	return os.NewSyscallError("munmap", unix.MunmapPtr(m.base, m.size))
}

// MakePages allocates the pages of n bytes from an offset on, before they are written: all huge pages that begin in
// them, and one that holds the first byte, if they end in the mapping. Pages are small from the first one on that
// cannot be made huge, or takes long. What the kernel refuses is left to the writes. Several goroutines may call it.
func (m *FileMapping) MakePages(off, n int) {
	first := -int(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes)))) & (HugePage - 1)
	end := first + (len(m.Bytes)-first)&^(HugePage-1)
	from, to := first+(off-first)&^(HugePage-1), first+(off+n-first+HugePage-1)&^(HugePage-1)
	if from, to = max(from, first), min(to, end); from < to && !m.small.Load() && !collapse(m.Bytes[from:to]) {
		m.small.Store(true)
	}
	switch {
	case m.small.Load():
		Populate(m.Bytes[off : off+n])
	default:
		Populate(m.Bytes[off:max(off, min(off+n, first))])
		Populate(m.Bytes[min(max(off, end), off+n) : off+n])
	}
}

// maxHugePage is the time for a huge page after which no more are made: memory has none without moving others.
const maxHugePage = 3 * time.Millisecond

// collapse makes mem huge pages (MADV_COLLAPSE, since Linux 6.1); each needs a small page first. It returns false
// where that cannot be done, or takes too long.
func collapse(mem []byte) bool {
	for at := 0; at < len(mem); at += HugePage {
		if unix.Madvise(mem[at:at+os.Getpagesize()], unix.MADV_POPULATE_WRITE) != nil {
			return false
		}
	}
	began := time.Now()
	return unix.Madvise(mem, unix.MADV_COLLAPSE) == nil && time.Since(began) < maxHugePage*time.Duration(len(mem)/HugePage)
}

// Populate makes the whole pages of mem resident for writing (MADV_POPULATE_WRITE, since Linux 5.14). If it fails,
// writing faults them in.
func Populate(mem []byte) {
	if pages := InnerPages(mem); len(pages) > 0 {
		_ = unix.Madvise(pages, unix.MADV_POPULATE_WRITE)
	}
}

// InnerPages returns the whole pages in mem.
func InnerPages(mem []byte) []byte {
	page := os.Getpagesize()
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) & (page - 1)
	if skip+page > len(mem) {
		return nil
	}
	whole := mem[skip:]
	return whole[:len(whole)&^(page-1)]
}
