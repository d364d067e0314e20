package cudart

import "github.com/gopinned/pinned/internal/raw"

func init() { raw.Order = order{} }

// An order gives the timelines of streams to package fence.
type order struct{}

// A timelineMethods is a *timeline, or nil.
type timelineMethods = interface {
	ID() uint64
	End() Point
	Idle() (Point, bool)
	String() string
}

// Of returns the timeline of a stream, nil for none.
func (order) Of(s *Stream) timelineMethods { return methods(s.order()) }

// At returns the timeline of a Point, nil for the zero Point.
func (order) At(p Point) timelineMethods { return methods(p.timeline) }

// Record is Point.record.
func (order) Record(p Point) { p.record() }

func methods(t *timeline) timelineMethods {
	if t == nil {
		return nil
	}
	return t
}
