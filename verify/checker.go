package verify

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/pattern"
)

// A Checker proves the bytes of a program's own memory: the byte at each position follows from a
// seed, and the GPU writes and compares it, without a copy. [Fill] writes the same bytes to host
// memory. Addresses are of memory that the device can access: device memory, managed memory, and
// mapped host memory. Any goroutine may call its methods; those for one stream one after the other.
type Checker struct {
	memory *gpukernels.Memory
	life   lifetime.Lifetime

	results sync.Map // *cudart.DeviceMemory by *cudart.Stream: of the checks since the stream's last Result
}

var errNoChecker = errors.New("the checker is nil or zero: NewChecker makes checkers")

// NewChecker loads kernels that fill and check memory of a device. Close it. Errors are those of
// [github.com/gopinned/pinned/kernel.Load]; if ctx ends first, the error is ctx's.
func NewChecker(ctx context.Context, dev *cudart.Device) (*Checker, error) {
	m, err := gpukernels.NewMemory(ctx, dev)
	if err != nil {
		return nil, fmt.Errorf("verify: new checker: %w", err)
	}
	return &Checker{memory: m}, nil
}

func seeded(seed uint64) pattern.Content { return pattern.Content{Seed: seed} }

// Fill writes the bytes of the positions from at on to host memory. It does not block.
func Fill(b []byte, seed uint64, at int) { seeded(seed).Fill(b, uint64(at)) }

// Fill queues a kernel that writes the bytes of n positions from at on to p. The error wraps
// [cudart.ErrInvalidValue] if n or at is negative or their sum is above [math.MaxInt], [cudart.ErrClosed], or is that of the launch.
func (c *Checker) Fill(s *cudart.Stream, p cudart.DevPtr, n int, seed uint64, at int) error {
	return c.queue("fill", s, p, n, at, func() error { return c.memory.Fill(s, p, n, seeded(seed), uint64(at)) })
}

// Check queues a comparison of n bytes at p with those of the positions from at on. [Checker.Result]
// returns what it finds. The first Check for a stream since its last Result allocates 16 bytes of
// device memory (cudaMalloc). Errors are those of [Checker.Fill], and [cudart.ErrMemoryAllocation].
func (c *Checker) Check(s *cudart.Stream, p cudart.DevPtr, n int, seed uint64, at int) error {
	return c.queue("check", s, p, n, at, func() error {
		result, err := c.resultOf(s)
		if err != nil {
			return err
		}
		return c.memory.Check(s, p, n, seeded(seed), uint64(at), result.Ptr())
	})
}

func (c *Checker) queue(what string, s *cudart.Stream, p cudart.DevPtr, n, at int, call func() error) error {
	var err error
	switch {
	case c == nil || c.memory == nil:
		err = errNoChecker
	case s == nil || s.Device() == nil:
		err = errors.New("the stream is nil or zero")
	case n < 0 || at < 0 || at > math.MaxInt-n:
		err = cudart.ErrInvalidValue
	case !c.life.Begin():
		err = cudart.ErrClosed
	default:
		defer c.life.End()
		err = call()
	}
	if err != nil {
		return fmt.Errorf("verify: %s %d bytes at %v from position %d: %w", what, n, p, at, err)
	}
	return nil
}

func (c *Checker) resultOf(s *cudart.Stream) (*cudart.DeviceMemory, error) {
	if m, ok := c.results.Load(s); ok {
		return m.(*cudart.DeviceMemory), nil
	}
	m, err := c.memory.Device().Alloc(gpukernels.ResultBytes)
	if err != nil {
		return nil, err
	}
	if err := c.memory.ResetResult(s, m.Ptr()); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	c.results.Store(s, m) // no other call is for this stream
	return m, nil
}

// Result waits for the comparisons that were queued on the stream since its last Result. It returns the
// number of bytes that differ, and the least offset of one from the address of its Check, or -1 if
// none differ. Errors are ctx's, if ctx ends first, [cudart.ErrClosed], and those of CUDA; after one, Result may be
// called again.
func (c *Checker) Result(ctx context.Context, s *cudart.Stream) (bad, first int, err error) {
	switch bad, first = 0, -1; {
	case c == nil || c.memory == nil:
		err = errNoChecker
	case !c.life.Begin():
		err = cudart.ErrClosed
	default:
		defer c.life.End()
		bad, first, err = c.result(ctx, s)
	}
	if err != nil {
		return 0, -1, fmt.Errorf("verify: result of checks: %w", err)
	}
	return bad, first, nil
}

func (c *Checker) result(ctx context.Context, s *cudart.Stream) (bad, first int, err error) {
	kept, ok := c.results.Load(s)
	if !ok {
		return 0, -1, nil
	}
	m := kept.(*cudart.DeviceMemory)
	if err := s.Synchronize(ctx); err != nil {
		return 0, -1, err
	}
	found, err := c.memory.ReadResult(ctx, m.Ptr())
	if err == nil {
		err = c.memory.ResetResult(s, m.Ptr())
	}
	return found.Mismatches, found.First, err
}

// Close waits for the kernels that were queued, unloads them, and frees the results. After an
// error it may be called again; once it has returned nil it does nothing.
func (c *Checker) Close() error { return c.CloseContext(context.Background()) }

// CloseContext is [Checker.Close] that returns ctx's error if ctx ends first.
func (c *Checker) CloseContext(ctx context.Context) error {
	if c == nil || c.memory == nil {
		return fmt.Errorf("verify: close the checker: %w", errNoChecker)
	}
	if ctx == nil {
		return errors.New("verify: close the checker: the context is nil")
	}
	err := c.life.Close(ctx, func(ctx context.Context) error {
		if err := c.memory.CloseContext(ctx); err != nil {
			return err
		}
		var errs []error
		c.results.Range(func(s, m any) bool {
			err := m.(*cudart.DeviceMemory).Close()
			if err == nil {
				c.results.Delete(s)
			}
			errs = append(errs, err)
			return true
		})
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("verify: close the checker: %w", err)
	}
	return nil
}
