package weights

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
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

// reserve sets the size of a file, and takes the space for it. On tmpfs that writes the pages: huge ones, which take a
// tenth of the time that small ones take while the bytes are written. Where there are none, the space is not taken.
func reserve(ctx context.Context, f *os.File, n int64) error {
	var s unix.Statfs_t
	inMemory := unix.Fstatfs(int(f.Fd()), &s) == nil && s.Type == unix.TMPFS_MAGIC
	if !inMemory {
		err := unix.Fallocate(int(f.Fd()), 0, 0, n)
		if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
			return err
		}
	}
	if err := f.Truncate(n); err != nil || !inMemory {
		return err
	}
	return reserveHuge(ctx, f, int(n)&^(hugePage-1))
}

const (
	hugePage = 2 << 20
	// hugeStep is the number of bytes of one call, which takes some milliseconds.
	hugeStep = 16 << 20
	// maxHugeStep is the time of a call after which no more are made: memory has no huge pages without moving others.
	maxHugeStep = 50 * time.Millisecond
)

// reserveHuge makes the first n bytes of a file of tmpfs, whole huge pages, resident. It uses all cores. An error is one
// of mapping the file; pages that the kernel refuses are left to the writes.
func reserveHuge(ctx context.Context, f *os.File, n int) error {
	if n == 0 {
		return nil
	}
	// The kernel makes huge pages where address and offset agree.
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(n+hugePage), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer unix.MunmapPtr(room, uintptr(n+hugePage))
	start := unsafe.Add(room, -int(uintptr(room))&(hugePage-1))
	if _, err := unix.MmapPtr(int(f.Fd()), 0, start, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	mem := unsafe.Slice((*byte)(start), n)
	var next atomic.Int64
	var refused atomic.Bool
	var running sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), maxReservers) {
		running.Go(func() {
			for at := int(next.Add(hugeStep)) - hugeStep; at < n && ctx.Err() == nil && !refused.Load(); at = int(next.Add(hugeStep)) - hugeStep {
				if !collapse(mem[at:min(at+hugeStep, n)]) {
					refused.Store(true)
				}
			}
		})
	}
	running.Wait()
	return nil
}

// maxReservers is the number of threads that make pages: memory has not the bandwidth for more.
const maxReservers = 16

// collapse makes mem huge pages (MADV_COLLAPSE, since Linux 6.1), for which each must have a small one.
func collapse(mem []byte) bool {
	for at := 0; at < len(mem); at += hugePage {
		if unix.Madvise(mem[at:at+os.Getpagesize()], unix.MADV_POPULATE_WRITE) != nil {
			return false
		}
	}
	began := time.Now()
	return unix.Madvise(mem, unix.MADV_COLLAPSE) == nil && time.Since(began) < maxHugeStep
}

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
