package fence

import (
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/raw"
)

// A Timeline is the order in which a stream does its work. It outlives the stream: queued
// work is done although the stream is closed, or garbage. So code that keeps memory for a
// stream keeps the Timeline, not the stream.
type Timeline = interface {
	// ID returns a number that no other Timeline of the process has, and that is not 0.
	ID() uint64

	// End returns the place after all work that is queued so far. It makes no call: the
	// first query of the Point records the event, or Record. Until then, work that is
	// queued later may be waited for as well.
	End() cudart.Point

	// Idle returns the latest Point, and true if no work was queued since, so that a query
	// of it queues nothing. Closed streams are included.
	Idle() (cudart.Point, bool)

	// String returns the handle and the device of the stream, for messages.
	String() string
}

// order is cudart's.
var order = raw.Order.(interface {
	Of(s *cudart.Stream) Timeline
	At(p cudart.Point) Timeline
	Record(p cudart.Point)
})

// TimelineOf returns the order of a stream's work, nil if there is no stream.
func TimelineOf(s *cudart.Stream) Timeline { return order.Of(s) }

// Busy reports whether a stream may have work that is not done. It makes no call.
func Busy(s *cudart.Stream) bool {
	timeline := TimelineOf(s)
	if timeline == nil {
		return false
	}
	p, idle := timeline.Idle()
	return !idle || !p.Completed()
}

// TimelineAt returns the order of the work of a Point's stream, nil for the zero Point.
func TimelineAt(p cudart.Point) Timeline { return order.At(p) }

// Record records an event for a Point of End, unless there is one (cudaEventRecord). If
// that fails, later queries of the Point try again. It does not block: on a stream that may
// be full, and on one that other code uses, the call is made on another goroutine, and work
// that is queued meanwhile may be waited for as well.
func Record(p cudart.Point) { order.Record(p) }
