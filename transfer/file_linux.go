package transfer

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reopenDirect opens a regular file once more, with the flags that it is open
// with and O_DIRECT. It returns nil where that cannot be done: among others for
// a file that is open for appending, where writing ignores the offset.
func reopenDirect(f *os.File, access int) (d *os.File) {
	_ = control(f, func(fd int) error {
		flags, ok := regular(fd)
		mode := flags & unix.O_ACCMODE
		if !ok || flags&(unix.O_APPEND|unix.O_PATH) != 0 || mode != access && mode != unix.O_RDWR {
			return nil
		}
		again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		if err == nil {
			d = os.NewFile(uintptr(again), f.Name())
		}
		return nil
	})
	return d
}

// preadDirect reads from a file of reopenDirect, perhaps less than p.
func preadDirect(d *os.File, p []byte, off int64) (n int, err error) {
	err = control(d, func(fd int) error {
		for {
			if n, err = unix.Pread(fd, p, off); err != unix.EINTR {
				return err
			}
		}
	})
	return n, err
}

// notDirect reports whether writing failed because of O_DIRECT.
func notDirect(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// A sharedFile is a part of a file in memory, mapped.
type sharedFile struct {
	file     *os.File
	mem      []byte
	off, end int64 // of mem in the file
	before   int64 // the file's size, before it was extended to end

	base   unsafe.Pointer // of the mapping
	mapped int            // bytes
}

// mapShared maps n bytes at off of a file in memory, which it extends to hold
// them. It returns errors.ErrUnsupported for other files, and for those that
// cannot be mapped for writing.
func mapShared(f *os.File, off int64, n int) (*sharedFile, error) {
	skip := int(off % int64(os.Getpagesize()))
	m := &sharedFile{file: f, off: off, end: off + int64(n), mapped: skip + n}
	if err := control(f, m.extend); err != nil {
		return nil, err
	}
	m.mem = unsafe.Slice((*byte)(m.base), m.mapped)[skip:]
	return m, nil
}

func (m *sharedFile) extend(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	flags, ok := regular(fd) // device nodes may be in memory too
	if !ok || fs.Type != unix.TMPFS_MAGIC || flags&(unix.O_ACCMODE|unix.O_APPEND) != unix.O_RDWR {
		return errors.ErrUnsupported
	}
	var err error
	if m.before, err = sizeOf(fd); err != nil {
		return err
	}
	if m.before < m.end {
		if err := unix.Ftruncate(fd, m.end); err != nil {
			return os.NewSyscallError("ftruncate", err)
		}
	}
	skip := m.mapped - int(m.end-m.off)
	m.base, err = unix.MmapPtr(fd, m.off-int64(skip), nil, uintptr(m.mapped), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return errors.Join(os.NewSyscallError("mmap", err), m.shrink(fd, m.before))
	}
	return nil
}

// close unmaps the file, of which done bytes were written. What it was extended
// by beyond them is cut off.
func (m *sharedFile) close(done int) error {
	err := os.NewSyscallError("munmap", unix.MunmapPtr(m.base, uintptr(m.mapped)))
	size := m.before
	if done > 0 {
		size = max(size, m.off+int64(done))
	}
	if size < m.end {
		err = errors.Join(err, control(m.file, func(fd int) error { return m.shrink(fd, size) }))
	}
	return err
}

// shrink undoes extend, unless others have changed the size since.
func (m *sharedFile) shrink(fd int, size int64) error {
	now, err := sizeOf(fd)
	if err != nil || now != m.end || size >= m.end {
		return err
	}
	return os.NewSyscallError("ftruncate", unix.Ftruncate(fd, size))
}

// control calls do with the descriptor of f, which is not closed meanwhile.
func control(f *os.File, do func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	closed := conn.Control(func(fd uintptr) { err = do(int(fd)) })
	if closed != nil {
		return os.ErrClosed
	}
	return err
}

// regular returns the flags of an open file, ok if it is a regular one.
func regular(fd int) (flags int, ok bool) {
	var s unix.Stat_t
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	return flags, err == nil && unix.Fstat(fd, &s) == nil && s.Mode&unix.S_IFMT == unix.S_IFREG
}

func sizeOf(fd int) (int64, error) {
	var s unix.Stat_t
	err := unix.Fstat(fd, &s)
	return s.Size, os.NewSyscallError("fstat", err)
}
