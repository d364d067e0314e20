//go:build unix

// Package hostos calls the operating system for what the standard library lacks.
package hostos

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time of all threads of this process so far (getrusage), or a
// negative time if it is not known.
func CPUTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return -1
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Map maps n bytes of private memory (mmap, with flags in addition), as malloc does for large
// blocks: none of them is resident, and huge pages are used only where the host does so by default.
// An error of release leaves the memory mapped.
func Map(n, flags int) (mem []byte, release func() error, err error) {
	mem, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|flags)
	if err != nil {
		return nil, nil, fmt.Errorf("mmap %d bytes: %w", n, err)
	}
	return mem, func() error { return os.NewSyscallError("munmap", unix.Munmap(mem)) }, nil
}
