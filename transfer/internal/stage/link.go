package stage

import (
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// A link is one direction of a device: the stream on which chunks follow each
// other, without the gap that a change of streams makes.
//
// Calls of CUDA on one device take turns inside the driver, and goroutines that
// wait for a turn there are slow to wake. So one goroutine at a time queues
// copies, those of others too, and records one event for all that it finds.
type link struct {
	stream *cudart.Stream

	mu         sync.Mutex
	waiting    []*chunk
	submitting bool
}

// submit queues a chunk's copy, or leaves that to the goroutine that is queueing
// others. c.queued is called either way.
func (l *link) submit(c *chunk) {
	l.mu.Lock()
	l.waiting = append(l.waiting, c)
	if l.submitting {
		l.mu.Unlock()
		return
	}
	l.submitting = true
	var list []*chunk
	for len(l.waiting) > 0 {
		list, l.waiting = l.waiting, list[:0]
		l.mu.Unlock()
		for _, c := range list {
			c.err = c.send(l.stream)
		}
		p := l.stream.Point()
		for i, c := range list {
			// Also after an error: some of it may be queued.
			c.x.fence.AddPoint(p)
			list[i] = nil
			c.queued(p)
		}
		l.mu.Lock()
	}
	l.submitting = false
	l.mu.Unlock()
}
