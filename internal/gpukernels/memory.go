package gpukernels

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/pattern"
	"github.com/gopinned/pinned/kernel"
)

// A Content computes the byte at any position.
type Content = pattern.Content

// A Memory has the kernels that fill, check, copy and time memory, loaded on a device. Fill,
// Check, Copy, Chase, Busy and ResetResult queue work on a stream and return: they take as long
// as one call of CUDA. Addresses are of memory that the device can access: device memory, managed
// memory, and mapped host memory. Sizes are bytes; methods do nothing for 0, and return
// [cudart.ErrInvalidValue] for less. Other errors are those of [kernel.Kernel.Launch].
type Memory struct {
	*kernel.Module
	fill, check, copying, chase, busy *kernel.Kernel
	processors                        int // multiprocessors of the device
}

// NewMemory loads the kernels. Close them. The errors are those of [kernel.Load] and [kernel.Module.Kernel].
func NewMemory(ctx context.Context, dev *cudart.Device) (*Memory, error) {
	m := &Memory{}
	module, err := load(ctx, dev, "memory", map[string]**kernel.Kernel{
		"pinned_fill": &m.fill, "pinned_check": &m.check, "pinned_copy": &m.copying, "pinned_chase": &m.chase, "pinned_busy": &m.busy,
	}, func() (err error) {
		m.processors, err = dev.Attribute(cudart.AttrMultiProcessorCount)
		return err
	})
	if err != nil {
		return nil, err
	}
	m.Module = module
	return m, nil
}

// Threads of a block, as in src/memory.cu, and of a multiprocessor.
const (
	blockThreads     = 256
	copyThreads      = 512
	processorThreads = 2048
)

// spread returns the shape for n items, each handled by any thread: no more threads than the
// device runs at once.
func spread(n, block, processors int) kernel.Config {
	return kernel.Threads(min(max(n, 1), max(processors, 1)*processorThreads), block)
}

// checkSize returns an error for a nil Memory and for a negative size.
func (m *Memory) checkSize(what string, p cudart.DevPtr, n int) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: %s: %w", what, errZero)
	case n < 0:
		return fmt.Errorf("kernel: %s: %d bytes at %v: %w", what, n, p, cudart.ErrInvalidValue)
	}
	return nil
}

// Fill writes n bytes of a content, from position at on, to p.
func (m *Memory) Fill(s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) error {
	if err := m.checkSize("fill", p, n); err != nil || n == 0 {
		return err
	}
	return m.fill.Launch(s, spread(n/16, blockThreads, m.processors), kernel.Arg(p), kernel.Arg(n), kernel.Arg(at), kernel.Arg(uint32(c.Kind)), kernel.Arg(c.Seed), kernel.Arg(c.Mask))
}

// Check compares n bytes at p with the bytes of a content from position at on. result is device
// memory of [ResultBytes] bytes, which ResetResult prepares: Check adds to it.
func (m *Memory) Check(s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64, result cudart.DevPtr) error {
	if err := m.checkSize("check", p, n); err != nil || n == 0 {
		return err
	}
	return m.check.Launch(s, spread(n/64, blockThreads, m.processors), kernel.Arg(p), kernel.Arg(n), kernel.Arg(at), kernel.Arg(uint32(c.Kind)), kernel.Arg(c.Seed), kernel.Arg(c.Mask), kernel.Arg(result))
}

// ResultBytes is the size of the result of [Memory.Check].
const ResultBytes = 16

// A Found is the result of a check.
type Found struct {
	Mismatches int // number of bytes that differ
	First      int // offset of the first byte that differs, -1 for none
}

// ResetResult queues that a result has found nothing yet (cudaMemsetAsync).
func (m *Memory) ResetResult(s *cudart.Stream, result cudart.DevPtr) error {
	if s == nil || s.Device() == nil {
		return fmt.Errorf("kernel: reset result: %w", errNilStream)
	}
	if err := s.Memset(result, 0, ResultBytes/2); err != nil {
		return err
	}
	return s.Memset(result+ResultBytes/2, 0xFF, ResultBytes/2)
}

// ReadResult returns a result (cudaMemcpy). The checks must be complete. If ctx ends first, the
// error is ctx's. A nil context is an error.
func (m *Memory) ReadResult(ctx context.Context, result cudart.DevPtr) (Found, error) {
	return m.bounded(ctx, "read result", func() (Found, error) { return m.readResult(result) })
}

func (m *Memory) readResult(result cudart.DevPtr) (Found, error) {
	var words [2]uint64
	if err := m.Device().CopyToHost(unsafe.Pointer(&words), result, ResultBytes); err != nil {
		return Found{}, err
	}
	if words[0] == 0 {
		return Found{First: -1}, nil
	}
	return Found{Mismatches: int(words[0]), First: int(words[1])}, nil
}

// bounded makes calls of CUDA that may not return.
func (m *Memory) bounded(ctx context.Context, what string, call func() (Found, error)) (Found, error) {
	switch {
	case m == nil || m.Module == nil:
		return Found{}, fmt.Errorf("kernel: %s: %w", what, errZero)
	case ctx == nil:
		return Found{}, fmt.Errorf("kernel: %s: %w", what, errNilContext)
	}
	return bounded.Do(ctx, bounded.Call[Found]{Group: groups.Of(m.Device()), Run: call})
}

// Compare is Check with a result of its own, for which it waits. If ctx ends first, the error is
// ctx's and the kernel may still run; the memory of its result, 16 bytes, stays allocated then.
// A nil context is an error.
func (m *Memory) Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) (Found, error) {
	return m.bounded(ctx, "compare", func() (Found, error) { return m.compare(ctx, s, p, n, c, at) })
}

func (m *Memory) compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) (found Found, err error) {
	if s == nil || s.Device() == nil {
		return found, fmt.Errorf("kernel: compare: %w", errNilStream)
	}
	result, err := m.Device().Malloc(ResultBytes)
	if err != nil {
		return found, err
	}
	if ctx.Err() != nil {
		return found, errors.Join(bounded.Ended(ctx), m.Device().Free(result))
	}
	err = m.ResetResult(s, result)
	if err == nil {
		err = m.Check(s, p, n, c, at, result)
	}
	if end := s.Point().Wait(ctx); end != nil {
		return found, errors.Join(err, end) // the kernel may write the result
	}
	if err == nil {
		err = s.Synchronize(ctx) // for an error of the kernel
	}
	if err == nil {
		found, err = m.readResult(result)
	}
	return found, errors.Join(err, m.Device().Free(result))
}

// Copy copies n bytes by loads and stores of the multiprocessors, not by a copy engine. blocks
// is the number of blocks for each multiprocessor; 0 stands for as many as it runs at once.
// The ranges must not overlap. If the addresses differ in their last 4 bits, Copy copies byte by
// byte, which is slow.
func (m *Memory) Copy(s *cudart.Stream, dst, src cudart.DevPtr, n, blocks int) error {
	if err := m.checkSize("copy", dst, n); err != nil || n == 0 {
		return err
	}
	shape := spread(n/16, copyThreads, m.processors)
	if blocks > 0 {
		shape.Grid.X = min(shape.Grid.X, min(blocks, shape.Grid.X)*max(m.processors, 1))
	}
	return m.copying.Launch(s, shape, kernel.Arg(dst), kernel.Arg(src), kernel.Arg(n))
}

// Chase follows a chain of indices with one thread: next = chain[next], steps times from
// start on. chain is an array of uint64. result is device memory of [ResultBytes] bytes for two
// uint64: the last index, and the time of all steps in clock cycles of the multiprocessor. An
// index outside of the array makes the context unusable.
func (m *Memory) Chase(s *cudart.Stream, chain cudart.DevPtr, start, steps int, result cudart.DevPtr) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: chase: %w", errZero)
	case start < 0 || steps < 0:
		return fmt.Errorf("kernel: chase: start %d, %d steps: %w", start, steps, cudart.ErrInvalidValue)
	}
	return m.chase.Launch(s, kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 1}}, kernel.Arg(chain), kernel.Arg(start), kernel.Arg(steps), kernel.Arg(result))
}

// MaxBusy is the longest time of [Memory.Busy].
const MaxBusy = time.Minute

// Busy queues work that runs for d by the device's timer and occupies one multiprocessor. If the
// timer fails, the work ends after 4 clock cycles for each nanosecond of d. The error wraps
// [cudart.ErrInvalidValue] if d is negative or more than [MaxBusy].
func (m *Memory) Busy(s *cudart.Stream, d time.Duration) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: busy: %w", errZero)
	case d < 0 || d > MaxBusy:
		return fmt.Errorf("kernel: busy: %v: from 0 to %v: %w", d, MaxBusy, cudart.ErrInvalidValue)
	}
	const cycles = 4 // a nanosecond: more than any device has
	return m.busy.Launch(s, kernel.Config{Grid: kernel.Dim{X: 1}, Block: kernel.Dim{X: 32}}, kernel.Arg(int(d)), kernel.Arg(cycles*int(d)+1000))
}
