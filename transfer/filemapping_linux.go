package transfer

import (
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A sharedFile is a mapped range of a file.
type sharedFile struct {
	*hostos.FileMapping
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

func (m *sharedFile) mmap(fd int) (err error) {
	m.FileMapping, err = hostos.MapFile(fd, m.off, int(m.end-m.off))
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
	case m.new: // pagesAhead has mapped huge pages
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
		ahead := &pagesAhead{Memory: memory, file: m, made: map[int]int{}}
		done, err = p.stage(ctx, stage.Copy{N: n, Down: true, Host: ahead})
		ahead.end()
	} else {
		// Workers that populate parts of one page table, 2 MiB, wait for one another.
		c := stage.Copy{N: n, Down: true, Host: memory, Slow: m.onDisk, Kernel: true, Piece: hostos.HugePage, MaxChunk: 2 * hostos.HugePage}
		done, err = p.stage(ctx, c)
	}
	return done, true, errors.Join(err, m.close(done))
}

const (
	// aheadBytes is the number of bytes whose pages one call makes: MADV_COLLAPSE begins with work of all cores.
	aheadBytes = 2 * hostos.HugePage
	// maxMakers is the number of goroutines that make pages, if there are as many cores besides those that copy.
	maxMakers = 12
)

// A pagesAhead is a [stage.Host] of a file's mapping whose pages are made ahead of the copies, so that these hold no
// memory of the ring meanwhile.
type pagesAhead struct {
	stage.Memory
	file *sharedFile

	job     *stage.Job
	makers  sync.WaitGroup
	stopped atomic.Bool

	mu    sync.Mutex
	next  int         // from here on nobody makes pages yet
	ready int         // up to here all pages are made, or the kernel has refused them
	made  map[int]int // ranges with pages behind ready: start and end
	taken int
}

func (a *pagesAhead) Start(j *stage.Job) {
	a.job = j
	for range min(maxMakers, (3*runtime.GOMAXPROCS(0)+3)/4) {
		a.makers.Go(a.make)
	}
}

func (a *pagesAhead) make() {
	for !a.stopped.Load() {
		a.mu.Lock()
		from := a.next
		a.next = min(len(a.file.Bytes), from+aheadBytes-int(a.file.off+int64(from))&(hostos.HugePage-1))
		to := a.next
		a.mu.Unlock()
		if from == to || a.job.PastEnd(from) {
			return
		}
		a.file.MakePages(from, to-from)
		a.mu.Lock()
		a.made[from] = to
		for end, ok := a.made[a.ready]; ok; end, ok = a.made[a.ready] {
			delete(a.made, a.ready)
			a.ready = end
		}
		a.mu.Unlock()
		a.job.Wake()
	}
}

func (a *pagesAhead) Ready() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ready - a.taken
}

func (a *pagesAhead) Take(off, n int) stage.Part {
	a.mu.Lock()
	a.taken = off + n
	a.mu.Unlock()
	return a.Memory.Take(off, n)
}

func (a *pagesAhead) Stop() { a.stopped.Store(true) }

// end waits until nobody makes pages any more.
func (a *pagesAhead) end() {
	a.Stop()
	a.makers.Wait()
}
