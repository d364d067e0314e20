package stage

import (
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// A link is one direction of a device: the stream on which chunks follow each
// other, without the gap that a change of streams makes.
//
// Calls of CUDA on one device serialize inside the driver, and goroutines that
// wait there are slow to wake. So one goroutine at a time queues
// copies, for other goroutines too, and records one event for all copies that it finds.
type link struct {
	stream *cudart.Stream

	mu         sync.Mutex
	submitted  []submission
	submitting bool // a goroutine queues copies; it takes over what others submit
}

// A submission is one copy of a chunk: to or from a device of its job.
type submission struct {
	*chunk
	device int
	err    error
}

// submit queues a chunk's copy, or adds it to the list of the goroutine that is queueing
// copies. chunk.queued is called either way.
func (l *link) submit(c *chunk, device int) {
	l.mu.Lock()
	l.submitted = append(l.submitted, submission{chunk: c, device: device})
	if l.submitting {
		l.mu.Unlock()
		return
	}
	l.submitting = true
	var list []submission
	for len(l.submitted) > 0 {
		list, l.submitted = l.submitted, list[:0]
		l.mu.Unlock()
		for i, s := range list {
			list[i].err = s.job.Queue(l.stream, s.device, s.x.mem[:s.N], s.Off)
		}
		p := l.stream.Point()
		for i, s := range list {
			list[i] = submission{}
			s.queued(s.device, p, s.err)
		}
		l.mu.Lock()
	}
	l.submitted = list[:0] // the longer memory
	l.submitting = false
	l.mu.Unlock()
}
