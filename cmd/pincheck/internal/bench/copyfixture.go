// The memory, streams and events with which bandwidth, latency and overlap copy, and the comparison of all bytes
// that were copied.

package bench

import (
	"context"
	"errors"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostkind"
)

// onDevice is the direction of a copy within a device's memory, beside those of package
// result.
const onDevice = "on_device"

// A copyFixture has the memory, streams and events for copies between a device and host memory of one kind.
type copyFixture struct {
	resources
	kind hostKind
	n    int // bytes of each of the four blocks

	source, target hostkind.Memory // of uploads, of downloads
	in, out        cudart.DevPtr   // the target of uploads, the source of downloads
	up, down       *cudart.Stream
	span, all      *measure.Span   // of this fixture; of this and others together
	check          *hostmem.Buffer // the device's bytes, to compare
	rate           float64         // of the last sample, GB/s
	watch          measure.Stopwatch
}

// checkBytes is the number of bytes of device memory that are compared at a time.
const checkBytes = 8 << 20

// footprint returns the memory that open allocates.
func (r *copyFixture) footprint() measure.Footprint {
	footprint := measure.Footprint{Device: 2 * r.n, Pinned: min(r.n, checkBytes)}
	switch {
	case r.kind.pinned:
		footprint.Pinned += 2 * r.n
	default:
		footprint.Pageable = 2 * r.n
	}
	return footprint
}

// setup is about how long open and the comparisons of some cases take.
func (r *copyFixture) setup(cases []measure.Case) time.Duration {
	const pin, memory = 3.0, 6.0 // GB/s, of a host that is not fast
	ns := 2*float64(r.n)/pin + 2*float64(r.n)/memory
	for i := range cases {
		ns += float64(cases[i].Labels.Size()) / memory
	}
	return time.Duration(ns)
}

// open allocates the memory and writes the patterns. After an error it needs a close, too.
func (r *copyFixture) open(ctx context.Context) error {
	err := inTurn(made(r.stream, &r.up, &r.down), made(r.resources.span, &r.span, &r.all), r.allocated(r.n, &r.in, &r.out), r.pinnedAs(ctx, min(r.n, checkBytes), &r.check))
	if err != nil {
		return err
	}
	for _, m := range []struct {
		memory  *hostkind.Memory
		content pattern
	}{{&r.source, uploaded}, {&r.target, downloaded}} {
		made, err := r.kind.open(ctx, &r.resources, r.n)
		if err != nil {
			return err
		}
		*m.memory = made
		if err := m.content.fill(ctx, made.Bytes()); err != nil {
			return err
		}
	}
	if err := r.target.CopyToDevice(ctx, r.up, r.out, 0, r.n); err != nil {
		return err
	}
	return r.up.Synchronize(ctx)
}

// close waits for what is queued, and releases everything.
func (r *copyFixture) close() error {
	err := r.resources.close()
	*r = copyFixture{resources: resources{dev: r.dev, now: r.now}, kind: r.kind, n: r.n}
	return err
}

// node returns the NUMA node that most pages of the host memory lie on, if the host has
// several and the kernel says so.
func (r *copyFixture) node() (int, bool) {
	if r.kind.name != memoryRegistered {
		return 0, false
	}
	return nodeOfMemory(r.dev, r.source.Bytes(), r.target.Bytes())
}

// prepare overwrites where copies of n bytes are to arrive.
func (r *copyFixture) prepare(ctx context.Context, direction string, n int) error {
	if r.kind.moves {
		return nil
	}
	if direction != result.DeviceToHost {
		if err := r.up.Memset(r.in, 0, n); err != nil {
			return err
		}
	}
	if direction == result.DeviceToHost || direction == result.Both {
		for b := r.target.Bytes()[:n]; len(b) > 0; b = b[min(len(b), checkBytes):] {
			if err := bounded.Ended(ctx); err != nil {
				return err
			}
			clear(b[:min(len(b), checkBytes)])
		}
	}
	return r.up.Synchronize(ctx)
}

// verify compares what arrived.
func (r *copyFixture) verify(ctx context.Context, direction string, n int) error {
	if err := r.dev.Synchronize(ctx); err != nil { // also what cudaMemcpy left to do
		return err
	}
	if r.kind.moves {
		return errors.Join(uploaded.compare(ctx, r.source.Bytes()[:n], 0), downloaded.compare(ctx, r.target.Bytes()[:n], 0))
	}
	var errs []error
	switch direction {
	case result.HostToDevice, result.Both:
		errs = append(errs, r.compare(ctx, n, uploaded))
	case onDevice:
		errs = append(errs, r.compare(ctx, n, downloaded))
	}
	if direction == result.DeviceToHost || direction == result.Both {
		if r.kind.slowToRead { // so the device reads it
			err := r.target.CopyToDevice(ctx, r.up, r.in, 0, n)
			if err == nil {
				err = r.compare(ctx, n, downloaded)
			}
			errs = append(errs, err)
		} else {
			errs = append(errs, downloaded.compare(ctx, r.target.Bytes()[:n], 0))
		}
	}
	return errors.Join(errs...)
}

// compare compares n bytes of r.in with a pattern.
func (r *copyFixture) compare(ctx context.Context, n int, want pattern) error {
	return fetched(ctx, r.check, r.up, r.in, n, func(got []byte, off int) error { return want.compare(ctx, got, off) })
}

// copy is one copy of n bytes in one direction.
func (r *copyFixture) copy(ctx context.Context, direction string, n int) error {
	switch direction {
	case result.HostToDevice:
		return r.source.CopyToDevice(ctx, r.up, r.in, 0, n)
	case result.DeviceToHost:
		return r.target.CopyFromDevice(ctx, r.down, r.out, 0, n)
	}
	return r.up.CopyOnDevice(r.in, r.out, n)
}

// directionsOf returns the directions that are copied in at once.
func directionsOf(direction string) []string {
	if direction == result.Both {
		return []string{result.HostToDevice, result.DeviceToHost}
	}
	return []string{direction}
}

// take returns how long count copies of n bytes took, in both directions at once together.
func (r *copyFixture) take(ctx context.Context, direction string, n, count int) (time.Duration, error) {
	if r.kind.wall {
		return r.takeWall(ctx, direction, n, count)
	}
	if r.kind.moves {
		if err := r.moveToSource(ctx, direction, n); err != nil {
			return 0, err
		}
	}
	r.watch.Start()
	defer r.watch.Stop()
	if err := r.begin(direction); err != nil {
		return 0, err
	}
	if err := r.queue(ctx, direction, n, count); err != nil {
		return 0, err // close waits for what was queued
	}
	if err := r.end(direction); err != nil {
		return 0, err
	}
	return r.took(ctx, direction)
}

// main returns the stream of which the events are timed.
func (r *copyFixture) main(direction string) *cudart.Stream {
	if direction == result.DeviceToHost {
		return r.down
	}
	return r.up
}

// begin records the start. Both directions start at once.
func (r *copyFixture) begin(direction string) error {
	err := r.span.Begin(r.main(direction))
	if err != nil || direction != result.Both {
		return err
	}
	return r.down.WaitPoint(r.up.Point())
}

func (r *copyFixture) queue(ctx context.Context, direction string, n, count int) error {
	for range count {
		if err := bounded.Ended(ctx); err != nil {
			return err
		}
		for _, w := range directionsOf(direction) {
			if err := r.copy(ctx, w, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// end records the end, which is that of the direction that ends last.
func (r *copyFixture) end(direction string) error {
	if direction == result.Both {
		if err := r.up.WaitPoint(r.down.Point()); err != nil {
			return err
		}
	}
	return r.span.Stop(r.main(direction))
}

func (r *copyFixture) took(ctx context.Context, direction string) (time.Duration, error) {
	return r.span.Took(ctx, r.main(direction))
}

// moveToSource moves managed memory to the side from which the next copy moves it.
func (r *copyFixture) moveToSource(ctx context.Context, direction string, n int) error {
	for _, w := range directionsOf(direction) {
		var err error
		if w == result.HostToDevice {
			err = r.source.CopyFromDevice(ctx, r.up, 0, 0, n)
		} else {
			err = r.target.CopyToDevice(ctx, r.up, 0, 0, n)
		}
		if err != nil {
			return err
		}
	}
	return r.up.Synchronize(ctx)
}

// takeWall is take by the clock, with a goroutine for each direction. A call that copies from
// pageable memory returns when CUDA has staged the last bytes, before they are on the device:
// the clock runs until they are.
func (r *copyFixture) takeWall(ctx context.Context, direction string, n, count int) (time.Duration, error) {
	all := directionsOf(direction)
	errs := make(chan error, len(all))
	began := r.time()
	for _, w := range all {
		go func() { errs <- errors.Join(r.queue(ctx, w, n, count), r.main(w).Synchronize(ctx)) }()
	}
	var joined []error
	for range all {
		joined = append(joined, <-errs)
	}
	return r.time() - began, errors.Join(joined...)
}
