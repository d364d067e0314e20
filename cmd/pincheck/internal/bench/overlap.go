package bench

import (
	"bytes"
	"cmp"
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
		Short:    "what is asynchronous about copies from pageable and from pinned memory",
		Question: "How long does a copy block its caller, how much of it hides behind work on the GPU, and what does a read see that does not wait for it?",
		Views: []result.View{
			{Title: "Time in the call, as share of the time until the copy is done", Series: blockedShare, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Time in the call", Series: callTime, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Time until the copy is done, as the caller sees it", Series: copyTime, X: result.Size, Lines: []string{result.Memory, result.Direction}},
			{Title: "Share of a copy that hides behind work of about its length", Series: hiddenShare, X: result.Size, Lines: []string{result.Memory, result.Direction, first}},
			{Title: "Old bytes seen by reads that do not wait for the copy", Series: oldShare, X: reader, Lines: []string{result.Memory, result.Direction, result.Method, result.Size}},
		},
		Plan: func(env measure.Env) ([]measure.Group, error) {
			if len(env.Devices) == 0 {
				return nil, errDevices
			}
			var groups []measure.Group
			for _, dev := range env.Devices {
				groups = append(groups, blockedGroup(env, dev, now), hiddenGroup(env, dev, now), staleGroup(dev), orderGroup(env, dev, now))
			}
			return groups, nil
		},
		Explain: explainOverlap,
	}
}

// A copyBench has memory of both kinds, and copies one way at a time.
type copyBench struct {
	workbench
	hosts  map[string]copyable
	mem    cudart.DevPtr
	stream *cudart.Stream
}

func (b *copyBench) open(ctx context.Context, n int) (err error) {
	b.hosts = make(map[string]copyable)
	for _, kind := range []string{inPageable, inPinned} {
		if b.hosts[kind], err = b.host(ctx, kind, n); err != nil {
			return err
		}
	}
	if b.mem, err = b.device(n); err != nil {
		return err
	}
	b.stream, err = b.workbench.stream()
	return err
}

// A way is a kind of copy on a copyBench.
type way struct {
	*copyBench
	direction, memory string
	n                 int
	content           pattern
	prepared          bool
}

// prepare writes the pattern to where the copies come from, and other bytes to where
// they go, once.
func (c *way) prepare(ctx context.Context) error {
	if c.prepared {
		return nil
	}
	host := c.hosts[c.memory]
	b := host.Bytes()[:c.n]
	if err := c.content.fill(ctx, b); err != nil {
		return err
	}
	if c.direction == result.HostToDevice {
		if err := c.stream.Memset(c.mem, poison, c.n); err != nil {
			return err
		}
	} else if err := host.CopyToDevice(c.stream, c.mem, 0, c.n); err != nil {
		return err
	}
	if err := c.stream.Synchronize(ctx); err != nil {
		return err
	}
	if c.direction == result.DeviceToHost {
		clear(b)
	}
	c.prepared = true
	return nil
}

func (c *way) queue() error {
	return copies(c.direction, c.hosts[c.memory], c.stream, c.mem, 0, c.n)
}

func (c *way) verify(ctx context.Context) error {
	if c.direction == result.HostToDevice {
		return c.compareDevice(ctx, c.mem, c.n, c.content)
	}
	return c.content.compare(ctx, c.hosts[c.memory].Bytes()[:c.n], 0)
}

// labels are the conditions of a way's series.
func (c *way) labels() result.Labels {
	return append(labelsOf(c.dev), result.Labels{{Key: result.Memory, Value: c.memory}, {Key: result.Direction, Value: c.direction}, {Key: result.Size, Value: strconv.Itoa(c.n)}}...)
}

// caseOf completes a case of a way.
func (c *way) caseOf(m measure.Case) measure.Case {
	m.BytesPerSample, m.WarmUp, m.Verify = c.n, 1, c.verify
	if c.memory == inPinned {
		m.Node = func() (int, bool) { return whereLies(c.dev, c.hosts[c.memory].Bytes()) }
	}
	for i := range m.Also {
		m.Also[i].Labels, m.Also[i].BytesPerSample = m.Labels, c.n
	}
	return m
}

// waysOf returns all ways of a copyBench.
func waysOf(b *copyBench, sizes []int) (all []*way) {
	for _, n := range sizes {
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
			for _, memory := range []string{inPageable, inPinned} {
				all = append(all, &way{copyBench: b, direction: direction, memory: memory, n: n, content: pattern(4099 * (len(all) + 1))})
			}
		}
	}
	return all
}

// last makes a series of a time that each sample stores.
func last(name string, d *time.Duration) measure.Also {
	return measure.Also{Series: result.Series{Name: name, Unit: result.Seconds, Better: result.Lower}, Last: func() (float64, bool) { return d.Seconds(), true }}
}

// blockedGroup measures how long the call of a copy takes.
func blockedGroup(env measure.Env, dev *cudart.Device, now clock) measure.Group {
	sizes := sizesOr(env, []int{1 << 20, 16 << 20}, []int{64 << 10, 1 << 20, 16 << 20, 256 << 20})
	b := &copyBench{workbench: workbench{dev: dev, now: now}}
	most := slices.Max(sizes)
	g := measure.Group{
		Name: fmt.Sprintf("calls on device %d", dev.Ordinal()), Need: measure.Need{Pinned: most, Pageable: most, Device: most}, Setup: setupTime(4 * most),
		Open: func(ctx context.Context) error { return b.open(ctx, most) }, Close: b.close,
	}
	for _, c := range waysOf(b, sizes) {
		var call, done time.Duration
		sample := func(ctx context.Context) (float64, error) {
			if err := c.prepare(ctx); err != nil {
				return 0, err
			}
			began := b.now()
			if err := c.queue(); err != nil {
				return 0, err
			}
			call = b.now() - began
			if err := b.stream.Synchronize(ctx); err != nil {
				return 0, err
			}
			done = b.now() - began
			return call.Seconds() / done.Seconds(), nil
		}
		g.Cases = append(g.Cases, c.caseOf(measure.Case{
			Series: result.Series{Name: blockedShare, Labels: c.labels(), Unit: result.Ratio, Better: result.Lower},
			Sample: sample, Also: []measure.Also{last(callTime, &call), last(copyTime, &done)},
		}))
	}
	return g
}

// setupTime is about how long it takes to allocate and to fill memory.
func setupTime(n int) time.Duration { return 10*time.Millisecond + time.Duration(n) }

// A hiding measures copies beside work on another stream.
type hiding struct {
	copyBench
	span *measure.Span
	work *cudart.Stream
	load load
}

func (h *hiding) open(ctx context.Context, n int) (err error) {
	if err = h.copyBench.open(ctx, n); err != nil {
		return err
	}
	if h.span, err = h.workbench.span(); err != nil {
		return err
	}
	if h.work, err = h.workbench.stream(); err != nil {
		return err
	}
	h.load, err = h.newLoad(loadFactor * n)
	return err
}

// loadFactor is how many times the bytes of a copy its load may set at a time: device
// memory is that much faster than a link.
const loadFactor = 16

// both is the time of the copy and the work at once. The work waits for the span's
// begin, and its end for the work.
func (h *hiding) both(ctx context.Context, c *way, workFirst bool) (time.Duration, error) {
	if err := h.span.Begin(h.stream); err != nil {
		return 0, err
	}
	if err := h.work.WaitPoint(h.stream.Point()); err != nil {
		return 0, err
	}
	queue := []func() error{c.queue, func() error { return h.load.queue(h.work) }}
	if workFirst {
		slices.Reverse(queue)
	}
	for _, f := range queue {
		if err := f(); err != nil {
			return 0, err
		}
	}
	if err := h.stream.WaitPoint(h.work.Point()); err != nil {
		return 0, err
	}
	return h.span.End(ctx, h.stream)
}

// hiddenGroup measures how much of a copy hides behind work.
func hiddenGroup(env measure.Env, dev *cudart.Device, now clock) measure.Group {
	sizes := sizesOr(env, []int{16 << 20}, []int{16 << 20, 64 << 20})
	h := &hiding{copyBench: copyBench{workbench: workbench{dev: dev, now: now}}}
	most := slices.Max(sizes)
	g := measure.Group{
		Name: fmt.Sprintf("copies beside work on device %d", dev.Ordinal()), Need: measure.Need{Pinned: most, Pageable: most, Device: most + min(loadFactor*most, loadBytes)}, Setup: setupTime(6 * most),
		Open: func(ctx context.Context) error { return h.open(ctx, most) }, Close: h.close,
	}
	for _, c := range waysOf(&h.copyBench, sizes) {
		for _, order := range []string{firstWork, firstCopy} {
			var alone, work, both time.Duration
			var fitted load // for a copy of this kind
			sample := func(ctx context.Context) (share float64, err error) {
				if err = c.prepare(ctx); err != nil {
					return 0, err
				}
				if alone, err = h.span.Time(ctx, h.stream, c.queue); err != nil {
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
			g.Cases = append(g.Cases, c.caseOf(measure.Case{
				Series: result.Series{Name: hiddenShare, Labels: c.labels().With(first, order), Unit: result.Ratio, Better: result.Higher},
				Budget: 100 * time.Millisecond, Sample: sample, Also: []measure.Also{last(copyAlone, &alone), last(workAlone, &work), last(togetherTime, &both)},
			}))
		}
	}
	return g
}

// staleGroup measures what a read sees that does not synchronise: verify.StaleRead,
// which allocates its own memory.
func staleGroup(dev *cudart.Device) measure.Group {
	const size = 256 << 20 // at most
	labels := append(labelsOf(dev), result.Labels{{Key: result.Memory, Value: inPinned}, {Key: result.Direction, Value: result.DeviceToHost}, {Key: result.Method, Value: "cudaMemcpyAsync"}, {Key: reader, Value: readerHost}}...)
	return measure.Group{
		Name: fmt.Sprintf("reads before synchronising on device %d", dev.Ordinal()), Need: measure.Need{Pinned: 2 * size, Device: size},
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
					return 0, fmt.Errorf("%d of %d bytes were wrong after synchronising", r.BadAfter, r.SizeBytes)
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
	workbench
	source pageable // without poison
	a, b   cudart.DevPtr
	came   pageable
	stream *cudart.Stream
}

func (o *ordering) open(ctx context.Context, n int) (err error) {
	for _, m := range []*pageable{&o.source, &o.came} {
		if *m, err = o.pageable(n); err != nil {
			return err
		}
	}
	for _, p := range []*cudart.DevPtr{&o.a, &o.b} {
		if *p, err = o.device(n); err != nil {
			return err
		}
	}
	if o.stream, err = o.workbench.stream(); err != nil {
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
func (o *ordering) old(ctx context.Context, n int, upload func(n int) error) (int, error) {
	if err := o.stream.Memset(o.a, poison, n); err != nil {
		return 0, err
	}
	if err := o.stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	if err := errors.Join(upload(n), o.stream.CopyOnDevice(o.b, o.a, n)); err != nil {
		return 0, err
	}
	if err := o.stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	if err := o.dev.CopyToHost(unsafe.Pointer(&o.came[0]), o.b, n); err != nil {
		return 0, err
	}
	count := 0
	for _, v := range o.came[:n] {
		if v == poison {
			count++
		}
	}
	return count, nil
}

// verify compares what has arrived in the end.
func (o *ordering) verify(_ context.Context, n int) error {
	if err := o.dev.CopyToHost(unsafe.Pointer(&o.came[0]), o.a, n); err != nil {
		return err
	}
	if !bytes.Equal(o.came[:n], o.source[:n]) {
		return fmt.Errorf("%w: an upload of %d bytes has not arrived", measure.ErrWrongBytes, n)
	}
	return nil
}

// uploads are the ways in which an upload is followed by work.
func (o *ordering) uploads() []upload {
	return []upload{
		{"cudaMemcpy", readerOther, func(n int) error { return o.dev.CopyToDevice(o.a, unsafe.Pointer(&o.source[0]), n) }},
		{"cudaMemcpyAsync", readerSame, func(n int) error { return o.source.CopyToDevice(o.stream, o.a, 0, n) }},
	}
}

type upload struct {
	method, reader string
	do             func(n int) error
}

const orderTries = 10 // uploads of a sample

// orderGroup measures whether work on a non-blocking stream sees an upload from pageable
// memory whose call has returned: CUDA may return when the bytes are staged.
func orderGroup(env measure.Env, dev *cudart.Device, now clock) measure.Group {
	sizes := sizesOr(env, []int{1 << 20}, []int{256 << 10, 1 << 20, 16 << 20})
	o := &ordering{workbench: workbench{dev: dev, now: now}}
	most := slices.Max(sizes)
	g := measure.Group{
		Name: fmt.Sprintf("uploads and work on device %d", dev.Ordinal()), Need: measure.Need{Pageable: 2 * most, Device: 2 * most}, Setup: setupTime(2 * most),
		Open: func(ctx context.Context) error { return o.open(ctx, most) }, Close: o.close,
	}
	for _, n := range sizes {
		for i, u := range o.uploads() {
			g.Cases = append(g.Cases, measure.Case{
				Series: result.Series{
					Name: oldShare, Unit: result.Ratio, Better: result.Lower, BytesPerSample: orderTries * n,
					Labels: append(labelsOf(dev), result.Labels{{Key: result.Memory, Value: inPageable}, {Key: result.Direction, Value: result.HostToDevice}, {Key: result.Method, Value: u.method}, {Key: reader, Value: u.reader}, {Key: result.Size, Value: strconv.Itoa(n)}}...),
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

// explainOverlap answers from the largest sizes that were measured.
func explainOverlap(_ measure.Env, b *result.Bench) []string {
	var out []string
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		for _, f := range []func(*result.Bench, string) string{explainBlocked, explainHidden} {
			if text := f(b, direction); text != "" {
				out = append(out, text)
			}
		}
	}
	if s := b.Find(oldShare, result.Label{Key: reader, Value: readerHost}); s != nil {
		if s.Max > 0 {
			out = append(out, fmt.Sprintf("A read of pinned memory before synchronising finds old bytes: %s of those looked at (median of %d), without an error from any call. Afterwards all were right.", units.Share(s.Median), len(s.Samples)))
		} else {
			out = append(out, fmt.Sprintf("In %d tries no read before synchronising was early enough to find old bytes, which does not make such reads right.", len(s.Samples)))
		}
	}
	for _, r := range []string{readerOther, readerSame} {
		out = append(out, explainOrder(b, r)...)
	}
	return out
}

func explainBlocked(b *result.Bench, direction string) string {
	text := ""
	say := func(s *result.Series) {
		call, done := also(b, s, callTime), also(b, s, copyTime)
		if call == nil || done == nil {
			return
		}
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("%s memory for %s of the copy's time (%s of %s)", s.Labels.Get(result.Memory), units.Share(s.Median), units.Seconds(call.Median), units.Seconds(done.Median))
	}
	slow := largestOf(b, blockedShare, result.Label{Key: result.Memory, Value: inPageable}, result.Label{Key: result.Direction, Value: direction})
	fast := other(b, slow, blockedShare, result.Memory, inPinned)
	if slow == nil || fast == nil {
		slow, fast = nil, largestOf(b, blockedShare, result.Label{Key: result.Direction, Value: direction})
	}
	either := cmp.Or(slow, fast)
	if either == nil {
		return ""
	}
	for _, s := range []*result.Series{slow, fast} {
		if s != nil {
			say(s)
		}
	}
	text = fmt.Sprintf("An asynchronous copy of %s %s blocks its caller: %s.", units.Bytes(sizeOf(either.Labels)), directionText(direction), text)
	if slow == nil {
		return text
	}
	const mostly = 0.5
	switch {
	case slow.Median >= mostly && fast.Median < mostly:
		text += " So only the copy of pinned memory is asynchronous here."
	case slow.Median < mostly:
		text += " So copies of pageable memory do not block here, as they are said to."
	default:
		text += " So pinned memory alone does not make a copy asynchronous here."
	}
	if s, f := also(b, slow, copyTime), also(b, fast, copyTime); s != nil && f != nil && f.Median > 0 {
		text += fmt.Sprintf(" From call to end the one of pageable memory takes %s as long.", units.Times(s.Median/f.Median))
	}
	return text
}

func explainHidden(b *result.Bench, direction string) string {
	at := largestOf(b, hiddenShare, result.Label{Key: result.Direction, Value: direction})
	if at == nil {
		return ""
	}
	text := ""
	for _, memory := range []string{inPinned, inPageable} {
		for _, order := range []string{firstWork, firstCopy} {
			s := b.Find(hiddenShare, result.Label{Key: result.Device, Value: at.Labels.Get(result.Device)}, result.Label{Key: result.Direction, Value: direction},
				result.Label{Key: result.Size, Value: at.Labels.Get(result.Size)}, result.Label{Key: result.Memory, Value: memory}, result.Label{Key: first, Value: order})
			if s == nil {
				continue
			}
			if text != "" {
				text += ", "
			}
			text += fmt.Sprintf("%s with %s memory if the %s is queued first", units.Share(s.Median), memory, order)
		}
	}
	return fmt.Sprintf("Of a copy of %s %s this much hides behind work on another stream that takes about as long: %s.", units.Bytes(sizeOf(at.Labels)), directionText(direction), text)
}

func explainOrder(b *result.Bench, r string) []string {
	var worst *result.Series
	tries := 0
	for _, s := range b.Select(result.View{Series: oldShare, Where: result.Labels{{Key: reader, Value: r}}}) {
		tries += orderTries * len(s.Samples)
		if worst == nil || s.Max > worst.Max {
			worst = s
		}
	}
	if worst == nil {
		return nil
	}
	what := fmt.Sprintf("Work on a non-blocking stream after an upload from pageable memory by %s", worst.Labels.Get(result.Method))
	if r == readerSame {
		what += " on the same stream"
	}
	if worst.Max == 0 {
		return []string{fmt.Sprintf("%s found all bytes in place, in %d tries.", what, tries)}
	}
	return []string{fmt.Sprintf("%s read old bytes: up to %s of %s. The call returns when the bytes are staged, not when they have arrived: copy on the stream that uses them, or make it wait for an event.", what, units.Share(worst.Max), units.Bytes(sizeOf(worst.Labels)))}
}
