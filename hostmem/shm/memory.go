package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/pages"
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
	if m.writing {
		_, _ = lockWriter(m.file, false) // it ends with the descriptor in any case
	}
	return closeLocked(m.file)
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
