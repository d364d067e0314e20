package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/ntcopy"
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

// mapFile maps n bytes at off of a file. The bytes are behind the first skip of the mapping,
// which begins with a page.
func mapFile(fd int, off int64, n, prot int) (mapping []byte, skip int, err error) {
	skip = int(off % int64(os.Getpagesize()))
	mapping, err = unix.Mmap(fd, off-int64(skip), skip+n, prot, unix.MAP_SHARED)
	return mapping, skip, os.NewSyscallError("mmap", err)
}

// A cachedFile is a range of a regular file that may be in the page cache.
type cachedFile struct {
	file  *os.File
	base  int64
	flags int // of preadv2: RWF_NOWAIT, but for a file in memory or a mapping

	// Set if the file system does not support RWF_NOWAIT: then mincore reports what is cached.
	mapping []byte
	skip    int // bytes of the mapping before base
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
	c = &cachedFile{file: f, base: off, flags: unix.RWF_NOWAIT}
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
		c.flags = 0
		c.mapping, c.skip, err = mapFile(fd, off, n, unix.PROT_READ)
		return err
	})
	return c, err == nil
}

func (c *cachedFile) close() {
	if c.mapping != nil {
		_ = unix.Munmap(c.mapping)
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

// A sharedFile is a mapped range of a file.
type sharedFile struct {
	file     *os.File
	mem      []byte
	off, end int64 // of mem in the file
	before   int64 // the file's size, before it was extended to end
	slow     bool  // writing may wait for a disk
	put      func(to, from []byte)
	mapping  []byte // contains mem
}

// mapShared maps n bytes at off of a file in memory, which it extends to hold them. If
// cached is set it also maps a file on disk whose pages are in the page cache. It returns
// errors.ErrUnsupported for other files, and for files that cannot be mapped for writing.
func mapShared(f *os.File, off int64, n int, cached bool) (*sharedFile, error) {
	m := &sharedFile{file: f, off: off, end: off + int64(n)}
	if err := control(f, func(fd int) error { return m.open(fd, cached) }); err != nil {
		return nil, err
	}
	return m, nil
}

// onDisk are the local file systems whose files are mapped for writing.
var onDisk = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC}

func (m *sharedFile) open(fd int, cached bool) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	flags, size, ok := regular(fd) // device nodes may be in memory too
	if !ok || flags&(unix.O_ACCMODE|unix.O_APPEND) != unix.O_RDWR {
		return errors.ErrUnsupported
	}
	m.before = size
	switch {
	case int64(fs.Type) == unix.TMPFS_MAGIC:
		return m.extend(fd)
	case cached && m.before >= m.end && slices.Contains(onDisk, int64(fs.Type)):
		return m.mapCached(fd)
	}
	return errors.ErrUnsupported
}

func (m *sharedFile) mmap(fd int) error {
	mapping, skip, err := mapFile(fd, m.off, int(m.end-m.off), unix.PROT_READ|unix.PROT_WRITE)
	if err == nil {
		m.mapping, m.mem = mapping, mapping[skip:]
	}
	return err
}

// mapCached maps a file if its pages are in the page cache: a write to another page would
// read that page from disk first.
func (m *sharedFile) mapCached(fd int) error {
	if err := m.mmap(fd); err != nil {
		return err
	}
	page := os.Getpagesize()
	pages := (len(m.mapping) + page - 1) / page
	samples := min(64, pages)
	for i := range samples {
		if cached, err := areResident(m.mapping[i*pages/samples*page:][:1]); !cached || err != nil {
			return errors.Join(errors.ErrUnsupported, unix.Munmap(m.mapping))
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

// grows reports whether pages are allocated when they are written.
func (m *sharedFile) grows() bool { return m.before < m.end }

// extend maps a file in memory, which may become longer.
func (m *sharedFile) extend(fd int) error {
	m.put = copyOnto
	if m.grows() {
		m.put = copyFresh
		if err := unix.Ftruncate(fd, m.end); err != nil {
			return os.NewSyscallError("ftruncate", err)
		}
	}
	if err := m.mmap(fd); err != nil {
		return errors.Join(err, m.shrink(fd, m.before))
	}
	return nil
}

// close unmaps the file after done bytes were written, and truncates what extend has added
// behind them.
func (m *sharedFile) close(done int) error {
	err := os.NewSyscallError("munmap", unix.Munmap(m.mapping))
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
	if _, now, ok := regular(fd); !ok || now != m.end || size >= m.end {
		return nil
	}
	return os.NewSyscallError("ftruncate", unix.Ftruncate(fd, size))
}

// freshWorkers is the number of workers that copy into a file whose pages are allocated
// meanwhile: ten are no faster, at twice the cost.
const freshWorkers = 4

// downloadMapped copies into a file that it maps; ok is false if that cannot be done.
func (p target) downloadMapped(ctx context.Context, f *os.File, off int64, n int) (done int, ok bool, err error) {
	m, err := mapShared(f, off, n, !p.call.DirectIO)
	if err != nil {
		return 0, !errors.Is(err, errors.ErrUnsupported), err
	}
	write := writeAt(f, off)
	host := stage.Memory(func(from []byte, off int) error {
		to := m.mem[off : off+len(from)]
		fault := bounded.Guard(func() error {
			m.put(to, from)
			return nil
		})
		if fault != nil { // no page is there: writing allocates one, or reports why not
			_, err := write(from, off)
			return err
		}
		forget(to)
		return nil
	})
	// Workers that populate parts of one page table, 2 MiB, wait for one another.
	c := stage.Copy{N: n, Down: true, Host: host, Slow: m.slow, Kernel: true, Piece: hugePage, MaxChunk: 2 * hugePage}
	if m.grows() {
		c.Workers = freshWorkers
	}
	done, err = p.stage(ctx, c)
	return done, true, errors.Join(err, m.close(done))
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
	pages := innerPages(mem)
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

// populate makes the whole pages of mem resident for writing
// (MADV_POPULATE_WRITE, since Linux 5.14). If it fails, writing faults them in.
func populate(mem []byte) {
	if pages := innerPages(mem); len(pages) > 0 {
		_ = unix.Madvise(pages, unix.MADV_POPULATE_WRITE)
	}
}

// forget removes the pages of a file's mapping, while they stay in the file
// (MADV_DONTNEED). Workers do that side by side; munmap does it with one thread.
func forget(mem []byte) {
	if pages := innerPages(mem); len(pages) > 0 {
		_ = unix.Madvise(pages, unix.MADV_DONTNEED)
	}
}

// innerPages returns the whole pages in mem.
func innerPages(mem []byte) []byte {
	page := os.Getpagesize()
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) & (page - 1)
	if skip+page > len(mem) {
		return nil
	}
	whole := mem[skip:]
	return whole[:len(whole)&^(page-1)]
}
