package transfer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/transfer/internal/stage"
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

// A cachedFile is a part of a regular file that may be in the page cache.
type cachedFile struct {
	file *os.File
	base int64

	flags int // of reading: unless it is a file in memory, what is in the page cache only

	// For file systems that cannot say what they would have to wait for, the
	// file is mapped, and mincore asked.
	asks   bool
	mapped unsafe.Pointer
	skip   int // bytes of the mapping before base
	length int // of the mapping
}

// openCached returns n bytes at off of a file, ok if it is regular, as long as
// that, and it can be found out what is in the page cache.
func openCached(f *os.File, off int64, n int) (c *cachedFile, ok bool) {
	c = &cachedFile{file: f, base: off, flags: unix.RWF_NOWAIT}
	err := control(f, func(fd int) error {
		var s unix.Stat_t
		if err := unix.Fstat(fd, &s); err != nil {
			return err
		}
		if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Size-off < int64(n) {
			return errors.ErrUnsupported
		}
		var fs unix.Statfs_t
		if unix.Fstatfs(fd, &fs) == nil && int64(fs.Type) == unix.TMPFS_MAGIC {
			c.flags = 0
			return nil
		}
		var one [1]byte
		switch _, err := unix.Preadv2(fd, [][]byte{one[:]}, off, unix.RWF_NOWAIT); err {
		case nil, unix.EAGAIN, unix.EINTR:
			return nil
		}
		// Since Linux 5.2 the kernel answers mincore only for who may write.
		if int(s.Uid) != os.Geteuid() && os.Geteuid() != 0 {
			return errors.ErrUnsupported
		}
		c.asks, c.flags = true, 0
		return c.mmap(fd, n)
	})
	return c, err == nil
}

func (c *cachedFile) mmap(fd, n int) (err error) {
	c.skip = int(c.base % int64(os.Getpagesize()))
	c.length = c.skip + n
	c.mapped, err = unix.MmapPtr(fd, c.base-int64(c.skip), nil, uintptr(c.length), unix.PROT_READ, unix.MAP_SHARED)
	return err
}

func (c *cachedFile) close() {
	if c.mapped != nil {
		_ = unix.MunmapPtr(c.mapped, uintptr(c.length))
	}
}

// readNow reads at off, which counts from base, what is in the page cache. It
// returns [stage.ErrNotReady] if not all is, and less than asked for at the end of
// the file.
func (c *cachedFile) readNow(to []byte, off int) (got int, err error) {
	if c.asks && !c.isCached(off, len(to)) {
		return 0, stage.ErrNotReady
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

// isCached asks what is in the page cache (mincore).
func (c *cachedFile) isCached(off, n int) bool {
	page := os.Getpagesize()
	first := (c.skip + off) / page
	pages := (c.skip+off+n+page-1)/page - first
	var room [256]byte
	for pages > 0 {
		k := min(pages, len(room))
		if !pagesResident(unsafe.Add(c.mapped, first*page), room[:k]) {
			return false
		}
		first, pages = first+k, pages-k
	}
	return true
}

// pagesResident reports whether so many pages as room has bytes are resident.
func pagesResident(at unsafe.Pointer, room []byte) bool {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(at), uintptr(len(room)*os.Getpagesize()), uintptr(unsafe.Pointer(&room[0])))
	return errno == 0 && !slices.ContainsFunc(room, func(b byte) bool { return b&1 == 0 })
}

// A sharedFile is a part of a file, mapped.
type sharedFile struct {
	file     *os.File
	mem      []byte
	off, end int64 // of mem in the file
	before   int64 // the file's size, before it was extended to end
	slow     bool  // writing may wait for a disk
	grows    bool  // pages are allocated when they are written
	put      func(to, from []byte)

	base   unsafe.Pointer // of the mapping
	mapped int            // bytes
}

// mapShared maps n bytes at off of a file in memory, which it extends to hold
// them, or of one that is in the page cache, if cached allows that. It returns
// errors.ErrUnsupported for other files, and for those that cannot be mapped for
// writing.
func mapShared(f *os.File, off int64, n int, cached bool) (*sharedFile, error) {
	skip := int(off % int64(os.Getpagesize()))
	m := &sharedFile{file: f, off: off, end: off + int64(n), mapped: skip + n, put: copyFresh}
	if err := control(f, func(fd int) error { return m.open(fd, cached) }); err != nil {
		return nil, err
	}
	m.mem = unsafe.Slice((*byte)(m.base), m.mapped)[skip:]
	return m, nil
}

// onDisk are file systems whose files are mapped for writing: local ones.
var onDisk = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC}

func (m *sharedFile) open(fd int, cached bool) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	flags, ok := regular(fd) // device nodes may be in memory too
	if !ok || flags&(unix.O_ACCMODE|unix.O_APPEND) != unix.O_RDWR {
		return errors.ErrUnsupported
	}
	var err error
	if m.before, err = sizeOf(fd); err != nil {
		return err
	}
	switch {
	case int64(fs.Type) == unix.TMPFS_MAGIC:
		return m.extend(fd)
	case cached && m.before >= m.end && slices.Contains(onDisk, int64(fs.Type)):
		return m.cached(fd)
	}
	return errors.ErrUnsupported
}

// cached maps a file that is in the page cache. A write to a page that is not
// would read the page first.
func (m *sharedFile) cached(fd int) error {
	if err := m.mmap(fd); err != nil {
		return err
	}
	const samples = 64
	page := os.Getpagesize()
	pages := (m.mapped + page - 1) / page
	for i := range min(samples, pages) {
		var one [1]byte
		if !pagesResident(unsafe.Add(m.base, i*pages/min(samples, pages)*page), one[:]) {
			return errors.Join(errors.ErrUnsupported, unix.MunmapPtr(m.base, uintptr(m.mapped)))
		}
	}
	m.slow, m.put = true, copyOnto
	return nil
}

// copyOnto copies onto pages of a file that are in memory, but not mapped yet: one call
// for many is faster than a fault each.
func copyOnto(to, from []byte) {
	populate(to)
	ntcopy.Copy(to, from)
}

func (m *sharedFile) mmap(fd int) (err error) {
	skip := m.mapped - int(m.end-m.off)
	m.base, err = unix.MmapPtr(fd, m.off-int64(skip), nil, uintptr(m.mapped), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return os.NewSyscallError("mmap", err)
}

// extend maps a file in memory, which may become longer.
func (m *sharedFile) extend(fd int) error {
	if m.grows = m.before < m.end; m.grows {
		if err := unix.Ftruncate(fd, m.end); err != nil {
			return os.NewSyscallError("ftruncate", err)
		}
	} else {
		m.put = copyOnto
	}
	if err := m.mmap(fd); err != nil {
		return errors.Join(err, m.shrink(fd, m.before))
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

// writesAtOffset reports whether a file is regular, and written where its offset is.
func writesAtOffset(f *os.File) (ok bool) {
	_ = control(f, func(fd int) error {
		var flags int
		flags, ok = regular(fd)
		ok = ok && flags&unix.O_APPEND == 0
		return nil
	})
	return ok
}
