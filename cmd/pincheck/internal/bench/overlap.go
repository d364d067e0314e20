// The experiment overlap measures the asynchrony of copies: the share of a copy in which the call blocks, the
// share that runs beside work of the GPU, and whether a reader that does not wait gets old bytes.
//
//   - blocked_share: time in the call by the time until the stream is synchronized, both by the host's clock.
//   - hidden_share: (copy alone + work alone - both together) by the shorter of copy and work, all by
//     events of the device.
//   - piped_rate: see streams.go.
//   - old_bytes_share: bytes that the reader found old, by the bytes of all tries of a sample.

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

// Names of overlap's series.
const (
	blockedShare = "blocked_share" // time in the call / time until the copy is done
	callTime     = "call_time"
	copyTime     = "copy_time" // from before the call until the copy is done
	hiddenShare  = "hidden_share"
	copyAlone    = "copy_alone_time"
	workAlone    = "work_alone_time"
	togetherTime = "together_time"
	oldShare     = "old_bytes_share"
)

// Keys and values of overlap's labels.
const (
	first     = "first" // of copy and work, to be queued
	firstCopy = "copy"
	firstWork = "work"

	reader      = "reader" // of the target of a copy
	readerHost  = "host"
	readerOther = "non_blocking_stream"
	readerSame  = "same_stream"
)

// overlap measures what is asynchronous about asynchronous copies.
func overlap(now clock) measure.Experiment {
	return measure.Experiment{
		Name:     "overlap",
		Group:    "Copies:",
		Question: "Does a copy block its caller, and does it hide behind GPU work?",
		Long: `Measures how long a copy blocks its caller, from pageable and from pinned
memory; how much of a copy hides behind GPU work, uncut and in pieces on 1 to 8
streams; and what a read finds that does not wait for the copy.`,
		Related: "pincheck bench latency, pincheck explain slow_pageable",
		Views: []result.View{
			{Title: "Time in the call, as a share of the time until the copy is done", Series: blockedShare, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Time in the call", Series: callTime, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Time until the copy is done, as the caller sees it", Series: copyTime, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Share of a copy that hides behind work of about its length", Series: hiddenShare, X: result.Size, Lines: []string{result.Memory, result.Direction, first}},
			{Title: "Copies with work after each piece", Series: pipedRate, X: streamsKey, Lines: []string{result.Direction, piecesKey}},
			{Title: "Old bytes that reads without synchronizing find", Series: oldShare, X: reader, Lines: []string{result.Memory, result.Direction, result.Method, result.Size}},
		},
		Plan: onDevices(func(env measure.Env) ([]measure.Group, error) {
			var groups []measure.Group
			for _, dev := range env.Devices {
				groups = append(groups, blockedGroups(env, dev, now)...)
				groups = append(groups, hiddenGroups(env, dev, now)...)
				groups = append(groups, pipedGroup(env, dev, now), staleGroup(dev), orderGroup(env, dev, now))
			}
			return groups, nil
		}),
		Explain: explainOverlap,
	}
}

// A copyCase is a direction, a kind of memory and a size on a copyFixture.
type copyCase struct {
	*copyFixture
	direction, memory string
	n                 int
}

func (c *copyCase) queue(ctx context.Context) error { return c.copy(ctx, c.direction, c.n) }

// labels are the conditions of a copyCase's series.
func (c *copyCase) labels() result.Labels {
	return labelsOf(c.dev, result.Memory, c.memory, result.Direction, c.direction, result.Size, strconv.Itoa(c.n))
}

// caseOf completes a case of a copyCase. Before its first sample it overwrites where the copies are to arrive.
func (c *copyCase) caseOf(m measure.Case) measure.Case {
	m.Sample = after(func(ctx context.Context) error { return c.prepare(ctx, c.direction, c.n) }, m.Sample)
	m.BytesPerSample, m.WarmUp = c.n, 1
	m.Verify = func(ctx context.Context) error { return c.verify(ctx, c.direction, c.n) }
	m.Node = c.node
	for i := range m.Also {
		m.Also[i].Labels, m.Also[i].BytesPerSample = m.Labels, c.n
	}
	return m
}

// overlapKinds are the kinds of memory that overlap compares, by their label.
var overlapKinds = []struct {
	label string
	kind  hostKind
}{{inPageable, unpinnedAsync}, {inPinned, registered}}

// copyCasesOf returns the copies of memory on a copyFixture, in both directions.
func copyCasesOf(r *copyFixture, memory string, sizes []int) (all []*copyCase) {
	for _, n := range sizes {
		for _, direction := range bothDirections {
			all = append(all, &copyCase{copyFixture: r, direction: direction, memory: memory, n: n})
		}
	}
	return all
}

// last makes a series of a time that each sample stores.
func last(name string, d *time.Duration) measure.Also {
	return measure.Also{Series: result.Series{Name: name, Unit: result.Seconds, Better: result.Lower}, Last: func() (float64, bool) { return d.Seconds(), true }}
}

// blockedGroups measure how long the call of a copy takes.
func blockedGroups(env measure.Env, dev *cudart.Device, now clock) (groups []measure.Group) {
	sizes := sizesOr(env, []int{1 << 20, 16 << 20}, []int{64 << 10, 1 << 20, 16 << 20, 256 << 20})
	for _, k := range overlapKinds {
		r := &copyFixture{resources: resources{dev: dev, now: now}, kind: k.kind, n: slices.Max(sizes)}
		var cases []measure.Case
		for _, c := range copyCasesOf(r, k.label, sizes) {
			var call, done time.Duration
			sample := func(ctx context.Context) (float64, error) {
				began := r.now()
				if err := c.queue(ctx); err != nil {
					return 0, err
				}
				call = r.now() - began
				if err := r.main(c.direction).Synchronize(ctx); err != nil {
					return 0, err
				}
				done = r.now() - began
				return call.Seconds() / done.Seconds(), nil
			}
			cases = append(cases, c.caseOf(measure.Case{
				Series: result.Series{Name: blockedShare, Labels: c.labels(), Unit: result.Ratio, Better: result.Lower},
				Sample: sample, Also: []measure.Also{last(callTime, &call), last(copyTime, &done)},
			}))
		}
		groups = append(groups, r.group("calls of copies of "+k.label+" memory", cases))
	}
	return groups
}

// setupTime is about how long it takes to allocate and to fill memory.
func setupTime(n int) time.Duration { return 10*time.Millisecond + time.Duration(n) }

// A hiding measures copies beside work on another stream.
type hiding struct {
	copyFixture
	work *cudart.Stream
	load load
}

func (h *hiding) open(ctx context.Context) error {
	work := func() (load, error) { return h.newLoad(ctx) }
	return inTurn(func() error { return h.copyFixture.open(ctx) }, made(h.resources.stream, &h.work), made(work, &h.load))
}

// both is the time of the copy and the work at once. The work waits for the span's
// begin, and its end for the work.
func (h *hiding) both(ctx context.Context, c *copyCase, workFirst bool) (time.Duration, error) {
	stream := h.main(c.direction)
	queue := []func() error{func() error { return c.queue(ctx) }, func() error { return h.load.queue(h.work) }}
	if workFirst {
		slices.Reverse(queue)
	}
	err := inTurn(
		func() error { return h.span.Begin(stream) },
		func() error { return h.work.WaitPoint(stream.Point()) },
		func() error { return inTurn(queue...) },
		func() error { return stream.WaitPoint(h.work.Point()) },
	)
	if err != nil {
		return 0, err
	}
	return h.span.End(ctx, stream)
}

// hiddenGroups measure how much of a copy hides behind work.
func hiddenGroups(env measure.Env, dev *cudart.Device, now clock) (groups []measure.Group) {
	sizes := sizesOr(env, []int{16 << 20}, []int{16 << 20, 64 << 20})
	for _, k := range overlapKinds {
		h := &hiding{copyFixture: copyFixture{resources: resources{dev: dev, now: now}, kind: k.kind, n: slices.Max(sizes)}}
		var cases []measure.Case
		for _, c := range copyCasesOf(&h.copyFixture, k.label, sizes) {
			for _, order := range []string{firstWork, firstCopy} {
				cases = append(cases, h.hidden(c, order))
			}
		}
		g := h.group("copies of "+k.label+" memory beside work", cases)
		g.Open = h.open
		groups = append(groups, g)
	}
	return groups
}

// hidden is the case of a copy beside work, of which order is queued first.
func (h *hiding) hidden(c *copyCase, order string) measure.Case {
	var alone, work, both time.Duration
	var fitted load             // for a copy of this kind
	var watch measure.Stopwatch // of the copy alone
	sample := func(ctx context.Context) (share float64, err error) {
		watch.Start()
		alone, err = h.span.Time(ctx, h.main(c.direction), func() error { return c.queue(ctx) })
		watch.Stop()
		if err != nil {
			return 0, err
		}
		if !fitted.fitted() {
			if err = h.load.fit(ctx, h.span, h.work, alone); err != nil {
				return 0, err
			}
			fitted = h.load
		}
		h.load = fitted
		if work, err = h.span.Time(ctx, h.work, func() error { return h.load.queue(h.work) }); err != nil {
			return 0, err
		}
		if both, err = h.both(ctx, c, order == firstWork); err != nil {
			return 0, err
		}
		return (alone + work - both).Seconds() / min(alone, work).Seconds(), nil
	}
	return c.caseOf(measure.Case{
		Series: result.Series{Name: hiddenShare, Labels: c.labels().With(first, order), Unit: result.Ratio, Better: result.Higher},
		Budget: 100 * time.Millisecond, Sample: sample, CPU: watch.CPU, Also: []measure.Also{last(copyAlone, &alone), last(workAlone, &work), last(togetherTime, &both)},
	})
}

// staleGroup measures what a read sees that does not synchronise: verify.StaleRead,
// which allocates its own memory.
func staleGroup(dev *cudart.Device) measure.Group {
	const size = 256 << 20 // at most
	labels := labelsOf(dev, result.Memory, inPinned, result.Direction, result.DeviceToHost, result.Method, "cudaMemcpyAsync", reader, readerHost)
	return measure.Group{
		Name: fmt.Sprintf("reads before synchronising on device %d", dev.Ordinal()), Footprint: measure.Footprint{Pinned: 2 * size, Device: size},
		Open: func(context.Context) error { return nil }, Close: func() error { return nil },
		Cases: []measure.Case{{
			Series:  result.Series{Name: oldShare, Labels: labels, Unit: result.Ratio, Better: result.Lower},
			Samples: 5, Budget: 200 * time.Millisecond,
			Sample: func(ctx context.Context) (float64, error) {
				r, err := verify.StaleRead(ctx, dev)
				switch {
				case err != nil:
					return 0, err
				case r.BadAfter > 0:
					return 0, fmt.Errorf("%w: %d of %d after synchronising", measure.ErrMismatch, r.BadAfter, r.SizeBytes)
				}
				return float64(r.StaleBefore) / float64(r.SampledBytes), nil
			},
			Verify: func(context.Context) error { return nil }, // every sample is compared
		}},
	}
}

// An ordering uploads pageable memory, and has a stream that is not in order with the
// default stream copy what arrived.
type ordering struct {
	resources
	source hostkind.Direct // without poison
	a, b   cudart.DevPtr
	came   hostkind.Direct
	stream *cudart.Stream
}

func (o *ordering) open(ctx context.Context, n int) (err error) {
	pageable := func() (hostkind.Direct, error) { return o.pageable(n) }
	if err = inTurn(made(pageable, &o.source, &o.came), o.allocated(n, &o.a, &o.b), made(o.resources.stream, &o.stream)); err != nil {
		return err
	}
	if err = uploaded.fill(ctx, o.source); err != nil {
		return err
	}
	for i, v := range o.source {
		if v == poison {
			o.source[i] = 0
		}
	}
	return nil
}

// old returns how many old bytes the stream read of an upload of n bytes.
func (o *ordering) old(ctx context.Context, n int, upload func(ctx context.Context, n int) error) (int, error) {
	err := inTurn(
		func() error { return o.stream.Memset(o.a, poison, n) },
		func() error { return o.stream.Synchronize(ctx) },
		func() error { return errors.Join(upload(ctx, n), o.stream.CopyOnDevice(o.b, o.a, n)) },
		func() error { return o.stream.Synchronize(ctx) },
		func() error { return o.dev.CopyToHost(unsafe.Pointer(&o.came[0]), o.b, n) },
	)
	if err != nil {
		return 0, err
	}
	return bytes.Count(o.came[:n], []byte{poison}), nil
}

// verify compares what has arrived in the end.
func (o *ordering) verify(_ context.Context, n int) error {
	if err := o.dev.CopyToHost(unsafe.Pointer(&o.came[0]), o.a, n); err != nil {
		return err
	}
	if !bytes.Equal(o.came[:n], o.source[:n]) {
		return fmt.Errorf("%w: an upload of %d bytes has not arrived", measure.ErrMismatch, n)
	}
	return nil
}

// uploads are the ways in which an upload is followed by work.
func (o *ordering) uploads() []upload {
	return []upload{
		{"cudaMemcpy", readerOther, func(_ context.Context, n int) error { return o.dev.CopyToDevice(o.a, unsafe.Pointer(&o.source[0]), n) }},
		{"cudaMemcpyAsync", readerSame, func(ctx context.Context, n int) error { return o.source.CopyToDevice(ctx, o.stream, o.a, 0, n) }},
	}
}

type upload struct {
	method, reader string
	do             func(ctx context.Context, n int) error
}

const orderTries = 10 // uploads of a sample

// orderGroup measures whether work on a non-blocking stream sees an upload from pageable
// memory whose call has returned: CUDA may return when the bytes are staged.
func orderGroup(env measure.Env, dev *cudart.Device, now clock) measure.Group {
	sizes := sizesOr(env, []int{1 << 20}, []int{256 << 10, 1 << 20, 16 << 20})
	o := &ordering{resources: resources{dev: dev, now: now}}
	largest := slices.Max(sizes)
	g := measure.Group{
		Name: fmt.Sprintf("uploads and work on device %d", dev.Ordinal()), Footprint: measure.Footprint{Pageable: 2 * largest, Device: 2 * largest}, Setup: setupTime(2 * largest),
		Open: func(ctx context.Context) error { return o.open(ctx, largest) }, Close: o.close,
	}
	for _, n := range sizes {
		for i, u := range o.uploads() {
			g.Cases = append(g.Cases, measure.Case{
				Series: result.Series{
					Name: oldShare, Unit: result.Ratio, Better: result.Lower, BytesPerSample: orderTries * n,
					Labels: labelsOf(dev, result.Memory, inPageable, result.Direction, result.HostToDevice, result.Method, u.method, reader, u.reader, result.Size, strconv.Itoa(n)),
				},
				WarmUp: 1, Budget: 150 * time.Millisecond,
				Sample: func(ctx context.Context) (float64, error) {
					old := 0
					for range orderTries {
						more, err := o.old(ctx, n, o.uploads()[i].do)
						if err != nil {
							return 0, err
						}
						old += more
					}
					return float64(old) / float64(orderTries*n), nil
				},
				Verify: func(ctx context.Context) error { return o.verify(ctx, n) },
			})
		}
	}
	return g
}

func explainOverlap(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	whole := func(a *answers) *result.Series {
		return a.largest(pipedRate, result.Direction, result.HostToDevice, piecesKey, piecesText(1))
	}
	return explained(b, whole, (*answers).piped, func(a *answers) {
		a.blocking()
		a.hiding()
		if s := a.Find(oldShare, result.Label{Key: reader, Value: readerHost}); s != nil {
			if s.Max > 0 {
				a.say("A read of pinned memory that does not synchronize finds old bytes, %s of those sampled, and no call fails.", units.Share(s.Median))
			} else {
				a.say("In %s no read without synchronizing was early enough to find old bytes. It is wrong nevertheless.", units.Things(len(s.Samples), "try", "tries"))
			}
		}
		a.order(readerOther, "")
		a.order(readerSame, " on the same stream")
	})
}

// blocking is the share of a copy for which it blocks its caller.
func (a *answers) blocking() {
	t := result.Table{Columns: []string{"pageable", "pinned"}}
	for _, direction := range bothDirections {
		pinned := a.largest(blockedShare, result.Memory, inPinned, result.Direction, direction)
		pageable := a.largest(blockedShare, result.Memory, inPageable, result.Direction, direction)
		for _, s := range []*result.Series{pinned, pageable} {
			if s != nil {
				t.Title = "time in the call, " + units.Bytes(s.Labels.Size())
			}
		}
		t.Add(directionText(direction), "", share(pageable), share(pinned))
		const mostly = 0.5
		if pinned != nil && pinned.Median >= mostly {
			a.say("Copies %s of pinned memory block their caller as well.", directionText(direction))
		}
		if pageable != nil && pageable.Median < mostly {
			a.say("Copies %s of pageable memory do not block their caller.", directionText(direction))
		}
	}
	a.table(t)
}

// hiding is the share of a copy that hides behind work.
func (a *answers) hiding() {
	t := result.Table{Columns: []string{"work queued first", "copy queued first"}, Only: result.Alone}
	for _, direction := range bothDirections {
		for _, memory := range []string{inPinned, inPageable} {
			s := a.largest(hiddenShare, result.Direction, direction, result.Memory, memory)
			if s != nil {
				t.Title = "Share of a copy of " + units.Bytes(s.Labels.Size()) + " that hides behind work of its length"
			}
			t.Add(directionText(direction)+", "+memory, "", share(a.other(s, hiddenShare, first, firstWork)), share(a.other(s, hiddenShare, first, firstCopy)))
		}
	}
	a.table(t)
}

// order says whether work after an upload from pageable memory found its bytes.
func (a *answers) order(by, where string) {
	var worst *result.Series
	tries := 0
	for _, s := range a.all(oldShare, reader, by) {
		tries += orderTries * len(s.Samples)
		if worst == nil || s.Max > worst.Max {
			worst = s
		}
	}
	if worst == nil {
		return
	}
	what := "Work on a non-blocking stream after " + worst.Labels.Get(result.Method) + " of pageable memory" + where
	if worst.Max == 0 {
		a.say("%s found all bytes in %s.", what, units.Things(tries, "try", "tries"))
		return
	}
	a.say("%s read old bytes, up to %s of %s. The call returns when the bytes are staged, not when they have arrived: copy on the stream that uses them, or make it wait for an event.", what, units.Share(worst.Max), units.Bytes(worst.Labels.Size()))
}
