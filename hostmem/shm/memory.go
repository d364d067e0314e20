package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
)

// DefaultDir is the directory of named memory where Options.Dir is empty.
const DefaultDir = "/dev/shm"

var (
	// ErrWriting is the error of Begin while another process, or another Memory of this one, writes.
	ErrWriting = errors.New("another one is writing the content")

	errNilContext = errors.New("the context is nil")
	errZero       = errors.New("the zero value (open it with Create, Open or OpenFile)")
)

// Options of a memory. The zero value makes one that is removed with its last process, for this user, on any NUMA node.
type Options struct {
	// Dir is the directory of named memory: of a tmpfs, or of a hugetlbfs for huge pages. Empty is DefaultDir.
	Dir string
	// ReadOnly maps the memory for reading only. The GPU can only read it then, too. Create ignores it.
	ReadOnly bool
	// AnyOwner lets Open open memory of other users than this one and root.
	AnyOwner bool
	// Keep has Create make memory that stays when the last process closes it, until Remove. It needs a name.
	Keep bool
	// Mode has the permissions of what Create makes; 0 stands for 0600.
	Mode fs.FileMode
	// Device is the GPU on whose NUMA node Create makes the memory; nil for any node.
	Device *cudart.Device
	// Workers is the number of goroutines with which Create makes pages resident; 0 adapts to the host.
	Workers int
}

// path returns the file of a name, empty for none.
func (o Options) path(name string) (string, error) {
	switch {
	case name == "":
		return "", nil
	case len(name) > 200 || strings.ContainsAny(name, "/\x00") || name == "." || name == "..":
		return "", fmt.Errorf("the name %.210q: want neither . nor .., and up to 200 bytes without a slash", name)
	}
	return filepath.Join(cmp.Or(o.Dir, DefaultDir), name), nil
}

// A Memory is host memory that other processes can open. Its methods may be called from any goroutine; callers order what
// they do to its bytes.
type Memory struct {
	path     string // of the file when it was opened; without a name it is the path of no file
	id       identity
	readOnly bool
	header
	file *os.File      // has the locks
	page *pages.Region // the header, mapped
	mem  *pages.Region // the content, mapped
	life lifetime.Lifetime

	mu      sync.Mutex
	writing bool // between Begin and Complete
	buffers []*hostmem.Buffer
}

// Create makes memory of n bytes, which are zero, and makes it resident with several threads. An empty name makes one
// without a name: see [Memory.File]. The file takes n bytes rounded up to a page, and another page.
//
// If the name exists, the error wraps [fs.ErrExist], unless that is memory of a process that was killed before it could
// remove it. Of several processes that create one name, one succeeds. The error wraps [hostmem.ErrLimit] if the host or the
// control group lacks the memory, and ENOSPC if the file system does. When ctx ends, Create returns its error. After an
// error nothing stays.
func Create(ctx context.Context, name string, n int, o Options) (*Memory, error) {
	m, err := create(ctx, name, n, o)
	if err != nil {
		return nil, fmt.Errorf("shm: create %q of %d bytes: %w", name, n, err)
	}
	return m, nil
}

func create(ctx context.Context, name string, n int, o Options) (m *Memory, err error) {
	path, err := o.path(name)
	switch {
	case ctx == nil:
		return nil, errNilContext
	case err != nil:
		return nil, err
	case n <= 0 || n > math.MaxInt/2:
		return nil, errors.New("the size must be positive, and fit the address space")
	case o.Keep && path == "":
		return nil, errors.New("Options.Keep needs a name (a memory without one exists while a process has it open)")
	case o.Mode&^0o666 != 0:
		return nil, fmt.Errorf("Options.Mode of %v: want bits of 0666", o.Mode)
	case ctx.Err() != nil:
		return nil, bounded.Ended(ctx)
	}
	mode := cmp.Or(o.Mode, 0o600)
	m = &Memory{path: path, header: header{keep: o.Keep, size: n, created: time.Now(), pid: os.Getpid(), uid: os.Getuid()}}
	if path == "" {
		m.file, err = openAnonymous(mode)
	} else {
		m.file, err = openTemporary(filepath.Dir(path), mode)
	}
	if err != nil {
		return nil, advise(err)
	}
	if err := m.fill(ctx, o); err != nil {
		m.keep = false
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// advise adds what to do where a file system has no files without a name.
func advise(err error) error {
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("%w (Options.Dir must be of a tmpfs or a hugetlbfs)", err)
	}
	return err
}

// fill gives a new file its size, its header, its name, and then its pages: of several makers of a name all but one end
// before they take memory.
func (m *Memory) fill(ctx context.Context, o Options) error {
	system := pages.SystemOf(ctx)
	on, err := system.Calls.FileSystem(descriptorPath(m.file))
	if err != nil {
		return err
	}
	if !on.Memory {
		return fmt.Errorf("its directory is on a disk: %w (Options.Dir must be of a tmpfs or a hugetlbfs)", errors.ErrUnsupported)
	}
	m.offset = max(system.Page, on.Page)
	whole := roundUp(int64(m.size), m.offset) + int64(m.offset)
	reservation, err := budget.Process().Acquire(ctx, budget.Request{Bytes: int(whole), Reserved: on.Page > 0})
	if err != nil {
		return err
	}
	defer reservation.Release() // Register reserves it again, and finds it resident
	if err := m.file.Truncate(whole); err != nil {
		return err
	}
	if err := m.putHeader(system); err != nil {
		return err
	}
	if m.path == "" {
		err = seal(m.file)
	} else {
		err = m.link(ctx)
	}
	if err == nil {
		err = m.open(system)
	}
	if err != nil {
		return err
	}
	if node, ok := hostmem.NodeOf(ctx, o.Device); ok {
		m.mem.Bind(node)
	}
	err = m.mem.Populate(ctx, pages.Populate{Threads: o.Workers})
	if err == nil && len(m.mem.Notes()) > 0 { // Linux before 5.14 does not populate
		err = reserve(m.file, whole)
	}
	return noSpace(err)
}

// putHeader writes the header of a new file.
func (m *Memory) putHeader(system *pages.System) error {
	page, err := pages.MapFile(system, m.file, 0, headerSize, true)
	if err != nil {
		return err
	}
	err = pages.Access(func() { m.header.put(page.Bytes()) })
	return errors.Join(noSpace(err), page.Unmap())
}

// noSpace adds what a page that the kernel does not have means here.
func noSpace(err error) error {
	if err != nil && errors.Is(err, pages.ErrFault) {
		return fmt.Errorf("%w: the file system has no space left (df; in a container, the size of its /dev/shm): %w", errNoSpace, err)
	}
	return err
}

// open locks and maps a file whose header is known.
func (m *Memory) open(system *pages.System) error {
	err := m.lock()
	if err != nil {
		return err
	}
	if m.page, err = pages.MapFile(system, m.file, 0, headerSize, !m.readOnly); err != nil {
		return err
	}
	if m.mem, err = pages.MapFile(system, m.file, int64(m.offset), m.size, !m.readOnly); err != nil || m.readOnly {
		return err
	}
	return pages.Access(m.used)
}

// lock locks the file as one of its users.
func (m *Memory) lock() error {
	if ok, err := tryLock(m.file, false); err != nil || !ok {
		return cmp.Or(err, errLocked)
	}
	info, err := m.file.Stat()
	if err == nil {
		m.id, _, _ = identify(info)
	}
	return err
}

// link gives the file its name, and opens it by that: /proc shows the name then, and other processes find it.
func (m *Memory) link(ctx context.Context) error {
	if err := m.lock(); err != nil { // before others can open it
		return err
	}
	if err := m.takeName(ctx); err != nil {
		return err
	}
	f, err := openNamed(m.path, false)
	if err != nil {
		return err
	}
	temporary := m.file
	m.file = f
	if err = m.lock(); err == nil && !m.named() {
		err = fmt.Errorf("it was removed meanwhile: %w", fs.ErrNotExist)
	}
	return errors.Join(err, temporary.Close())
}

// takeName links the file. Memory of that name which nobody has, and nobody keeps, is removed.
func (m *Memory) takeName(ctx context.Context) error {
	for {
		err := link(m.file, m.path)
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		switch removed, why := removeUnused(m.path); {
		case why != nil:
			return fmt.Errorf("%w: %w", err, why)
		case !removed:
			return fmt.Errorf("%w: it is in use or kept (open it, or remove it with Remove)", err)
		}
		if ctx.Err() != nil {
			return bounded.Ended(ctx)
		}
	}
}

// Open maps memory by its name. The error wraps [fs.ErrNotExist] if there is none, [fs.ErrPermission] if it is another
// user's and Options.AnyOwner is not set, and [ErrDamaged] if the file is not one of Create.
func Open(ctx context.Context, name string, o Options) (*Memory, error) {
	path, err := o.path(name)
	switch {
	case ctx == nil:
		err = errNilContext
	case err == nil && path == "":
		err = errors.New("the name is empty")
	}
	var m *Memory
	if err == nil {
		m, err = openUnlocked(ctx, func() (*Memory, error) {
			f, err := openNamed(path, o.ReadOnly)
			if err != nil {
				return nil, explainOpen(path, err)
			}
			m, err := openFile(ctx, f, path, o)
			if err == nil && !m.named() { // it was removed before it was locked: another may have the name
				return nil, errors.Join(errLocked, m.Close())
			}
			return m, err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("shm: open %q: %w", name, err)
	}
	return m, nil
}

// openUnlocked opens a file once nobody has it exclusively.
func openUnlocked(ctx context.Context, open func() (*Memory, error)) (*Memory, error) {
	for range openAttempts {
		m, err := open()
		if !errors.Is(err, errLocked) {
			return m, err
		}
		select {
		case <-ctx.Done():
			return nil, bounded.Ended(ctx)
		case <-time.After(openPause):
		}
	}
	return nil, errLocked
}

const (
	openPause    = time.Millisecond
	openAttempts = 10_000
)

// errLocked is the error of a file that a process has for itself, as one does for a moment to remove it.
var errLocked = errors.New("another process has locked the file exclusively")

// explainOpen names a link.
func explainOpen(path string, err error) error {
	if info, failed := os.Lstat(path); failed == nil && info.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%w: it is a link", err)
	}
	return err
}

// OpenFile maps memory by a descriptor of its file, which a process has received or kept. It does not use f afterwards.
// Who has sent a descriptor is trusted: Options.AnyOwner is not needed. Errors are those of Open.
func OpenFile(ctx context.Context, f *os.File, o Options) (*Memory, error) {
	if ctx == nil || f == nil {
		return nil, errors.New("shm: open a file: the context or the file is nil")
	}
	o.AnyOwner = true
	path, _ := os.Readlink(descriptorPath(f)) // of memory without a name it is the path of no file
	m, err := openUnlocked(ctx, func() (*Memory, error) {
		own, err := reopen(f, o.ReadOnly)
		if err != nil {
			return nil, err
		}
		return openFile(ctx, own, path, o)
	})
	if err != nil {
		return nil, fmt.Errorf("shm: open %s: %w", f.Name(), err)
	}
	return m, nil
}

// openFile maps a file, and closes it after an error.
func openFile(ctx context.Context, f *os.File, path string, o Options) (*Memory, error) {
	m := &Memory{path: path, file: f, readOnly: o.ReadOnly}
	system := pages.SystemOf(ctx)
	h, err := readHeader(f, system, o.AnyOwner)
	if err == nil {
		m.header = h
		err = m.open(system)
	}
	if err != nil {
		return nil, errors.Join(err, m.unmap(), m.file.Close())
	}
	return m, nil
}

// readHeader reads the header of a file.
func readHeader(f *os.File, system *pages.System, anyOwner bool) (header, error) {
	info, err := f.Stat()
	if err != nil {
		return header{}, err
	}
	if !info.Mode().IsRegular() {
		return header{}, fmt.Errorf("%w: it is not a regular file (mode %v)", ErrDamaged, info.Mode())
	}
	if _, uid, _ := identify(info); !anyOwner && uid != os.Geteuid() && uid != 0 {
		return header{}, fmt.Errorf("it belongs to user %d: %w (Options.AnyOwner opens it)", uid, fs.ErrPermission)
	}
	on, err := system.Calls.FileSystem(descriptorPath(f))
	if err != nil {
		return header{}, err
	}
	page := make([]byte, headerSize)
	n, err := f.ReadAt(page, 0)
	if n < headerSize && err != nil && info.Size() >= headerSize {
		return header{}, err
	}
	return parse(page[:n], info.Size(), max(system.Page, on.Page))
}

// named reports whether the file still has its name.
func (m *Memory) named() bool {
	info, err := os.Lstat(m.path)
	if err != nil {
		return false
	}
	id, _, _ := identify(info)
	return id == m.id
}

// used records that the memory is in use.
func (m *Memory) used() {
	atomic.StoreUint64(word(m.page.Bytes(), atUsed), uint64(time.Now().UnixNano()))
}

// Bytes returns the memory, and nil once Close was called.
func (m *Memory) Bytes() []byte {
	if m.mem == nil || m.life.Sealed() {
		return nil
	}
	return m.mem.Bytes()
}

// Len returns the size in bytes.
func (m *Memory) Len() int { return m.size }

// String names the memory in messages.
func (m *Memory) String() string {
	if m.path == "" {
		return fmt.Sprintf("shared memory of %d bytes", m.size)
	}
	return fmt.Sprintf("shared memory %s of %d bytes", m.path, m.size)
}

// Register pins the memory for the GPUs of this process ([hostmem.Register]). Close closes the Buffer, if it is still open.
// Of memory that is opened with Options.ReadOnly the GPU can only read.
func (m *Memory) Register(ctx context.Context, dev *cudart.Device, o hostmem.RegisterOptions) (*hostmem.Buffer, error) {
	if err := m.begin(); err != nil {
		return nil, m.wrap("register", err)
	}
	defer m.life.End()
	o.Label = cmp.Or(o.Label, m.path)
	o.File, o.Offset = m.file, int64(m.offset)
	b, err := hostmem.Register(ctx, dev, m.mem.Bytes(), o)
	if err != nil {
		return nil, m.wrap("register", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.buffers = append(m.buffers, b)
	return b, nil
}

// begin begins a call that uses the memory; life.End ends it.
func (m *Memory) begin() error {
	if m.mem == nil {
		return errZero
	}
	if !m.life.Begin() {
		return cudart.ErrClosed
	}
	return nil
}

func (m *Memory) wrap(what string, err error) error {
	if err == nil || m.mem == nil && errors.Is(err, errZero) {
		return prefixed(what, err)
	}
	return fmt.Errorf("shm: %s %v: %w", what, m, err)
}

func prefixed(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("shm: %s: %w", what, err)
}

// File returns a descriptor of the file for another process, which the caller closes. Its locks are its own: a process that
// only keeps it does not count as one that has the memory open, but memory without a name exists as long as it does.
func (m *Memory) File() (*os.File, error) {
	if err := m.begin(); err != nil {
		return nil, m.wrap("descriptor of", err)
	}
	defer m.life.End()
	f, err := reopen(m.file, m.readOnly)
	return f, m.wrap("descriptor of", err)
}

// Content returns the state of the content, which other processes may change at any time.
func (m *Memory) Content() (c Content, err error) {
	if err := m.begin(); err != nil {
		return c, m.wrap("content of", err)
	}
	defer m.life.End()
	m.mu.Lock()
	defer m.mu.Unlock()
	err = pages.Access(func() { c = contentOf(m.page.Bytes()) })
	return c, m.wrap("content of", err)
}

// Begin makes the content incomplete, before it is written. The error wraps [ErrWriting] while another process, or another
// Memory, has begun and not completed it; one that was killed does not count.
func (m *Memory) Begin() error { return m.wrap("begin to write", m.write(true, "")) }

// Complete makes the content complete, when it was written: all of it, also by the GPU. The label, of up to 200 bytes, says
// what it is.
func (m *Memory) Complete(label string) error { return m.wrap("complete", m.write(false, label)) }

func (m *Memory) write(begin bool, label string) error {
	if err := m.begin(); err != nil {
		return err
	}
	defer m.life.End()
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.readOnly:
		return hostmem.ErrReadOnly
	case begin && m.writing:
		return ErrWriting
	case !begin && !m.writing:
		return errors.New("Begin was not called")
	case len(label) > maxLabel:
		return fmt.Errorf("the label has %d bytes: want up to %d", len(label), maxLabel)
	}
	if begin {
		if ok, err := lockWriter(m.file, true); err != nil || !ok {
			return cmp.Or(err, ErrWriting)
		}
		m.writing = true
	}
	if err := pages.Access(func() { m.change(begin, label) }); err != nil {
		return err
	}
	if begin {
		return nil
	}
	m.writing = false
	_, err := lockWriter(m.file, false)
	return err
}

// change changes the generation: an odd one before all other fields, an even one after them.
func (m *Memory) change(begin bool, label string) {
	page := m.page.Bytes()
	generation := atomic.LoadUint64(word(page, atGeneration)) | 1
	atomic.StoreUint64(word(page, atGeneration), generation)
	putContent(page, os.Getpid(), label)
	m.used()
	if !begin {
		atomic.StoreUint64(word(page, atGeneration), generation+1)
	}
}

// Close closes the Buffers of Register and unmaps the memory. If no other process has it open, its name is removed, unless
// Options.Keep was set. After an error the memory stays mapped, and Close may be called again. A second Close does nothing.
func (m *Memory) Close() error { return m.CloseContext(context.Background()) }

// CloseContext is Close that stops waiting for the GPU when ctx ends, as that of a Buffer does.
func (m *Memory) CloseContext(ctx context.Context) error {
	if ctx == nil {
		return errors.New("shm: close: " + errNilContext.Error())
	}
	if m.mem == nil {
		return m.wrap("close", errZero)
	}
	return m.wrap("close", m.life.Close(ctx, func(ctx context.Context) error {
		for _, b := range m.buffers {
			if err := b.CloseContext(ctx); err != nil {
				return err
			}
		}
		if mem := m.mem.Bytes(); mem != nil {
			if other, _, ok := hostmem.Find(mem); ok {
				return fmt.Errorf("%v is still registered: close it before", other)
			}
		}
		return m.close()
	}))
}

// close removes the name, if nobody else has it, and unmaps the memory.
func (m *Memory) close() error {
	if m.page != nil && m.page.Bytes() != nil && !m.readOnly {
		_ = pages.Access(m.used) // a file that has lost its header has no more use
	}
	if err := m.unmap(); err != nil {
		return err
	}
	if m.id != (identity{}) && !m.keep {
		// The exclusive lock takes the place of the shared one, also if it is refused.
		last, err := tryLock(m.file, true)
		if err == nil && last && m.named() {
			err = os.Remove(m.path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) { // its owner may remove it
			return err
		}
	}
	return m.file.Close()
}

func (m *Memory) unmap() error {
	var errs []error
	for _, r := range []*pages.Region{m.mem, m.page} {
		if r != nil {
			errs = append(errs, r.Unmap())
		}
	}
	return errors.Join(errs...)
}
