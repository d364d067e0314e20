//go:build linux

package bench

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/units"
)

// mapPlain maps n bytes of ordinary memory, none of them resident, on base pages (mmap,
// MADV_NOHUGEPAGE): what malloc returns on most hosts.
func mapPlain(n int) (b []byte, unmap func() error, err error) {
	if b, unmap, err = hostos.Map(n, 0); err == nil {
		_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE) // kernels without huge pages refuse it
	}
	return b, unmap, err
}

// mapLocked maps n bytes of ordinary memory that the kernel keeps resident: see locker.
func mapLocked(n int, way string) (b []byte, unmap func() error, err error) {
	flags := 0
	if way == byMapLocked {
		flags = unix.MAP_LOCKED
	}
	if b, unmap, err = hostos.Map(n, flags); err != nil {
		return nil, nil, lockFailed(way, err)
	}
	if way == byMlock {
		if err = unix.Mlock(b); err != nil {
			return nil, nil, errors.Join(lockFailed(way, err), unmap())
		}
	}
	return b, unmap, nil
}

// lockFailed is the error of memory that was not locked. It wraps errors.ErrUnsupported where RLIMIT_MEMLOCK is finite: these
// errors of the kernel are those of the limit then (ENOMEM, EAGAIN, EPERM).
func lockFailed(way string, err error) error {
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) // it fails for invalid arguments only
	return lockLimited(way, err, limit.Cur)
}

func lockLimited(way string, err error, limit uint64) error {
	limited := errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EPERM)
	if !limited || limit >= math.MaxInt { // unlimited
		return fmt.Errorf("%s: %w", way, err)
	}
	return fmt.Errorf("%s: %w: RLIMIT_MEMLOCK is %s: raise it (ulimit -l), or take a smaller batch (--batch, --shape): %w",
		way, err, units.Bytes(int(limit)), errors.ErrUnsupported)
}

// mapForReading maps a file's first n bytes (mmap, MAP_PRIVATE), as most loaders of weights
// do.
func mapForReading(f *os.File, n int) (b []byte, unmap func() error, err error) {
	b, err = unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	return b, func() error { return os.NewSyscallError("munmap", unix.Munmap(b)) }, nil
}

// dropCache drops a file's first n bytes from the page cache (posix_fadvise,
// POSIX_FADV_DONTNEED), and returns which share of them is still there (mincore).
func dropCache(f *os.File, n int) (cached float64, err error) {
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, os.NewSyscallError("posix_fadvise", err)
	}
	b, unmap, err := mapForReading(f, n)
	if err != nil {
		return 0, err
	}
	pages := make([]byte, (n+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(n), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return 0, fmt.Errorf("%w (and %v)", os.NewSyscallError("mincore", errno), unmap())
	}
	resident := 0
	for _, p := range pages {
		resident += int(p & 1)
	}
	return float64(resident) / float64(len(pages)), unmap()
}

// opensDirect reports whether a file can be read past the page cache (O_DIRECT).
func opensDirect(path string) bool {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	_ = unix.Close(fd) // it was not used
	return true
}

// onDisk returns the bytes that a directory's file system has room for, and whether its
// files are in memory (tmpfs).
func onDisk(dir string) (free int, inMemory bool, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, false, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int(s.Bavail) * int(s.Bsize), s.Type == unix.TMPFS_MAGIC || s.Type == unix.RAMFS_MAGIC, nil
}

// unlinkedFile makes a file without a name below dir: the kernel frees it when it is
// closed, whatever ends this process. path opens it once more.
func unlinkedFile(dir string) (f *os.File, path string, err error) {
	f, err = os.CreateTemp(dir, "pincheck-files-")
	if err != nil {
		return nil, "", err
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close() // the error is that of Remove
		return nil, "", err
	}
	return f, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), nil
}
