package managed

import (
	"context"
	"fmt"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// A Range is a part of a Memory. Its methods check that its bytes are within the memory.
type Range struct {
	Memory   *Memory
	Off, Len int // bytes
}

// Whole returns the range of all bytes of the memory.
func (m *Memory) Whole() Range { return m.Range(0, m.Len()) }

// Range returns the range of n bytes at offset off. It checks nothing: a method that uses the
// range returns an error if n is not positive, or if the bytes are not all within the memory.
func (m *Memory) Range(off, n int) Range { return Range{Memory: m, Off: off, Len: n} }

// ptr returns the address. check must have returned nil.
func (r Range) ptr() cudart.DevPtr { return r.Memory.ptr() + cudart.DevPtr(r.Off) }

func (r Range) check() error {
	switch {
	case !r.Memory.made():
		return fmt.Errorf("range of %d bytes: the memory is nil or zero", r.Len)
	case r.Off < 0 || r.Len <= 0 || r.Off > r.Memory.n-r.Len:
		return fmt.Errorf("%d bytes at offset %d are not all within it, or none", r.Len, r.Off)
	}
	return nil
}

// noStream reports whether a stream is nil or zero.
func noStream(s *cudart.Stream) bool { return s == nil || s.Device() == nil }

// Prefetch queues the move of the range to a location (cudaMemPrefetchAsync): a device, the
// host, or with CUDA 12.2 and later a NUMA node. CUDA moves the pages that have bytes of the
// range, except those that are there already. Work that is queued on the stream later runs after
// the move. CUDA 11 and 12 may block the call for a part of the move.
//
// Errors are [cudart.ErrClosed]; a range that is empty or not within its memory; a nil stream;
// [ErrNotConcurrent]; [ErrReserve] if memory that stays on the host ([Memory.OnHost]) would
// not leave Options.Reserve of the device memory free; ctx's error and cause if ctx ends first;
// and those of CUDA. If a call of CUDA does not return, it continues after Prefetch, and the
// memory is in use until it returns.
func (r Range) Prefetch(ctx context.Context, s *cudart.Stream, to cudart.Location) error {
	return r.with(ctx, "prefetch", func() error {
		if noStream(s) {
			return errNilStream
		}
		a := r.Memory.a
		if err := a.mayPrefetch(ctx, to, r); err != nil {
			return err
		}
		return a.mem.calls.Inside(ctx, func() error { return s.Prefetch(r.ptr(), r.Len, to) })
	})
}

// mayPrefetch checks a move before it is queued. The ranges may belong to several Allocators; the
// reserve of each counts on its device.
func (a *Allocator) mayPrefetch(ctx context.Context, to cudart.Location, ranges ...Range) error {
	switch {
	case !a.made():
		return errNotMade
	case !a.concurrent:
		return ErrNotConcurrent
	}
	var mem *deviceMemory
	beyond, reserve := 0, 0
	for _, r := range ranges {
		if err := r.check(); err != nil {
			return err
		}
		if of := r.Memory.a; r.Memory.onHost && to == of.dev.Location() {
			mem, beyond, reserve = of.mem, beyond+r.Len, max(reserve, of.o.Reserve)
		}
	}
	if beyond > 0 {
		if err := mem.checkReserve(ctx, beyond, reserve); err != nil {
			return err
		}
	}
	if to.Kind == cudart.LocationDevice {
		ledger.mu.Lock()
		defer ledger.mu.Unlock()
		for _, r := range ranges {
			ledger.uses++
			r.Memory.used = ledger.uses
		}
	}
	return nil
}

// Discard discards the bytes of the range in the order of the stream (cudaMemDiscardBatchAsync, of
// CUDA 13.0 and later): moves do not copy them. Until they are written again, their values are
// undefined. Pages that have other bytes, too, are not discarded. Errors are those of Prefetch
// except ErrReserve, and [errors.ErrUnsupported].
func (r Range) Discard(ctx context.Context, s *cudart.Stream) error {
	return r.with(ctx, "discard", func() error {
		switch {
		case noStream(s):
			return errNilStream
		case !r.Memory.a.concurrent:
			return ErrNotConcurrent
		}
		return r.Memory.a.mem.calls.Inside(ctx, func() error { return discard(s, r) })
	})
}

// discard discards the whole pages of a range. CUDA rounds the ranges of prefetches and advice up
// to pages, and does not document the effect of a discard on the other bytes of a page.
func discard(s *cudart.Stream, r Range) error {
	page := cudart.DevPtr(os.Getpagesize())
	first, end := (r.ptr()+page-1)/page*page, (r.ptr()+cudart.DevPtr(r.Len))/page*page
	if first >= end {
		return nil
	}
	return s.Discard(first, int(end-first))
}

// MappedByHost returns the number of bytes of the range that the CPU has mapped, in whole
// pages (/proc/self/pagemap): pages on the host, or copies on the host of memory that is advised
// [cudart.AdviseReadMostly]. Other pages are on a device, or were never touched. The system reports nothing else
// about the location of pages. The simulated GPU does not unmap pages. Errors are
// [cudart.ErrClosed], and those of the file, which wrap fs.ErrNotExist if it does not exist. MappedByHost
// does not block.
func (r Range) MappedByHost() (int, error) {
	mapped := 0
	err := r.with(context.Background(), "pages mapped by the host", func() (err error) {
		mapped, err = linux.CountPages(os.DirFS("/"), linux.PagesMapped, r.Len, uintptr(r.ptr()))
		return err
	})
	return mapped * os.Getpagesize(), err
}

// with makes a call that uses the range, whose memory is not freed meanwhile: see Memory.with.
func (r Range) with(ctx context.Context, what string, call func() error) error {
	return r.Memory.with(ctx, what, func() error {
		if err := r.check(); err != nil {
			return err
		}
		return call()
	})
}
