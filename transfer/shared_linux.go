package transfer

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapInMemory maps n bytes at off of a file that lives in memory, which is made
// long enough. Other files, and those that cannot be mapped for writing, give
// errors.ErrUnsupported.
func mapInMemory(f *os.File, off int64, n int) (mem []byte, unmap func() error, err error) {
	if off < 0 {
		return nil, nil, fmt.Errorf("offset %d: must not be negative", off)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	skip := int(off % int64(os.Getpagesize()))
	var base unsafe.Pointer
	ctlErr := conn.Control(func(fd uintptr) {
		if err = inMemory(int(fd)); err != nil {
			return
		}
		if err = extend(int(fd), off+int64(n)); err != nil {
			return
		}
		base, err = unix.MmapPtr(int(fd), off-int64(skip), nil, uintptr(skip+n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	})
	if ctlErr != nil {
		return nil, nil, errors.ErrUnsupported // a file that was closed: writing to it says so
	}
	if err != nil {
		return nil, nil, err
	}
	unmap = func() error { return unix.MunmapPtr(base, uintptr(skip+n)) }
	return unsafe.Slice((*byte)(base), skip+n)[skip:], unmap, nil
}

// inMemory returns an error if the file is on a disk, or not open for reading
// and writing anywhere.
func inMemory(fd int) error {
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil {
		return err
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if s.Type != unix.TMPFS_MAGIC || flags&unix.O_ACCMODE != unix.O_RDWR || flags&unix.O_APPEND != 0 {
		return errors.ErrUnsupported
	}
	return nil
}

func extend(fd int, size int64) error {
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil || s.Size >= size {
		return err
	}
	return unix.Ftruncate(fd, size)
}
