package managed

import (
	"fmt"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Host returns the host's memory as a place. That of a device is
// [cudart.Device.Location].
func Host() cudart.Location { return cudart.Location{Kind: cudart.LocationHost} }

// A Range is a part of memory.
type Range struct {
	Memory   *Memory
	Off, Len int // bytes
}

// All returns the range that is all of the memory.
func (m *Memory) All() Range { return Range{Memory: m, Len: m.n} }

// Range returns n bytes at offset off as a range. It checks nothing: what uses the range
// returns an error if n is not positive, or if the bytes are not all within the memory.
func (m *Memory) Range(off, n int) Range { return Range{Memory: m, Off: off, Len: n} }

func (r Range) ptr() cudart.DevPtr { return r.Memory.ptr() + cudart.DevPtr(r.Off) }

func (r Range) check() error {
	switch {
	case r.Memory == nil:
		return fmt.Errorf("range of %d bytes: the memory is nil", r.Len)
	case r.Off < 0 || r.Len <= 0 || r.Off > r.Memory.n-r.Len:
		return fmt.Errorf("%d bytes at offset %d are not all within it, or none", r.Len, r.Off)
	}
	return nil
}

// Prefetch queues the move of all bytes to a place (cudaMemPrefetchAsync): a device, the
// host, or with CUDA 12.2 and later a NUMA node. What is there already is not moved. Work
// that is queued on the stream later finds the bytes there. CUDA 11 and 12 may block the
// caller for a part of the move.
//
// Errors are [ErrClosed], a nil stream, [ErrNotConcurrent], [ErrReserve] if memory that
// stays on the host ([Memory.OnHost]) would not leave Options.Reserve free on the card,
// and those of CUDA.
func (m *Memory) Prefetch(s *cudart.Stream, to cudart.Location) error {
	return m.PrefetchRange(s, 0, m.n, to)
}

// PrefetchRange is Prefetch of n bytes at offset off. CUDA moves the pages that have them.
// A range that is empty or not within the memory is an error as well.
func (m *Memory) PrefetchRange(s *cudart.Stream, off, n int, to cudart.Location) error {
	return m.with("prefetch", func() error {
		if s == nil {
			return errNilStream
		}
		r := m.Range(off, n)
		if err := m.a.mayPrefetch(to, r); err != nil {
			return err
		}
		return s.Prefetch(r.ptr(), n, to)
	})
}

// mayPrefetch checks a move before it is queued.
func (a *Allocator) mayPrefetch(to cudart.Location, ranges ...Range) error {
	if !a.concurrent {
		return ErrNotConcurrent
	}
	beyond := 0
	for _, r := range ranges {
		if err := r.check(); err != nil {
			return err
		}
		if r.Memory.onHost {
			beyond += r.Len
		}
	}
	if to.Kind != cudart.LocationDevice {
		return nil
	}
	if to == a.dev.Location() && beyond > 0 {
		if err := a.room(beyond); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range ranges {
		a.order++
		r.Memory.used = a.order
	}
	return nil
}

// PrefetchBatch queues the moves of several ranges to a place: with one call of CUDA 13.0
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
	if s == nil {
		return errNilStream
	}
	if err := a.mayPrefetch(to, ranges...); err != nil {
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
// copy them. Until they are written again, reads return anything. Of pages that have other
// bytes too nothing is discarded. Errors are those of [Memory.Prefetch], and
// [cudart.ErrUnsupported].
func (m *Memory) Discard(s *cudart.Stream, off, n int) error {
	return m.with("discard", func() error {
		r := m.Range(off, n)
		switch err := r.check(); {
		case s == nil:
			return errNilStream
		case err != nil:
			return err
		case !m.a.concurrent:
			return ErrNotConcurrent
		}
		return discard(s, r.ptr(), n)
	})
}

// discard discards the whole pages of n bytes. CUDA does not document what becomes of the
// other bytes of a page, and rounds what it prefetches and advises up to pages.
func discard(s *cudart.Stream, p cudart.DevPtr, n int) error {
	page := cudart.DevPtr(os.Getpagesize())
	first, end := (p+page-1)/page*page, (p+cudart.DevPtr(n))/page*page
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

// ReadMostly advises that the memory is mostly read: each place that reads it gets a copy,
// and a write drops the others' copies (cudaMemAdviseSetReadMostly).
func ReadMostly() Advice { return Advice{cudart.AdviseReadMostly, Host()} }

// PreferredLocation advises that the memory stays at a place: accesses from elsewhere go
// over the link rather than move it, where that is possible
// (cudaMemAdviseSetPreferredLocation).
func PreferredLocation(at cudart.Location) Advice {
	return Advice{cudart.AdvisePreferredLocation, at}
}

// AccessedBy advises that a place accesses the memory, so that it maps it wherever it lies,
// and causes no page faults (cudaMemAdviseSetAccessedBy).
func AccessedBy(at cudart.Location) Advice { return Advice{cudart.AdviseAccessedBy, at} }

// unset is the advice that undoes it: cudaMemoryAdvise numbers each after its own.
func (a Advice) unset() Advice { return Advice{a.kind + 1, a.at} }

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
func (m *Memory) Advise(a Advice) error { return m.AdviseRange(0, m.n, a) }

// AdviseRange is Advise for n bytes at offset off, and the pages that have them. A range that
// is empty or not within the memory is an error as well.
func (m *Memory) AdviseRange(off, n int, a Advice) error { return m.advise("advise", off, n, a) }

// Unadvise undoes Advise.
func (m *Memory) Unadvise(a Advice) error { return m.UnadviseRange(0, m.n, a) }

// UnadviseRange undoes AdviseRange. Of memory that is not read mostly any more one copy
// stays: that at its preferred location, else that on the host.
func (m *Memory) UnadviseRange(off, n int, a Advice) error {
	if a.kind == 0 {
		return m.advise("unadvise", off, n, a)
	}
	return m.advise("unadvise", off, n, a.unset())
}

func (m *Memory) advise(what string, off, n int, a Advice) error {
	return m.with(what, func() error {
		r := m.Range(off, n)
		switch err := r.check(); {
		case err != nil:
			return err
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

// Attributes returns what was advised for n bytes at offset off, and where they were
// prefetched to last (cudaMemRangeGetAttribute). CUDA does not report where pages lie that
// have moved since: see [Memory.MappedByHost]. Errors are [ErrClosed] and those of CUDA.
func (m *Memory) Attributes(off, n int) (a cudart.RangeAttributes, err error) {
	err = m.with("attributes", func() error {
		r := m.Range(off, n)
		if err := r.check(); err != nil {
			return err
		}
		a, err = m.a.dev.RangeAttributes(r.ptr(), n)
		return err
	})
	return a, err
}

// MappedByHost returns how many of the n bytes at offset off the CPU has mapped, in whole
// pages (/proc/self/pagemap): those lie on the host, or are copies there of memory that is
// read mostly. The others lie on a device, or were never touched. It is the nearest to where
// pages lie that the system reports; the simulated GPU does not move pages so. Errors are
// [ErrClosed], and those of the file, which wrap fs.ErrNotExist where there is none.
func (m *Memory) MappedByHost(off, n int) (mapped int, err error) {
	err = m.with("pages mapped by the host", func() error {
		r := m.Range(off, n)
		if err := r.check(); err != nil {
			return err
		}
		mapped, err = linux.ReadPageMap(os.DirFS("/"), uintptr(r.ptr()), n)
		return err
	})
	return mapped, err
}
