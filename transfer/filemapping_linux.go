package transfer

import (
	"context"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A sharedFile is a mapped range of a file.
type sharedFile struct {
	*hostos.PagesAhead
	file     *os.File
	off, end int64 // of the range
	before   int64 // the file's size, before it was extended to end
	onDisk   bool  // writing may wait for a disk
	new      bool  // most of its pages are to be allocated
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

// disks are the local file systems whose files are mapped for writing.
var disks = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC}

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
	case cached && m.before >= m.end && slices.Contains(disks, int64(fs.Type)):
		return m.mapCached(fd)
	}
	return errors.ErrUnsupported
}

func (m *sharedFile) mmap(fd int) error {
	mapping, err := hostos.MapFile(fd, m.off, int(m.end-m.off))
	m.PagesAhead = hostos.NewPagesAhead(mapping)
	return err
}

// mapCached maps a file if its pages are in the page cache: a write to another page would
// read that page from disk first.
func (m *sharedFile) mapCached(fd int) error {
	if err := m.mmap(fd); err != nil {
		return err
	}
	const samples = 64
	for i := range samples {
		if cached, err := areResident(m.Bytes[i*len(m.Bytes)/samples:][:1]); !cached || err != nil {
			return errors.Join(errors.ErrUnsupported, m.Unmap())
		}
	}
	m.onDisk = true
	return nil
}

// extend maps a file in memory, which may become longer.
func (m *sharedFile) extend(fd int) error {
	if m.before < m.end {
		if err := unix.Ftruncate(fd, m.end); err != nil {
			return os.NewSyscallError("ftruncate", err)
		}
	}
	if err := m.mmap(fd); err != nil {
		return errors.Join(err, m.shrink(fd, m.before))
	}
	m.new = len(m.Bytes) >= minFresh && fresh(m.Bytes)
	return nil
}

// close unmaps the file after done bytes were written, and truncates what extend has added
// behind them.
func (m *sharedFile) close(done int) error {
	err := m.Unmap()
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

// put copies into the mapping. Pages that are in memory, but not mapped yet, are mapped by one call for many, which is
// faster than a fault each, and unmapped afterwards: workers do that side by side, munmap does it with one thread.
func (m *sharedFile) put(to, from []byte) {
	switch {
	case m.new: // its pages are mapped
		ntcopy.Copy(to, from)
		return
	case m.before < m.end:
		copyFresh(to, from)
	default:
		hostos.Populate(to)
		ntcopy.Copy(to, from)
	}
	forget(to)
}

// downloadMapped copies into a file that it maps; ok is false if that cannot be done.
func (p target) downloadMapped(ctx context.Context, f *os.File, off int64, n int) (done int, ok bool, err error) {
	m, err := mapShared(f, off, n, !p.call.DirectIO)
	if err != nil {
		return 0, !errors.Is(err, errors.ErrUnsupported), err
	}
	write := writeAt(f, off)
	memory := stage.Memory(func(from []byte, off int) error {
		if bounded.Guard(func() error { m.put(m.Bytes[off:off+len(from)], from); return nil }) == nil {
			return nil
		}
		// No page is there: writing allocates one, or reports why not.
		_, err := write(from, off)
		return err
	})
	if m.new {
		done, err = p.stage(ctx, stage.Copy{N: n, Down: true, Host: &newFile{memory, m.PagesAhead, 0}})
	} else {
		// Workers that populate parts of one page table, 2 MiB, wait for one another.
		c := stage.Copy{N: n, Down: true, Host: memory, Slow: m.onDisk, Kernel: true, Piece: hostos.HugePage, MaxChunk: 2 * hostos.HugePage}
		done, err = p.stage(ctx, c)
	}
	return done, true, errors.Join(err, m.close(done))
}

// A newFile is a [stage.Host] of a file's mapping whose pages are made ahead of the copies, so that these hold no
// memory of the ring meanwhile.
type newFile struct {
	stage.Memory
	pages *hostos.PagesAhead
	taken int
}

func (f *newFile) Start(j *stage.Job) {
	f.pages.Start(func(off int) bool { return !j.PastEnd(off) }, j.Wake)
}

func (f *newFile) Ready() int { return f.pages.Ready() - f.taken }

func (f *newFile) Take(off, n int) stage.Part {
	f.taken = off + n
	return f.Memory.Take(off, n)
}

func (f *newFile) Stop() { f.pages.Stop() }
