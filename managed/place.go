package managed

import (
	"context"
	"fmt"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Host returns the host's memory as a location. That of a device is
// [cudart.Device.Location].
func Host() cudart.Location { return cudart.Location{Kind: cudart.LocationHost} }

// A Range is a part of memory.
type Range struct {
	Memory   *Memory
	Off, Len int // bytes
}

// All returns the range that is all of the memory.
func (m *Memory) All() Range { return m.Range(0, m.Len()) }

// Range returns n bytes at offset off as a range. It checks nothing: a method that uses the
// range returns an error if n is not positive, or if the bytes are not all within the memory.
func (m *Memory) Range(off, n int) Range { return Range{Memory: m, Off: off, Len: n} }

// ptr returns the address. The range has to be checked before.
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

// Prefetch queues the move of all bytes to a location (cudaMemPrefetchAsync): a device, the
// host, or with CUDA 12.2 and later a NUMA node. What is there already is not moved. Work
// that is queued on the stream later finds the bytes there. CUDA 11 and 12 may block the
// caller for a part of the move.
//
// Errors are [ErrClosed], a nil stream, [ErrNotConcurrent], [ErrReserve] if memory that
// stays on the host ([Memory.OnHost]) would not leave Options.Reserve free on the card,
// and those of CUDA.
func (m *Memory) Prefetch(s *cudart.Stream, to cudart.Location) error {
	return m.PrefetchRange(s, 0, m.Len(), to)
}

// PrefetchRange is Prefetch of n bytes at offset off. CUDA moves the pages that have them.
// A range that is empty or not within the memory is an error as well.
func (m *Memory) PrefetchRange(s *cudart.Stream, off, n int, to cudart.Location) error {
	return m.withRange("prefetch", off, n, func(r Range) error {
		if noStream(s) {
			return errNilStream
		}
		if err := m.a.mayPrefetch(context.Background(), to, r); err != nil {
			return err
		}
		return s.Prefetch(r.ptr(), n, to)
	})
}

// mayPrefetch checks a move before it is queued. The ranges may be of memory of several
// Allocators, on the location of each of which its own reserve counts.
func (a *Allocator) mayPrefetch(ctx context.Context, to cudart.Location, ranges ...Range) error {
	switch {
	case !a.made():
		return errNotMade
	case !a.concurrent:
		return ErrNotConcurrent
	}
	var card *card
	beyond, reserve := 0, 0
	for _, r := range ranges {
		if err := r.check(); err != nil {
			return err
		}
		if of := r.Memory.a; r.Memory.onHost && to == of.dev.Location() {
			card, beyond, reserve = of.card, beyond+r.Len, max(reserve, of.o.Reserve)
		}
	}
	if beyond > 0 {
		if err := card.checkReserve(ctx, beyond, reserve); err != nil {
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

// PrefetchBatch queues the moves of several ranges to a location: with one call of CUDA 13.0
// and later (cudaMemPrefetchBatchAsync), else one by one. The ranges may move in any order,
// and may be of memory of any allocator. Without ranges it does nothing. Errors are those
// of [Memory.Prefetch]; after an error of CUDA some may have been queued.
func (a *Allocator) PrefetchBatch(s *cudart.Stream, to cudart.Location, ranges ...Range) error {
	if err := a.prefetchBatch(s, to, ranges); err != nil {
		return fmt.Errorf("managed: prefetch %d ranges to %v: %w", len(ranges), to, err)
	}
	return nil
}

func (a *Allocator) prefetchBatch(s *cudart.Stream, to cudart.Location, ranges []Range) error {
	if noStream(s) {
		return errNilStream
	}
	if err := a.mayPrefetch(context.Background(), to, ranges...); err != nil {
		return err
	}
	var batch cudart.PrefetchBatch
	for _, r := range ranges {
		if !r.Memory.life.Begin() {
			return fmt.Errorf("%v: %w", r.Memory, ErrClosed)
		}
		defer r.Memory.life.End()
		batch.Add(r.ptr(), r.Len, to)
	}
	return s.PrefetchBatch(&batch)
}

// Discard declares that the contents of n bytes at offset off do not matter any more, once
// the stream gets there (cudaMemDiscardBatchAsync, of CUDA 13.0 and later): moves do not
// copy them. Until they are written again, reads return anything. Pages that have other
// bytes too are not discarded. Errors are those of [Memory.Prefetch], and
// [cudart.ErrUnsupported].
func (m *Memory) Discard(s *cudart.Stream, off, n int) error {
	return m.withRange("discard", off, n, func(r Range) error {
		switch {
		case noStream(s):
			return errNilStream
		case !m.a.concurrent:
			return ErrNotConcurrent
		}
		return discard(s, r)
	})
}

// discard discards the whole pages of a range. CUDA does not document what becomes of the
// other bytes of a page, and rounds what it prefetches and advises up to pages.
func discard(s *cudart.Stream, r Range) error {
	page := cudart.DevPtr(os.Getpagesize())
	first, end := (r.ptr()+page-1)/page*page, (r.ptr()+cudart.DevPtr(r.Len))/page*page
	if first >= end {
		return nil
	}
	return s.Discard(first, int(end-first))
}

// Advice is a hint to the driver about how memory will be used. It changes speed, never
// results.
type Advice struct {
	kind cudart.Advice
	at   cudart.Location
}

// ReadMostly advises that the memory is mostly read: each location that reads it gets a
// copy, and a write drops the others' copies (cudaMemAdviseSetReadMostly).
func ReadMostly() Advice { return Advice{cudart.AdviseReadMostly, Host()} }

// PreferredLocation advises that the memory stays at a location: accesses from elsewhere go
// over the link rather than move it, where that is possible
// (cudaMemAdviseSetPreferredLocation).
func PreferredLocation(at cudart.Location) Advice {
	return Advice{cudart.AdvisePreferredLocation, at}
}

// AccessedBy advises that a location accesses the memory: it maps the memory wherever the
// pages are, and causes no page faults (cudaMemAdviseSetAccessedBy).
func AccessedBy(at cudart.Location) Advice { return Advice{cudart.AdviseAccessedBy, at} }

// unset returns the advice that undoes it: cudaMemoryAdvise numbers each after its own.
func (a Advice) unset() Advice {
	if a.kind == 0 {
		return a
	}
	return Advice{a.kind + 1, a.at}
}

// String names the advice in messages: "preferred location: the host".
func (a Advice) String() string {
	switch a.kind {
	case cudart.AdviseReadMostly:
		return "read mostly"
	case cudart.AdvisePreferredLocation:
		return "preferred location: " + a.at.String()
	case cudart.AdviseAccessedBy:
		return "accessed by: " + a.at.String()
	case cudart.AdviseUnsetReadMostly, cudart.AdviseUnsetPreferredLocation, cudart.AdviseUnsetAccessedBy:
		return "not any more " + Advice{a.kind - 1, a.at}.String()
	}
	return "no advice"
}

// Advise advises the driver about all bytes (cudaMemAdvise). The zero Advice is an error;
// others are [ErrClosed], [ErrNotConcurrent], and those of CUDA.
func (m *Memory) Advise(a Advice) error { return m.AdviseRange(0, m.Len(), a) }

// AdviseRange is Advise for n bytes at offset off, and the pages that have them. A range that
// is empty or not within the memory is an error as well.
func (m *Memory) AdviseRange(off, n int, a Advice) error { return m.advise("advise", off, n, a) }

// Unadvise undoes Advise.
func (m *Memory) Unadvise(a Advice) error { return m.UnadviseRange(0, m.Len(), a) }

// UnadviseRange undoes AdviseRange. Of memory that is not read mostly any more one copy
// stays: that at its preferred location, else that on the host.
func (m *Memory) UnadviseRange(off, n int, a Advice) error {
	return m.advise("unadvise", off, n, a.unset())
}

func (m *Memory) advise(what string, off, n int, a Advice) error {
	return m.withRange(what, off, n, func(r Range) error {
		switch {
		case a.kind == 0:
			return fmt.Errorf("%v", a)
		case !m.a.concurrent:
			return ErrNotConcurrent
		}
		if err := m.a.dev.MemAdvise(r.ptr(), n, a.kind, a.at); err != nil {
			return fmt.Errorf("%v: %w", a, err)
		}
		return nil
	})
}

// MappedByHost returns the number of the n bytes at offset off that the CPU has mapped, in
// whole pages (/proc/self/pagemap): pages on the host, or copies there of memory that is
// read mostly. Other pages are on a device, or were never touched. The system reports
// nothing else about the location of pages; the simulated GPU does not move pages so. Errors
// are [ErrClosed], and those of the file, which wrap fs.ErrNotExist where there is none.
func (m *Memory) MappedByHost(off, n int) (mapped int, err error) {
	err = m.withRange("pages mapped by the host", off, n, func(r Range) (err error) {
		mapped, err = linux.CountPages(os.DirFS("/"), linux.PagesMapped, n, uintptr(r.ptr()))
		return err
	})
	return mapped * os.Getpagesize(), err
}
