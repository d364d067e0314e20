package stage

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
)

// A Stage has what all copies of a device share: rings, streams and workers.
type Stage struct {
	dev       *cudart.Device
	shared    *shared
	workers   *workerPool
	self      [1]*Stage // as Copy.Stages has it
	ring      *ring     // large copies
	smallRing *ring     // small copies, which must not queue behind chunks of 8 MiB

	// By direction. Small copies have links of their own, for the same reason.
	links  [directions]struct{ large, small link }
	slots  [directions]smallSlot
	active [directions]atomic.Int32 // copies that have bytes to copy: see setActive

	pinned atomic.Int64                  // bytes
	opened []func(context.Context) error // close functions, in the order of their calls
}

// A direction is the direction of a copy.
type direction int

const (
	toDevice direction = iota
	toHost
	directions
)

func (d direction) opposite() direction { return 1 - d }

const (
	kib = 1 << 10
	mib = 1 << 20

	// MaxSmall is the size of the largest copies that never wake a worker: one goroutine is
	// done before a worker is awake.
	MaxSmall = 64 * kib

	ringUnit       = 512 * kib
	smallRingUnits = 30 // of MaxSmall bytes
	ringLabel      = "transfer ring"

	maxChunk     = 8 * mib
	maxRing      = 36 * mib
	maxExtension = 28 * mib
)

// process has what copies of all devices share.
var process = struct {
	mu      sync.Mutex
	stages  map[*cudart.Device]*shared
	pools   map[int]*workerPool // by NUMA node
	copying *concurrency        // of all pools
}{stages: make(map[*cudart.Device]*shared), pools: make(map[int]*workerPool)}

// A shared stage is opened by the first of its users, and closed by the last.
type shared struct {
	users    int           // guarded by process.mu; goroutines that wait for opening count
	openLock chan struct{} // a mutex: it holds the goroutine that opens the stage
	stage    *Stage        // guarded by openLock, until there is no user; nil if not open
}

// Acquire returns the device's stage, which it opens if this is the first use.
// Release it.
func Acquire(ctx context.Context, dev *cudart.Device) (*Stage, error) {
	process.mu.Lock()
	of := process.stages[dev]
	if of == nil {
		of = &shared{openLock: make(chan struct{}, 1)}
		process.stages[dev] = of
	}
	of.users++
	process.mu.Unlock()
	err := of.open(ctx, dev)
	if err != nil {
		// Others may have opened it meanwhile, and released it.
		if of.removeUser(dev) && of.stage != nil {
			err = errors.Join(err, lifetime.Undo(ctx, of.stage.close))
		}
		return nil, err
	}
	return of.stage, nil
}

// open opens the stage, unless it is open. After an error the next user tries.
func (of *shared) open(ctx context.Context, dev *cudart.Device) error {
	select {
	case of.openLock <- struct{}{}:
		defer func() { <-of.openLock }()
	case <-ctx.Done():
		return bounded.Ended(ctx)
	}
	if of.stage != nil {
		return nil
	}
	s := &Stage{dev: dev, shared: of, workers: workersFor(dev)}
	s.self[0] = s
	if err := s.open(ctx); err != nil {
		return errors.Join(err, lifetime.Undo(ctx, s.close))
	}
	of.stage = s
	return nil
}

// removeUser returns whether it has removed the last user.
func (of *shared) removeUser(dev *cudart.Device) (last bool) {
	process.mu.Lock()
	defer process.mu.Unlock()
	of.users = max(of.users-1, 0)
	if of.users == 0 && process.stages[dev] == of {
		delete(process.stages, dev)
	}
	return of.users == 0
}

// Release ends a use. The last Release waits until the GPU is done with the rings, and
// unmaps them. After an error, ctx's included, it may be called again.
func (s *Stage) Release(ctx context.Context) error {
	if s.shared.removeUser(s.dev) {
		return s.close(ctx)
	}
	return nil
}

func (s *Stage) open(ctx context.Context) (err error) {
	if s.ring, err = s.openRing(ctx, sizeOf(s.workers.max)); err != nil {
		return err
	}
	s.ring.extension.pinned = &s.pinned
	if s.smallRing, err = s.openRing(ctx, ringSize{unit: MaxSmall, ring: smallRingUnits * MaxSmall, maxChunk: MaxSmall}); err != nil {
		return err
	}
	for d := range s.links {
		for _, l := range []*link{&s.links[d].large, &s.links[d].small} {
			if l.stream, err = s.openStream(); err != nil {
				return err
			}
		}
		if err := s.openSlot(ctx, direction(d)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stage) openRing(ctx context.Context, size ringSize) (*ring, error) {
	r, err := newRing(ctx, s.dev, size)
	if err == nil {
		s.pinned.Add(int64(r.buf.Info().Reserved))
		s.opened = append(s.opened, r.close)
	}
	return r, err
}

func (s *Stage) openStream() (*cudart.Stream, error) {
	stream, err := s.dev.NewStream(cudart.StreamOptions{})
	if err == nil {
		s.opened = append(s.opened, func(context.Context) error { return stream.Close() })
	}
	return stream, err
}

// sizeOf returns the size of a ring for a number of workers. Four chunks of 8 MiB keep a
// link busy in one direction, and stay in the caches. A few workers cannot fill the link,
// and gain by what stays in their own caches.
func sizeOf(workers int32) ringSize {
	if workers <= 4 {
		return ringSize{unit: ringUnit, ring: 4 * 2 * mib, maxChunk: maxChunk}
	}
	return ringSize{unit: ringUnit, ring: maxRing, extension: maxExtension, maxChunk: maxChunk}
}

// close closes what open has made. After an error it may be called again.
func (s *Stage) close(ctx context.Context) error {
	for ; len(s.opened) > 0; s.opened = s.opened[1:] {
		if err := s.opened[0](ctx); err != nil {
			return err
		}
	}
	s.pinned.Store(0)
	return nil
}

// Bytes returns the number of bytes that are pinned for the stage; 0 after the last Release.
func (s *Stage) Bytes() int { return int(s.pinned.Load()) }

// workersFor returns the worker pool of the NUMA node that a device is on.
func workersFor(dev *cudart.Device) *workerPool {
	node, cores := coresOf(dev)
	process.mu.Lock()
	defer process.mu.Unlock()
	p := process.pools[node]
	if p == nil {
		procs := runtime.GOMAXPROCS(0)
		if process.copying == nil {
			process.copying = newConcurrency(procs)
		}
		p = newWorkerPool(procs, cores, process.copying)
		process.pools[node] = p
	}
	return p
}

// oneGroup is Copy.Groups of copies through one stage.
var oneGroup = [][]int{{0}}

func (s *Stage) link(d direction, small bool) *link {
	if small {
		return &s.links[d].small
	}
	return &s.links[d].large
}
