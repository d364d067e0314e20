package managed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrOversubscribed is returned for memory that exceeds the capacity of the device memory.
	ErrOversubscribed = errors.New("more managed memory than the device memory has capacity for")

	// ErrReserve is returned if managed memory would take Options.Reserve, or cannot free it.
	ErrReserve = errors.New("the reserve of device memory is not free")

	// ErrNotConcurrent is returned where the device cannot access managed memory while
	// the CPU does. errors.Is reports that it is [errors.ErrUnsupported].
	ErrNotConcurrent = sentinel.New("the device cannot access managed memory while the CPU does (its attribute ConcurrentManagedAccess is 0, as on Windows and in WSL, vGPU and gVisor): the process crashes if the CPU touches managed memory while work is pending, and there is no prefetch, no advice, and no more memory than the device memory holds", errors.ErrUnsupported)

	errNilDevice  = errors.New("the device is nil or zero")
	errNilStream  = errors.New("the stream is nil or zero")
	errNilContext = errors.New("the context is nil")
	errNilQueue   = errors.New("the function is nil")
	errSize       = errors.New("the size must be positive")
	errNotMade    = errors.New("the Allocator, Memory or Plan is nil or zero: New, Alloc and NewPlan make them")
)

const defaultLogAbove = 100_000_000 // bytes

// Options configure an Allocator. The zero value suits most programs.
type Options struct {
	// Reserve is the device memory that managed memory must not take, in bytes.
	Reserve int
	// Oversubscribe allows more memory than the capacity of the device memory. Memory beyond
	// the capacity stays on the host, advised to stay there and to be mapped for the device
	// ([cudart.AdvisePreferredLocation], [cudart.AdviseAccessedBy]).
	Oversubscribe bool
	// AllowExclusive allows a device that cannot access managed memory while the CPU
	// does: see "Coherence" in the package's documentation.
	AllowExclusive bool
	// Logger gets a record of each allocation of LogAbove bytes and more, at level Info.
	// Nil logs nothing. A LogAbove of 0 means 100 MB.
	Logger   *slog.Logger
	LogAbove int
}

// AllocOptions shape an allocation.
type AllocOptions struct {
	Label string // under which Stats counts the memory, too
}

// An Allocator allocates managed memory for one device, and counts it.
//
//	state     entered by                  | Alloc, Move, Plan.Run       | Close
//	open      New                         | counted: each call, and     | seals it
//	          |                           | Memory until it is freed    |
//	sealed    Close                       | ErrClosed                   | ErrInUse while any is counted,
//	          |                           |                             | else destroys the streams
//	released  a Close that has worked     | ErrClosed                   | nil
type Allocator struct {
	dev        *cudart.Device
	o          Options
	concurrent bool
	mem        *deviceMemory
	life       lifetime.Lifetime

	// Guarded by ledger.mu.
	streams []*cudart.Stream // idle streams for moves
	live    map[*Memory]bool // not closed
	total   Counts
	labels  map[string]*Counts
	onHost  int // bytes of memory beyond the capacity
	failed  int // number of failed allocations
}

// New makes an allocator, which must be closed. It queries the device's attributes
// (cudaDeviceGetAttribute) and allocates no memory of CUDA. Errors are a nil device, a closed
// Runtime ([cudart.ErrClosed]), invalid options, [ErrNotConcurrent], ctx's error and cause if ctx
// ends first, and for a device without managed memory an error that wraps
// [errors.ErrUnsupported].
func New(ctx context.Context, dev *cudart.Device, o Options) (*Allocator, error) {
	a, err := newAllocator(ctx, dev, o)
	if err != nil {
		return nil, fmt.Errorf("managed: new allocator: %w", err)
	}
	return a, nil
}

func newAllocator(ctx context.Context, dev *cudart.Device, o Options) (*Allocator, error) {
	switch {
	case dev == nil || dev.Runtime() == nil:
		return nil, errNilDevice
	case raw.Closed(dev.Runtime()):
		return nil, fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	case o.Reserve < 0:
		return nil, fmt.Errorf("Options.Reserve of %d: must not be negative", o.Reserve)
	case o.LogAbove < 0:
		return nil, fmt.Errorf("Options.LogAbove of %d: must not be negative", o.LogAbove)
	}
	o.LogAbove = cmp.Or(o.LogAbove, defaultLogAbove)
	var has, concurrent int
	err := runBounded(ctx, func() (err error) {
		if has, err = dev.Attribute(cudart.AttrManagedMemory); err == nil {
			concurrent, err = dev.Attribute(cudart.AttrConcurrentManagedAccess)
		}
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case has == 0:
		return nil, fmt.Errorf("%v has no managed memory (its attribute ManagedMemory is 0): %w", dev, errors.ErrUnsupported)
	case concurrent == 0 && !o.AllowExclusive:
		return nil, fmt.Errorf("%v: %w (set Options.AllowExclusive to use it all the same, with Memory.HostBytes)", dev, ErrNotConcurrent)
	case concurrent == 0 && o.Oversubscribe:
		return nil, fmt.Errorf("Options.Oversubscribe: %v: %w", dev, ErrNotConcurrent)
	}
	return &Allocator{
		dev: dev, o: o, concurrent: concurrent != 0, mem: openDeviceMemory(dev),
		live: make(map[*Memory]bool), labels: make(map[string]*Counts),
	}, nil
}

// forceVariable is an environment variable of the CUDA driver.
const forceVariable = "CUDA_MANAGED_FORCE_DEVICE_ALLOC"

// notesOf returns the notes for a device and the value of forceVariable.
func notesOf(dev *cudart.Device, concurrent bool, o Options, force string) []string {
	var notes []string
	if !concurrent {
		notes = append(notes, fmt.Sprintf("%v: %v", dev, ErrNotConcurrent))
	}
	if force == "" || force == "0" {
		return notes
	}
	note := fmt.Sprintf("%s=%s: the driver allocates pages of managed memory on the device, and not where they are touched first; GPUs that cannot access each other's memory fail with cudaErrorInvalidDevice", forceVariable, force)
	if o.Oversubscribe || o.Reserve > 0 {
		note += "; it limits the memory beyond the device memory, and memory that should stay on the host may begin on the device: unset it where Options.Oversubscribe or Options.Reserve matter"
	}
	return append(notes, note)
}

// made reports whether New has made the Allocator.
func (a *Allocator) made() bool { return a != nil && a.dev != nil }

// Notes returns sentences about a device without concurrent access, and about the environment
// variable CUDA_MANAGED_FORCE_DEVICE_ALLOC, or nil. It does not block.
func (a *Allocator) Notes() []string {
	if !a.made() {
		return nil
	}
	return notesOf(a.dev, a.concurrent, a.o, os.Getenv(forceVariable))
}

// Alloc allocates n bytes (cudaMallocManaged). No page is allocated until it is first touched
// or prefetched. n must be positive.
//
// Errors are [ErrOversubscribed], with the figures, if the device has no capacity for the
// memory; [cudart.ErrClosed]; ctx's error and cause if ctx ends first; and those of CUDA. After an error
// no memory is allocated, unless the error contains its address. If a call of CUDA does not return,
// the memory is freed when it returns.
func (a *Allocator) Alloc(ctx context.Context, n int, o AllocOptions) (*Memory, error) {
	if !a.made() {
		return nil, fmt.Errorf("managed: allocate %d bytes (%q): %w", n, o.Label, errNotMade)
	}
	var m *Memory
	err := checkContext(ctx)
	if err == nil {
		m, err = bounded.Do(ctx, bounded.Call[*Memory]{
			Run: func() (*Memory, error) { return a.alloc(ctx, n, o) },
			Late: func(m *Memory, err error) {
				if err == nil {
					_ = lifetime.Undo(ctx, m.CloseContext) // or it stays counted
				}
			},
		})
	}
	if err != nil {
		ledger.mu.Lock()
		a.failed++
		ledger.mu.Unlock()
		return nil, fmt.Errorf("managed: allocate %d bytes (%q) for %v: %w", n, o.Label, a.dev, err)
	}
	return m, nil
}

func (a *Allocator) alloc(ctx context.Context, n int, o AllocOptions) (m *Memory, err error) {
	switch {
	case n <= 0:
		return nil, errSize
	case !a.life.Begin(): // until the memory is freed
		return nil, cudart.ErrClosed
	}
	defer func() {
		if err != nil {
			a.life.End()
		}
	}()
	beyond, err := a.mem.admit(ctx, n, a.o.Reserve, a.o.Oversubscribe)
	if err != nil {
		return nil, err
	}
	m = &Memory{a: a, n: n, label: o.Label, onHost: beyond}
	err = a.mem.calls.Inside(ctx, func() (err error) {
		m.p, err = a.dev.MallocManaged(n)
		return err
	})
	if err == nil && beyond {
		if err = a.mem.stayOnHost(ctx, m.Whole()); err != nil {
			if freeing := lifetime.Undo(ctx, m.free); freeing != nil {
				return nil, errors.Join(err, fmt.Errorf("the %d bytes at %#x stay allocated: %w", n, m.ptr(), freeing))
			}
		}
	}
	if err != nil {
		a.mem.release(n)
		return nil, err
	}
	a.add(m)
	return m, nil
}

// add counts new memory, and logs it.
func (a *Allocator) add(m *Memory) {
	ledger.mu.Lock()
	if m.counts = a.labels[m.label]; m.counts == nil {
		m.counts = new(Counts)
		a.labels[m.label] = m.counts
	}
	m.counts.alloc(m.n)
	a.total.alloc(m.n)
	if m.onHost {
		a.onHost += m.n
	}
	a.live[m] = true
	ledger.uses++
	m.used = ledger.uses
	total := a.total
	ledger.mu.Unlock()
	if a.o.Logger != nil && m.n >= a.o.LogAbove {
		a.o.Logger.LogAttrs(context.Background(), slog.LevelInfo, "managed: allocated", slog.Int("bytes", m.n),
			slog.String("label", m.label), slog.Bool("on_host", m.onHost), slog.Int("allocated", total.Allocated),
			slog.Int("peak", total.Peak), slog.Int("allocs", total.Allocs), slog.Int("device", a.dev.Ordinal()))
	}
}

// remove uncounts memory that was freed.
func (a *Allocator) remove(m *Memory) {
	ledger.mu.Lock()
	a.mem.allocated.used -= m.n
	m.counts.free(m.n)
	a.total.free(m.n)
	if m.onHost {
		a.onHost -= m.n
	}
	delete(a.live, m)
	ledger.mu.Unlock()
	a.life.End()
}

// Close is [Allocator.CloseContext] without an end.
func (a *Allocator) Close() error { return a.CloseContext(context.Background()) }

// CloseContext refuses new allocations, moves and runs of plans from its call on, and destroys
// the streams of moves (cudaStreamDestroy). Memory that is not closed, and a call in progress,
// are an error that wraps [cudart.ErrInUse]: close it, and call Close again. After an error of CUDA,
// or ctx's if that ends first, Close may be called again, too. After one that returned nil it
// does nothing.
func (a *Allocator) CloseContext(ctx context.Context) error {
	switch {
	case !a.made():
		return fmt.Errorf("managed: close: %w", errNotMade)
	case ctx == nil:
		return fmt.Errorf("managed: close: %w", errNilContext)
	}
	if calls := a.life.Seal(); calls > 0 {
		s := a.Stats()
		return fmt.Errorf("managed: close allocator of %v: %d allocations with %d bytes are not closed, and %d calls are in progress: %w",
			a.dev, s.Allocs-s.Frees, s.Allocated, max(calls-(s.Allocs-s.Frees), 0), cudart.ErrInUse)
	}
	err := a.life.Close(ctx, func(context.Context) error {
		if err := a.closeStreams(); err != nil {
			return err
		}
		a.mem.close()
		return nil
	})
	if err != nil {
		return fmt.Errorf("managed: close allocator of %v: %w", a.dev, err)
	}
	return nil
}
