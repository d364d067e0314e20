package weights

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const errNoSpace = unix.ENOSPC

// freeSpace returns the bytes that this user may write to the file system of a directory.
func freeSpace(dir string) (n int64, known bool) {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil || s.Blocks == 0 { // some network file systems do not say
		return 0, false
	}
	return int64(s.Bavail) * s.Bsize, true
}

// reserve sets the size of a file, and takes the space for it, but on tmpfs, where that would write all pages. The
// whole huge pages of a file there are mapped.
func reserve(f *os.File, n int64) (mapped []byte, err error) {
	var s unix.Statfs_t
	inMemory := unix.Fstatfs(int(f.Fd()), &s) == nil && s.Type == unix.TMPFS_MAGIC
	if !inMemory {
		err := unix.Fallocate(int(f.Fd()), 0, 0, n)
		if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
			return nil, err
		}
	}
	if err := f.Truncate(n); err != nil || !inMemory || n < hugePage {
		return nil, err
	}
	return mapHuge(f, int(n)&^(hugePage-1))
}

// hugePage is the size of a huge page on amd64 and most of arm64.
const hugePage = 2 << 20

// mapHuge maps the first n bytes of a file where the kernel can make huge pages: where address and offset agree.
func mapHuge(f *os.File, n int) ([]byte, error) {
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(n+hugePage), unix.PROT_NONE, flags)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	before := -int(uintptr(room)) & (hugePage - 1)
	start := unsafe.Add(room, before)
	_, err = unix.MmapPtr(int(f.Fd()), 0, start, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("mmap", err), unix.MunmapPtr(room, uintptr(n+hugePage)))
	}
	if before > 0 {
		_ = unix.MunmapPtr(room, uintptr(before))
	}
	_ = unix.MunmapPtr(unsafe.Add(start, n), uintptr(hugePage-before))
	return unsafe.Slice((*byte)(start), n), nil
}

func unmap(mem []byte) error {
	return os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem))))
}

// maxHugePage is the time for a huge page after which no more are made: memory has none without moving others.
const maxHugePage = 3 * time.Millisecond

// makeHuge makes mem huge pages (MADV_COLLAPSE, since Linux 6.1); each needs a small page first. It returns false
// where that cannot be done, or takes too long.
func makeHuge(mem []byte) bool {
	for at := 0; at < len(mem); at += hugePage {
		if unix.Madvise(mem[at:at+os.Getpagesize()], unix.MADV_POPULATE_WRITE) != nil {
			return false
		}
	}
	began := time.Now()
	return unix.Madvise(mem, unix.MADV_COLLAPSE) == nil && time.Since(began) < maxHugePage*time.Duration(len(mem)/hugePage)
}

// populate makes pages of mem, by one call for many (since Linux 5.14). What it refuses is left to the writes.
func populate(mem []byte) { _ = unix.Madvise(mem, unix.MADV_POPULATE_WRITE) }

// openDirect opens a file for writing without the page cache. It returns nil where that cannot be done.
func openDirect(name string) *os.File {
	f, err := os.OpenFile(name, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil
	}
	return f
}

// lock locks a file until it is closed.
func lock(f *os.File) locking {
	switch unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) {
	case nil:
		return isMine
	case unix.EWOULDBLOCK:
		return isLocked
	}
	return isUnknown
}

// lockDir waits until no other save gives names in a directory, where the file system has such locks.
func lockDir(dir string) (unlock func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	_ = unix.Flock(int(d.Fd()), unix.LOCK_EX)
	return func() { _ = d.Close() }
}

// syncDir flushes the names in a directory to storage.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) { // a file system whose directories need no fsync
		err = nil
	}
	return errors.Join(err, d.Close())
}
