package managed

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/cudart"
)

// Advise advises the driver about the accesses to the range, and to all pages that have bytes of it
// (cudaMemAdvise), or with the advice that unsets one takes it back. Advice changes speed, never
// results:
//
//   - [cudart.AdviseReadMostly]: each location that reads the memory gets a copy, and a write drops
//     the copies of the others. The location at has no effect. Unset, one copy stays: that at the
//     preferred location, or else on the host.
//   - [cudart.AdvisePreferredLocation]: the memory stays at a location. Accesses from elsewhere go
//     over the link rather than move it, where that is possible.
//   - [cudart.AdviseAccessedBy]: the location maps the memory wherever its pages are, and causes no
//     page faults.
//
// Any other value is an error; other errors are those of [Range.Discard].
func (r Range) Advise(ctx context.Context, a cudart.Advice, at cudart.Location) error {
	return r.with(ctx, "advise", func() error {
		switch {
		case a < cudart.AdviseReadMostly || a > cudart.AdviseUnsetAccessedBy:
			return fmt.Errorf("the advice %d is unknown", a)
		case !r.Memory.a.concurrent:
			return ErrNotConcurrent
		case a == cudart.AdviseReadMostly || a == cudart.AdviseUnsetReadMostly:
			at = cudart.HostLocation() // some location must be named
		}
		if err := r.Memory.a.mem.advise(ctx, r, a, at); err != nil {
			return fmt.Errorf("%s: %w", adviceName(a, at), err)
		}
		return nil
	})
}

// adviceName names advice in errors: "preferred location: the host".
func adviceName(a cudart.Advice, at cudart.Location) string {
	switch a {
	case cudart.AdviseReadMostly:
		return "read mostly"
	case cudart.AdvisePreferredLocation:
		return "preferred location: " + at.String()
	case cudart.AdviseAccessedBy:
		return "accessed by: " + at.String()
	}
	return "not any more " + adviceName(a-1, at) // in cudaMemoryAdvise, what unsets advice is its number plus 1
}
