package managed

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
)

// Advice is a hint to the driver about the accesses to memory. It changes speed, never results.
type Advice struct {
	kind cudart.Advice
	at   cudart.Location
}

// ReadMostly advises that the memory is mostly read: each location that reads it gets a
// copy, and a write drops the other locations' copies (cudaMemAdviseSetReadMostly).
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

// unset returns the advice that undoes a. In cudaMemoryAdvise it has the next number.
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

// Advise advises the driver about the range, and all pages that have bytes of it
// (cudaMemAdvise). The zero Advice is an error; others are those of [Range.Discard].
func (r Range) Advise(ctx context.Context, a Advice) error { return r.advise(ctx, "advise", a) }

// Unadvise undoes Advise. Of memory that was advised ReadMostly one copy stays: the copy at its
// preferred location, or else on the host.
func (r Range) Unadvise(ctx context.Context, a Advice) error {
	return r.advise(ctx, "unadvise", a.unset())
}

func (r Range) advise(ctx context.Context, what string, a Advice) error {
	return r.with(ctx, what, func() error {
		switch {
		case a.kind == 0:
			return fmt.Errorf("%v", a)
		case !r.Memory.a.concurrent:
			return ErrNotConcurrent
		}
		if err := r.Memory.a.mem.advise(ctx, r, a); err != nil {
			return fmt.Errorf("%v: %w", a, err)
		}
		return nil
	})
}
