//go:build linux && !android && (amd64 || arm64)

package verify

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mapMemory maps n bytes of private memory.
func mapMemory(n int) (mem []byte, unmap func() error, err error) {
	if mem, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return nil, nil, fmt.Errorf("mmap %d bytes: %w", n, err)
	}
	return mem, func() error { return os.NewSyscallError("munmap", unix.Munmap(mem)) }, nil
}

// memoryFile opens a new file of n bytes in memory, which has no name.
func memoryFile(n int) (*os.File, error) {
	const name = "verify"
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(n)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
