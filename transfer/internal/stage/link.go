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
	waiting    []sending
	submitting bool
}

// A sending is one copy of a chunk.
type sending struct {
	*chunk
	to  int
	err error
}

// submit queues a chunk's copy, or leaves that to the goroutine that is queueing
// others. chunk.queued is called either way.
func (l *link) submit(c *chunk, to int) {
	l.mu.Lock()
	l.waiting = append(l.waiting, sending{chunk: c, to: to})
	if l.submitting {
		l.mu.Unlock()
		return
	}
	l.submitting = true
	var list []sending
	for len(l.waiting) > 0 {
		list, l.waiting = l.waiting, list[:0]
		l.mu.Unlock()
		for i, s := range list {
			list[i].err = s.job.Queue(l.stream, s.to, s.x.mem[:s.n], s.off)
		}
		p := l.stream.Point()
		for i, s := range list {
			list[i] = sending{}
			s.queued(s.to, p, s.err)
		}
		l.mu.Lock()
	}
	l.waiting = list[:0] // the longer room
	l.submitting = false
	l.mu.Unlock()
}
