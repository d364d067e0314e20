package transfer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// reopenDirect opens a regular file once more with O_DIRECT, if the call asks for that.
func (c Call) reopenDirect(f *os.File, access int) (d *os.File) {
	if !c.DirectIO {
		return nil
	}
	return reopen(f, access, unix.O_DIRECT)
}

// reopen opens a regular file once more, for reading or writing, with the flags that it is open with and
// others. It returns nil where that cannot be done: among others for a file that is open for
// appending, where writing ignores the offset.
func reopen(f *os.File, access, others int) (d *os.File) {
	_ = control(f, func(fd int) error {
		flags, _, ok := regular(fd)
		mode := flags & unix.O_ACCMODE
		if !ok || flags&(unix.O_APPEND|unix.O_PATH) != 0 || mode != access && mode != unix.O_RDWR {
			return nil
		}
		again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags&^unix.O_ACCMODE|access|others|unix.O_CLOEXEC, 0)
		if err == nil {
			d = os.NewFile(uintptr(again), f.Name())
		}
		return nil
	})
	return d
}

// notDirect reports whether writing failed because of O_DIRECT.
func notDirect(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// A cachedFile is a range of a regular file that may be in the page cache.
type cachedFile struct {
	file  *os.File
	base  int64
	flags int // of preadv2: RWF_NOWAIT, but for a file in memory or a mapping

	// Set if the file system does not support RWF_NOWAIT: then mincore reports what is cached.
	mapping []byte

	memory *memoryFile // if set, it has the bytes too
	skip   int         // bytes of the mappings before base
}

// A fileSystem is the type of a file system as statfs returns it; 0 is not known.
type fileSystem uint32

func fileSystemOf(f *os.File) (is fileSystem) {
	_ = control(f, func(fd int) error {
		var s unix.Statfs_t
		if unix.Fstatfs(fd, &s) == nil {
			is = fileSystem(s.Type)
		}
		return nil
	})
	return is
}

// remote are the file systems of servers, or of processes (FUSE): a request that does not continue
// the one before may cost a round trip, and stops the server's or process's read-ahead.
var remote = []fileSystem{
	unix.FUSE_SUPER_MAGIC, // gcsfuse, s3fs, hf-mount, virtiofs
	unix.NFS_SUPER_MAGIC,
	unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC,
	unix.V9FS_MAGIC,
	unix.CEPH_SUPER_MAGIC,
	unix.AFS_SUPER_MAGIC, unix.AFS_FS_MAGIC, unix.CODA_SUPER_MAGIC,
	0x0BD00BD0, // Lustre, whose module is not part of Linux; so are the next ones
	0x47504653, // GPFS (Storage Scale)
	0x19830326, // BeeGFS
}

// isRemote reports whether a file should be read in long consecutive ranges, each by a descriptor of its own.
func (s fileSystem) isRemote() bool { return slices.Contains(remote, s) }

// openCached returns n bytes at off of a file. ok is false if the file is not regular or too
// short, or if the kernel does not report what is in the page cache.
func openCached(f *os.File, in fileSystem, off int64, n int) (c *cachedFile, ok bool) {
	c = &cachedFile{file: f, base: off, flags: unix.RWF_NOWAIT, skip: int(off % int64(os.Getpagesize()))}
	err := control(f, func(fd int) (err error) {
		var s unix.Stat_t
		if err := unix.Fstat(fd, &s); err != nil {
			return err
		}
		if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Size-off < int64(n) {
			return errors.ErrUnsupported
		}
		if in == unix.TMPFS_MAGIC {
			c.flags = 0
			c.memory = mapMemoryFile(fd, &s, off, n)
			return nil
		}
		var one [1]byte
		switch _, err := unix.Preadv2(fd, [][]byte{one[:]}, off, unix.RWF_NOWAIT); err {
		case nil, unix.EAGAIN, unix.EINTR:
			return nil
		}
		// Since Linux 5.2 mincore requires the right to write the file.
		if int(s.Uid) != os.Geteuid() && os.Geteuid() != 0 {
			return errors.ErrUnsupported
		}
		return c.mapForMincore(fd, n)
	})
	return c, err == nil
}

// mapForMincore maps the file, so that the kernel reports which of its pages are resident.
func (c *cachedFile) mapForMincore(fd, n int) (err error) {
	c.flags = 0
	c.mapping, err = mapFile(fd, c.base, n)
	return err
}

// mapFile maps n bytes at off of a file for reading, from the start of a page on.
func mapFile(fd int, off int64, n int) ([]byte, error) {
	skip := int(off % int64(os.Getpagesize()))
	mapping, err := unix.Mmap(fd, off-int64(skip), skip+n, unix.PROT_READ, unix.MAP_SHARED)
	return mapping, os.NewSyscallError("mmap", err)
}

func (c *cachedFile) close() {
	if c.mapping != nil {
		_ = unix.Munmap(c.mapping)
	}
	if c.memory != nil {
		c.memory.close()
	}
}

// readNow reads from the page cache at off, which counts from base. It returns
// [stage.ErrNotReady] if some of the bytes are not there, and fewer bytes at the end of the
// file.
func (c *cachedFile) readNow(to []byte, off int) (got int, err error) {
	if c.mapping != nil {
		if cached, err := areResident(c.mapping[c.skip+off:][:len(to)]); !cached || err != nil {
			return 0, stage.ErrNotReady
		}
	}
	if c.memory != nil {
		if c.memory.prefersMapping(c.skip+off, len(to)) && c.memory.read(to, c.skip+off) {
			return len(to), nil
		}
		defer func(began time.Time) { c.memory.pread.add(time.Since(began), len(to)) }(time.Now())
	}
	err = control(c.file, func(fd int) error {
		for got < len(to) {
			n, err := c.pread(fd, to[got:], c.base+int64(off+got))
			switch {
			case err == unix.EINTR:
			case err == unix.EAGAIN || err == unix.EOPNOTSUPP:
				return stage.ErrNotReady
			case err != nil:
				return &os.PathError{Op: "read", Path: c.file.Name(), Err: err}
			case n == 0:
				return nil
			default:
				got += n
			}
		}
		return nil
	})
	return got, err
}

// pread calls preadv2 only for its flags: kernels before 4.6 and emulators lack it.
func (c *cachedFile) pread(fd int, to []byte, at int64) (int, error) {
	if c.flags == 0 {
		return unix.Pread(fd, to, at)
	}
	return unix.Preadv2(fd, [][]byte{to}, at, c.flags)
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

// regular returns the flags and the size of an open file, ok if it is a regular one.
func regular(fd int) (flags int, size int64, ok bool) {
	var s unix.Stat_t
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	ok = err == nil && unix.Fstat(fd, &s) == nil && s.Mode&unix.S_IFMT == unix.S_IFREG
	return flags, s.Size, ok
}

// writesAtOffset reports whether a file is regular, and written where its offset is.
func writesAtOffset(f *os.File) (ok bool) {
	_ = control(f, func(fd int) error {
		flags, _, isRegular := regular(fd)
		ok = isRegular && flags&unix.O_APPEND == 0
		return nil
	})
	return ok
}

// resident reports whether the first whole page of mem is in memory. It returns true for
// memory without a whole page, and after an error.
func resident(mem []byte) bool {
	pages := hostos.InnerPages(mem)
	if len(pages) == 0 {
		return true
	}
	is, err := areResident(pages[:1])
	return is || err != nil
}

// areResident reports whether all pages that have bytes of mem are in memory (mincore).
func areResident(mem []byte) (bool, error) {
	page := os.Getpagesize()
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	skip := int(at) & (page - 1)
	at -= uintptr(skip)
	var there [256]byte
	for pages := (skip + len(mem) + page - 1) / page; pages > 0; pages -= len(there) {
		some := there[:min(pages, len(there))]
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, at, uintptr(len(some)*page), uintptr(unsafe.Pointer(&some[0])))
		if errno != 0 {
			return false, errno
		}
		if slices.ContainsFunc(some, func(b byte) bool { return b&1 == 0 }) {
			return false, nil
		}
		at += uintptr(len(some) * page)
	}
	return true, nil
}

// forget removes the pages of a file's mapping, while they stay in the file
// (MADV_DONTNEED). Workers do that side by side; munmap does it with one thread.
func forget(mem []byte) {
	if pages := hostos.InnerPages(mem); len(pages) > 0 {
		_ = unix.Madvise(pages, unix.MADV_DONTNEED)
	}
}
