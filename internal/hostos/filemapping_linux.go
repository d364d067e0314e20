package hostos

import (
	"errors"
	"os"
	"runtime"
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
	small atomic.Int32 // calls of MakePages until huge pages are tried again, or never
}

// MapFile maps n bytes at an offset of a file.
func MapFile(fd int, off int64, n int) (*FileMapping, error) {
	skip := int(off & int64(os.Getpagesize()-1))
	m := &FileMapping{size: uintptr(skip + n)}
	var err error
	if m.base, err = MapAligned(fd, off-int64(skip), m.size, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	m.Bytes = unsafe.Slice((*byte)(unsafe.Add(m.base, skip)), n)
	return m, nil
}

// MapAligned maps size bytes of a file from a page on, shared, where the offset in the file and the address have the same
// remainder by HugePage.
func MapAligned(fd int, off int64, size uintptr, access int) (unsafe.Pointer, error) {
	room := size + HugePage
	start, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	before := (uintptr(off) - uintptr(start)) & (HugePage - 1)
	base := unsafe.Add(start, before)
	if _, err := unix.MmapPtr(fd, off, base, size, access, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(start, room))
	}
	if before > 0 {
		_ = unix.MunmapPtr(start, before)
	}
	if used := size + uintptr(-int(size)&(os.Getpagesize()-1)); before+used < room {
		_ = unix.MunmapPtr(unsafe.Add(base, used), room-before-used)
	}
	return base, nil
}

// Unmap unmaps the file. Bytes must not be used any more.
func (m *FileMapping) Unmap() error {
	return os.NewSyscallError("munmap", unix.MunmapPtr(m.base, m.size))
}

// MakePages allocates the pages of n bytes from an offset on, before they are written: all huge pages that begin in
// them, and one that holds the first byte, if they end in the mapping. Pages are small where others use those of the
// range, after the kernel has refused a huge page, and for some calls after one that costs much. What the kernel refuses
// is left to the writes. Several goroutines may call it.
func (m *FileMapping) MakePages(off, n int) {
	first := -int(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes)))) & (HugePage - 1)
	end := first + (len(m.Bytes)-first)&^(HugePage-1)
	from, to := first+(off-first)&^(HugePage-1), first+(off+n-first+HugePage-1)&^(HugePage-1)
	if from, to = max(from, first), min(to, end); from < to && m.triesHuge() {
		cost, err := cpuTimeOf(func() error { return Collapse(m.Bytes[from:to]) })
		switch {
		case err != nil:
			m.small.Store(never)
		case cost > maxHugePage*time.Duration((to-from)/HugePage):
			m.small.Store(costlyCalls)
		}
		if err == nil {
			Populate(m.Bytes[off:max(off, min(off+n, first))])
			Populate(m.Bytes[min(max(off, end), off+n) : off+n])
			return
		}
	}
	Populate(m.Bytes[off : off+n])
}

const (
	// maxHugePage is the CPU time for a huge page after which others are small: memory has none without moving others, or
	// a virtual machine's memory is used for the first time. The others take 0.2 to 0.7 ms of it, and longer in time
	// where many threads make some, which wait for work on each core.
	maxHugePage = 3 * time.Millisecond
	// costlyCalls is the number of calls with small pages after that.
	costlyCalls = 32
	never       = -1
)

// triesHuge reports whether a call makes huge pages, and counts it if not.
func (m *FileMapping) triesHuge() bool {
	n := m.small.Load()
	if n > 0 {
		m.small.CompareAndSwap(n, n-1)
	}
	return n == 0
}

// cpuTimeOf returns the CPU time of a call that stays on its thread, 0 if it is not known.
func cpuTimeOf(call func() error) (time.Duration, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var began, ended unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &began)
	err := call()
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ended)
	return time.Duration(ended.Nano() - began.Nano()), err
}

// Collapse makes mem, whole huge pages of a mapping, resident as huge pages (MADV_COLLAPSE, since Linux 6.1); each needs a
// small page first. Those whose small pages others use at the moment stay small.
func Collapse(mem []byte) error {
	for at := 0; at < len(mem); at += HugePage {
		if err := unix.Madvise(mem[at:at+os.Getpagesize()], unix.MADV_POPULATE_WRITE); err != nil {
			return err
		}
	}
	err := unix.Madvise(mem, unix.MADV_COLLAPSE)
	if err == unix.EAGAIN || err == unix.EBUSY || err == unix.EINTR {
		return unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	}
	return err
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
