package stage

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
)

// A Stage is what all copies of a device share: its rings, its streams and the
// workers.
type Stage struct {
	dev   *cudart.Device
	crew  *crew
	alone [1]*Stage // the stage itself, as Copy.Over has it
	ring  *ring     // of large copies
	few   *ring     // of small ones, which would wait behind those

	// Small copies have links of their own, so as not to queue behind chunks:
	// by direction, and whether they are brief.
	links [2][2]link

	loneUp, loneDown lone

	copies [2]atomic.Int32 // that have something to copy, for each direction: see demand

	bytes atomic.Int64 // that are pinned
}

const (
	kib = 1 << 10
	mib = 1 << 20

	ringUnit = 512 * kib

	// Alone is how many bytes are copied by one goroutine: it is done before
	// workers come.
	Alone = 64 * kib
	// Small copies have a ring of so many units of that size.
	fewUnits = 30

	ringLabel = "transfer ring"
)

const (
	chunkMost = 8 * mib
	ringMost  = 36 * mib
	annexMost = 28 * mib
)

// stages are those of the process, with a count of users.
var stages struct {
	sync.Mutex
	all     map[*cudart.Device]*shared
	crews   map[int]*crew // by NUMA node
	copying *seats        // of all crews
}

// A shared stage is made by the first that needs it, and released by the last.
type shared struct {
	users int
	ready chan struct{} // closed when the stage was made, or could not be
	stage *Stage        // nil if it could not be
}

// Acquire returns the device's stage, which it makes if this is the first use.
// Release it.
func Acquire(ctx context.Context, dev *cudart.Device) (*Stage, error) {
	for {
		s, first := join(dev)
		if first {
			return s.open(ctx, dev)
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			if drop(dev, s) {
				return nil, errors.Join(bounded.Ended(ctx), lifetime.Undo(ctx, s.stage.close))
			}
			return nil, bounded.Ended(ctx)
		}
		if s.stage != nil {
			return s.stage, nil
		}
		// Another caller could not make it, with its own context: try again.
	}
}

// join begins a use of the device's stage. The first one is to make it.
func join(dev *cudart.Device) (s *shared, first bool) {
	stages.Lock()
	defer stages.Unlock()
	if stages.all == nil {
		stages.all = make(map[*cudart.Device]*shared)
	}
	s = stages.all[dev]
	if first = s == nil; first {
		s = &shared{ready: make(chan struct{})}
		stages.all[dev] = s
	}
	s.users++
	return s, first
}

// open makes the stage. After an error the next Acquire tries anew.
func (s *shared) open(ctx context.Context, dev *cudart.Device) (*Stage, error) {
	stage, err := newStage(ctx, dev)
	stages.Lock()
	if s.stage = stage; err != nil {
		delete(stages.all, dev)
	}
	stages.Unlock()
	close(s.ready)
	return stage, err
}

// drop ends one use, and returns whether it was the last one.
func drop(dev *cudart.Device, s *shared) (last bool) {
	stages.Lock()
	defer stages.Unlock()
	if s.users--; s.users == 0 {
		delete(stages.all, dev)
		return true
	}
	return false
}

// Release ends a use. The last one waits until the GPU is done with the rings,
// and unmaps them. After an error, ctx's included, it may be called again.
func (s *Stage) Release(ctx context.Context) error {
	stages.Lock()
	of := stages.all[s.dev]
	if of == nil || of.stage != s {
		stages.Unlock()
		return s.close(ctx) // the last one tries again
	}
	stages.Unlock()
	if drop(s.dev, of) {
		return s.close(ctx)
	}
	return nil
}

func newStage(ctx context.Context, dev *cudart.Device) (*Stage, error) {
	s := &Stage{dev: dev, crew: crewOf(dev)}
	s.alone[0] = s
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(err, lifetime.Undo(ctx, s.close))
	}
	return s, nil
}

func (s *Stage) open(ctx context.Context) (err error) {
	ring, annex := ringBytes(s.crew.most)
	if s.ring, err = newRing(ctx, s.dev, ring/ringUnit, annex/ringUnit, ringUnit, chunkMost/ringUnit, ringLabel); err != nil {
		return err
	}
	if s.few, err = newRing(ctx, s.dev, fewUnits, 0, Alone, 1, ringLabel); err != nil {
		return err
	}
	if err := errors.Join(s.loneUp.open(ctx, s.dev, mostUp), s.loneDown.open(ctx, s.dev, mostDown)); err != nil {
		return err
	}
	s.ring.annex.pinned = &s.bytes
	s.bytes.Store(int64(s.ring.buf.Reserved() + s.few.buf.Reserved() + s.loneUp.buf.Reserved() + s.loneDown.buf.Reserved()))
	return s.each(func(l *link) (err error) {
		l.stream, err = s.dev.NewStream(cudart.StreamOptions{})
		return err
	})
}

// ringBytes is the size of a ring that so many workers fill, and of its annex. Four
// chunks of 8 MiB keep a link busy in one direction, and stay in the caches. A few
// workers cannot fill the link, and gain by what stays in their own caches.
func ringBytes(workers int32) (ring, annex int) {
	if workers <= 4 {
		return 4 * 2 * mib, 0
	}
	return ringMost, annexMost
}

// close releases what open made, as far as it came.
func (s *Stage) close(ctx context.Context) error {
	for _, r := range []*ring{s.ring, s.few} { // which stay: a copy that was given up may end now
		if r == nil {
			continue
		}
		if err := r.close(ctx); err != nil {
			return err
		}
	}
	for _, l := range []*lone{&s.loneUp, &s.loneDown} {
		if err := l.close(ctx); err != nil {
			return err
		}
	}
	s.bytes.Store(0)
	return s.each(func(l *link) error {
		if l.stream == nil {
			return nil
		}
		return l.stream.Close()
	})
}

// Device returns the device.
func (s *Stage) Device() *cudart.Device { return s.dev }

// Bytes returns how much memory is pinned for the stage, until the last Release.
func (s *Stage) Bytes() int { return int(s.bytes.Load()) }

// crewOf returns the workers for devices of the NUMA node that a device is on.
func crewOf(dev *cudart.Device) *crew {
	node, cores := coresOf(dev)
	stages.Lock()
	defer stages.Unlock()
	c := stages.crews[node]
	if c == nil {
		if stages.crews == nil {
			stages.crews, stages.copying = make(map[int]*crew), newSeats(runtime.GOMAXPROCS(0))
		}
		c = newCrew(runtime.GOMAXPROCS(0), cores)
		c.copying = stages.copying
		stages.crews[node] = c
	}
	return c
}

// defaultWorkers leaves an eighth of more than four cores to others, and one at least.
func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return procs - (procs+7)/8
}

// oneGroup is of copies through one stage.
var oneGroup = [][]int{{0}}

// up and down are the links.
func (s *Stage) up(brief bool) *link   { return s.link(0, brief) }
func (s *Stage) down(brief bool) *link { return s.link(1, brief) }

func (s *Stage) link(way int, brief bool) *link {
	if brief {
		return &s.links[way][1]
	}
	return &s.links[way][0]
}

// each calls f for all links.
func (s *Stage) each(f func(*link) error) error {
	for way := range s.links {
		for i := range s.links[way] {
			if err := f(&s.links[way][i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// String names the stage in messages.
func (s *Stage) String() string { return fmt.Sprintf("stage of %v", s.dev) }
