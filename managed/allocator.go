package managed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrClosed is returned by methods of an Allocator or Memory that is closed.
	// errors.Is reports that it is [os.ErrClosed].
	ErrClosed = sentinel.New("already closed", os.ErrClosed)

	// ErrOversubscribed is returned for memory that could not be on the card all at once.
	ErrOversubscribed = errors.New("more managed memory than the card has room for")

	// ErrReserve is returned if managed memory cannot be kept out of Options.Reserve.
	ErrReserve = errors.New("the reserve of device memory cannot be kept")

	// ErrNotConcurrent is returned where the device cannot access managed memory while
	// the CPU does. errors.Is reports that it is [errors.ErrUnsupported].
	ErrNotConcurrent = sentinel.New("the device cannot access managed memory while the CPU does (its attribute ConcurrentManagedAccess is 0, as on Windows and in WSL, vGPU and gVisor): the process crashes if the CPU touches managed memory while work is pending, and there is no prefetch, no advice, and no more memory than the card has", errors.ErrUnsupported)

	// ErrInUse is returned by Close of an Allocator whose memory is not closed.
	ErrInUse = errors.New("memory is in use")

	errNilDevice  = errors.New("the device is nil")
	errNilStream  = errors.New("the stream is nil")
	errNilContext = errors.New("the context is nil")
	errSize       = errors.New("the size must be positive")
)

// DefaultLogAbove is the Options.LogAbove of allocators that set none.
const DefaultLogAbove = 100_000_000

// Options shape an Allocator. The zero value is what most programs want.
type Options struct {
	// Label is counted for Alloc; "" is a label as well. See also AllocLabel.
	Label string
	// Reserve is how much device memory is kept free of managed memory, in bytes.
	Reserve int
	// Oversubscribe allows more memory than the card has. What is beyond stays on the
	// host, advised with PreferredLocation(Host()) and AccessedBy(dev.Location()).
	Oversubscribe bool
	// AllowExclusive allows a device that cannot access managed memory while the CPU
	// does: see "Coherence" in the package's documentation.
	AllowExclusive bool
	// Logger gets a record of each allocation of LogAbove bytes and more, at level Info.
	// Nil logs nothing. A LogAbove of 0 means DefaultLogAbove.
	Logger   *slog.Logger
	LogAbove int
}

// An Allocator allocates managed memory for one device, and counts it.
type Allocator struct {
	dev        *cudart.Device
	o          Options
	concurrent bool
	notes      []string
	card       *card

	leave sync.Once // the card

	mu      sync.Mutex // not held during calls into the library
	closed  bool
	streams []*cudart.Stream // for moves, idle
	live    memoryList
	order   uint64 // of the last use: see Memory.used
	total   counts
	labels  map[string]*counts
	own     *counts // of Options.Label, once there are any
	onHost  int     // bytes of memory beyond the card
	failed  int
}

// New makes an allocator. It allocates nothing yet. Close it. Errors are of a nil device,
// of one whose Runtime was closed ([cudart.ErrClosed]), of invalid options; for a
// device without managed memory one that wraps [errors.ErrUnsupported], and
// [ErrNotConcurrent].
func New(dev *cudart.Device, o Options) (*Allocator, error) {
	a, err := newAllocator(dev, o)
	if err != nil {
		return nil, fmt.Errorf("managed: new allocator: %w", err)
	}
	return a, nil
}

func newAllocator(dev *cudart.Device, o Options) (*Allocator, error) {
	switch {
	case dev == nil:
		return nil, errNilDevice
	case dev.Runtime().Closed():
		return nil, fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	case o.Reserve < 0:
		return nil, fmt.Errorf("Options.Reserve of %d: must not be negative", o.Reserve)
	case o.LogAbove < 0:
		return nil, fmt.Errorf("Options.LogAbove of %d: must not be negative", o.LogAbove)
	}
	if o.LogAbove == 0 {
		o.LogAbove = DefaultLogAbove
	}
	has, err := dev.Attribute(cudart.AttrManagedMemory)
	if err != nil {
		return nil, err
	}
	if has == 0 {
		return nil, fmt.Errorf("%v has no managed memory (its attribute ManagedMemory is 0): %w", dev, errors.ErrUnsupported)
	}
	concurrent, err := dev.Attribute(cudart.AttrConcurrentManagedAccess)
	if err != nil {
		return nil, err
	}
	a := &Allocator{dev: dev, o: o, concurrent: concurrent != 0, labels: make(map[string]*counts)}
	switch {
	case !a.concurrent && !o.AllowExclusive:
		return nil, fmt.Errorf("%v: %w (set Options.AllowExclusive to use it all the same, with Memory.HostBytes)", dev, ErrNotConcurrent)
	case !a.concurrent && o.Oversubscribe:
		return nil, fmt.Errorf("Options.Oversubscribe: %v: %w", dev, ErrNotConcurrent)
	}
	a.notes = notesOf(dev, a.concurrent, o, os.Getenv(forceVariable))
	a.card = openCard(dev)
	return a, nil
}

// forceVariable is an environment variable of the CUDA driver.
const forceVariable = "CUDA_MANAGED_FORCE_DEVICE_ALLOC"

// notesOf says what is special about this device.
func notesOf(dev *cudart.Device, concurrent bool, o Options, force string) []string {
	var notes []string
	if !concurrent {
		notes = append(notes, fmt.Sprintf("%v: %v", dev, ErrNotConcurrent))
	}
	if force == "" || force == "0" {
		return notes
	}
	note := fmt.Sprintf("%s=%s: the driver places managed memory in device memory when it is made, not where it is touched first; GPUs that cannot access each other's memory fail with cudaErrorInvalidDevice", forceVariable, force)
	if o.Oversubscribe || o.Reserve > 0 {
		note += "; it limits how much more than the card can be used, and memory that is to stay on the host may begin on the card: unset it where Options.Oversubscribe or Options.Reserve matter"
	}
	return append(notes, note)
}

// Device returns the device that the memory is for.
func (a *Allocator) Device() *cudart.Device { return a.dev }

// Concurrent reports whether CPU and GPU may access managed memory at the same time: see
// "Coherence" in the package's documentation.
func (a *Allocator) Concurrent() bool { return a.concurrent }

// Notes returns what is special about managed memory here, in sentences: a device without
// concurrent access, or CUDA_MANAGED_FORCE_DEVICE_ALLOC. nil for nothing.
func (a *Allocator) Notes() []string { return a.notes }

// Alloc allocates n bytes (cudaMallocManaged), and counts them under Options.Label. They
// lie nowhere until they are touched or prefetched. n must be positive.
//
// Errors are [ErrOversubscribed], with the figures, for what the card has no room for;
// [ErrClosed]; and those of CUDA. After an error nothing is allocated, unless the error
// says so.
func (a *Allocator) Alloc(n int) (*Memory, error) { return a.AllocLabel(a.o.Label, n) }

// AllocLabel is Alloc that counts the bytes under a label of their own.
func (a *Allocator) AllocLabel(label string, n int) (*Memory, error) {
	m, err := a.alloc(label, n)
	if err != nil {
		a.mu.Lock()
		a.failed++
		a.mu.Unlock()
		return nil, fmt.Errorf("managed: allocate %d bytes (%q) for %v: %w", n, label, a.dev, err)
	}
	return m, nil
}

func (a *Allocator) alloc(label string, n int) (*Memory, error) {
	if n <= 0 {
		return nil, errSize
	}
	a.mu.Lock()
	closed := a.closed
	a.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	beyond, err := a.card.admit(n, a.o.Reserve, a.o.Oversubscribe)
	if err != nil {
		return nil, err
	}
	p, err := a.dev.MallocManaged(n, cudart.ManagedGlobal)
	if err != nil {
		a.card.release(n)
		return nil, err
	}
	m := &Memory{a: a, p: p, n: n, label: label, onHost: beyond}
	if beyond {
		err = m.keepOnHost()
	}
	if err == nil {
		err = a.opened(m)
	}
	if err != nil {
		if freeing := a.dev.Free(m.ptr()); freeing != nil {
			return nil, errors.Join(err, fmt.Errorf("the %d bytes at %#x stay allocated: %w", n, m.ptr(), freeing))
		}
		a.card.release(n)
		return nil, err
	}
	return m, nil
}

// keepOnHost advises that the memory stays on the host.
func (m *Memory) keepOnHost() error {
	for _, advice := range []Advice{PreferredLocation(Host()), AccessedBy(m.a.dev.Location())} {
		if err := m.a.dev.MemAdvise(m.ptr(), m.n, advice.kind, advice.at); err != nil {
			return err
		}
	}
	return nil
}

// opened counts new memory, and logs it.
func (a *Allocator) opened(m *Memory) error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return ErrClosed
	}
	c := a.own
	if m.label != a.o.Label {
		c = a.labels[m.label]
	}
	if c == nil {
		c = new(counts)
		a.labels[m.label] = c
		if m.label == a.o.Label {
			a.own = c
		}
	}
	m.counts = c
	c.alloc(m.n)
	a.total.alloc(m.n)
	if m.onHost {
		a.onHost += m.n
	}
	a.live.add(m)
	a.order++
	m.used = a.order
	total := a.total
	a.mu.Unlock()
	if a.o.Logger != nil && m.n >= a.o.LogAbove {
		a.o.Logger.LogAttrs(context.Background(), slog.LevelInfo, "managed: allocated", slog.Int("bytes", m.n),
			slog.String("label", m.label), slog.Bool("on_host", m.onHost), slog.Int("allocated", total.Allocated),
			slog.Int("peak", total.Peak), slog.Int("allocs", total.Allocs), slog.Int("device", a.dev.Ordinal()))
	}
	return nil
}

// freed uncounts memory.
func (a *Allocator) freed(m *Memory) {
	a.card.release(m.n)
	a.mu.Lock()
	defer a.mu.Unlock()
	m.counts.free(m.n)
	a.total.free(m.n)
	if m.onHost {
		a.onHost -= m.n
	}
	a.live.remove(m)
}

// Close refuses new allocations from its call on, and destroys the streams of plans. Memory
// that is not closed is an error that wraps [ErrInUse]: close it, and call Close again.
// After an error of CUDA Close may be called again, too. After one that returned nil it
// does nothing.
func (a *Allocator) Close() error {
	if err := a.close(); err != nil {
		return fmt.Errorf("managed: close allocator of %v: %w", a.dev, err)
	}
	return nil
}

func (a *Allocator) close() error {
	a.mu.Lock()
	a.closed = true
	live, bytes := a.total.Allocs-a.total.Frees, a.total.Allocated
	a.mu.Unlock()
	if live > 0 {
		return fmt.Errorf("%d allocations with %d bytes are not closed: %w", live, bytes, ErrInUse)
	}
	if err := a.closeStreams(); err != nil {
		return err
	}
	a.leave.Do(a.card.close)
	return nil
}
