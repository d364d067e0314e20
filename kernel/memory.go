package kernel

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

//go:embed src/memory.ptx
var memoryPTX []byte

// Memory is the kernels that fill, check, copy and time memory, loaded on a device. All
// methods but Compare queue work on a stream and return. Addresses are of memory that the
// device can access: device memory, managed memory, and host memory that is mapped. Sizes are
// bytes; methods do nothing for 0, and return [cudart.ErrInvalidValue] for less. Other errors
// are those of [Kernel.Launch].
type Memory struct {
	*Module
	fill, check, copying, chase, busy *Kernel
	processors                        int
	inside                            bounded.Group // calls of Compare
}

// NewMemory loads the kernels. Close them. The errors are those of [Load].
func NewMemory(dev *cudart.Device) (*Memory, error) {
	module, err := Load(dev, memoryPTX)
	if err != nil {
		return nil, err
	}
	m := &Memory{Module: module}
	for name, k := range map[string]**Kernel{
		"pinned_fill": &m.fill, "pinned_check": &m.check, "pinned_copy": &m.copying, "pinned_chase": &m.chase, "pinned_busy": &m.busy,
	} {
		if err == nil {
			*k, err = m.Kernel(name)
		}
	}
	if err == nil {
		m.processors, err = dev.Attribute(cudart.AttrMultiProcessorCount)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Threads of a block, as in src/memory.cu, and what a multiprocessor holds.
const (
	blockThreads     = 256
	copyThreads      = 512
	processorThreads = 2048
)

// spread returns the shape for n items, each handled by any thread: no more threads than the
// device runs at once.
func spread(n, block, processors int) Config {
	most := max(processors, 1) * processorThreads
	return Threads(min(max(n, 1), most), block)
}

func (m *Memory) sized(what string, p cudart.DevPtr, n int) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: %s: %w", what, errNotMade)
	case n < 0:
		return fmt.Errorf("kernel: %s: %d bytes at %#x: %w", what, n, uintptr(p), cudart.ErrInvalidValue)
	}
	return nil
}

// Fill writes n bytes of a content, from position at on, to p.
func (m *Memory) Fill(s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) error {
	if err := m.sized("fill", p, n); err != nil || n == 0 {
		return err
	}
	return m.fill.Launch(s, spread(n/16, blockThreads, m.processors), Ptr(p), Int(n), Uint64(at), Uint32(uint32(c.Kind)), Uint64(c.Seed), Uint64(c.Mask))
}

// Check compares n bytes at p with those of a content from position at on. result is device
// memory of [ResultBytes] bytes, to be set by ResetResult before: Check adds to what is there.
func (m *Memory) Check(s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64, result cudart.DevPtr) error {
	if err := m.sized("check", p, n); err != nil || n == 0 {
		return err
	}
	return m.check.Launch(s, spread(n/64, blockThreads, m.processors), Ptr(p), Int(n), Uint64(at), Uint32(uint32(c.Kind)), Uint64(c.Seed), Uint64(c.Mask), Ptr(result))
}

// ResultBytes is the size of the result of [Memory.Check].
const ResultBytes = 16

// A Found is the result of a check.
type Found struct {
	Wrong int // bytes that differ
	First int // offset of the first of them, -1 for none
}

// ResetResult makes a result that found nothing yet (cudaMemsetAsync).
func (m *Memory) ResetResult(s *cudart.Stream, result cudart.DevPtr) error {
	if noStream(s) {
		return fmt.Errorf("kernel: reset result: %w", errNilStream)
	}
	if err := s.Memset(result, 0, ResultBytes/2); err != nil {
		return err
	}
	return s.Memset(result+ResultBytes/2, 0xFF, ResultBytes/2)
}

// ReadResult returns a result (cudaMemcpy). The checks must be done.
func (m *Memory) ReadResult(result cudart.DevPtr) (Found, error) {
	if m == nil || !m.made() {
		return Found{}, fmt.Errorf("kernel: read result: %w", errNotMade)
	}
	var words [2]uint64
	if err := m.dev.CopyToHost(unsafe.Pointer(&words), result, ResultBytes); err != nil {
		return Found{}, err
	}
	if words[0] == 0 {
		return Found{First: -1}, nil
	}
	return Found{Wrong: int(words[0]), First: int(words[1])}, nil
}

// Compare is Check with a result of its own, for which it waits. If ctx ends first, the kernel
// may be running on; the memory of its result, 16 bytes, stays allocated then.
func (m *Memory) Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) (Found, error) {
	switch {
	case m == nil || !m.made():
		return Found{}, fmt.Errorf("kernel: compare: %w", errNotMade)
	case ctx == nil:
		return Found{}, fmt.Errorf("kernel: compare: %w", errNilContext)
	case noStream(s):
		return Found{}, fmt.Errorf("kernel: compare: %w", errNilStream)
	}
	if err := m.inside.Begin(ctx); err != nil {
		return Found{}, fmt.Errorf("kernel: compare: %w", err)
	}
	return bounded.Do(ctx, bounded.Call[Found]{Run: func() (Found, error) {
		defer m.inside.End()
		return m.compare(ctx, s, p, n, c, at)
	}})
}

func (m *Memory) compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c Content, at uint64) (found Found, err error) {
	result, err := m.dev.Malloc(ResultBytes)
	if err != nil {
		return found, err
	}
	if ctx.Err() != nil { // meanwhile
		return found, errors.Join(bounded.Ended(ctx), m.dev.Free(result))
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
		found, err = m.ReadResult(result)
	}
	return found, errors.Join(err, m.dev.Free(result))
}

// Copy copies n bytes by loads and stores of the multiprocessors, not by a copy engine, with
// so many blocks a multiprocessor; 0 is as many as it runs at once. The ranges must not
// overlap. Where the addresses differ in their last 4 bits it copies byte by byte, slowly.
func (m *Memory) Copy(s *cudart.Stream, dst, src cudart.DevPtr, n, blocks int) error {
	if err := m.sized("copy", dst, n); err != nil || n == 0 {
		return err
	}
	shape := spread(n/16, copyThreads, m.processors)
	if blocks > 0 {
		shape.Grid.X = min(shape.Grid.X, min(blocks, shape.Grid.X)*max(m.processors, 1))
	}
	return m.copying.Launch(s, shape, Ptr(dst), Ptr(src), Int(n))
}

// Chase follows a chain of indices with one thread: next = chain[next], steps times from
// start on, where chain is an array of uint64. result is device memory of [ResultBytes]
// bytes: the index at the end, and the clock cycles of the multiprocessor that it took. An index
// outside of the array makes the context unusable.
func (m *Memory) Chase(s *cudart.Stream, chain cudart.DevPtr, start, steps int, result cudart.DevPtr) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: chase: %w", errNotMade)
	case start < 0 || steps < 0:
		return fmt.Errorf("kernel: chase: start %d, %d steps: %w", start, steps, cudart.ErrInvalidValue)
	}
	return m.chase.Launch(s, Config{Grid: Dim{X: 1}, Block: Dim{X: 1}}, Ptr(chain), Int(start), Int(steps), Ptr(result))
}

// MaxBusy is the longest time of [Memory.Busy].
const MaxBusy = time.Minute

// Busy queues work that runs for d by the device's timer and occupies one multiprocessor. It
// also ends after 4 clock cycles for each nanosecond of d, should the timer fail. The error wraps
// [cudart.ErrInvalidValue] if d is negative or more than [MaxBusy].
func (m *Memory) Busy(s *cudart.Stream, d time.Duration) error {
	switch {
	case m == nil:
		return fmt.Errorf("kernel: busy: %w", errNotMade)
	case d < 0 || d > MaxBusy:
		return fmt.Errorf("kernel: busy: %v: from 0 to %v: %w", d, MaxBusy, cudart.ErrInvalidValue)
	}
	const cycles = 4 // a nanosecond: more than any device has
	return m.busy.Launch(s, Config{Grid: Dim{X: 1}, Block: Dim{X: 32}}, Int(int(d)), Int(cycles*int(d)+1000))
}
