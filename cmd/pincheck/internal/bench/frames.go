// The experiment frames times a step that sends a batch of frames to a device and back, in methods from
// allocating everything anew to overlapped halves. Memory that mlock and MAP_LOCKED keep resident is among them: it
// is not pinned for CUDA.
//
//   - Clock: the host's, around the whole step.
//   - round_trip: the batch's bytes in both directions, 2n, by that time.
//   - stage_time: seconds of a part of the step, such as allocating, uploading or copying on the host.

package bench

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/units"
)

// Names of the series of frames.
const (
	roundTrip = "round_trip" // bytes both ways / wall time
	stageTime = "stage_time"
)

// Values of result.Method in frames, from the slowest to the fastest.
const (
	framesAnew       = "allocated_anew"
	framesPinned     = "pinned_source"
	framesPageable   = "reused_pageable"
	framesMlock      = "reused_mlock"
	framesMapLocked  = "reused_map_locked"
	framesReused     = "reused"
	framesOverlapped = "overlapped"
)

var framesMethods = []string{framesAnew, framesPinned, framesPageable, framesMlock, framesMapLocked, framesReused, framesOverlapped}

// framesStage is the key of the parts of a step.
const framesStage = "stage"

// The parts of a step.
const (
	stageDeviceAlloc = "allocate_device"
	stageUpload      = "upload"
	stageHostAlloc   = "allocate_host"
	stageDownload    = "download"
	stageHostCopy    = "copy_on_host"
	stageRelease     = "release"
)

const (
	frameBytes  = 3 * 3840 * 2160 * 4 // three colours of float32
	batchFrames = 50
	quickFrames = 4
)

// frames sends batches of frames to the GPU and back, first as programs do that were not
// written for speed, then better and better. lock maps memory that stays resident, as mapLocked does.
func frames(now clock, lock locker) measure.Experiment {
	return measure.Experiment{
		Name:     "frames",
		Group:    "Applications:",
		Question: "How fast does a batch of frames get to the GPU and back?",
		Long: `Measures batches of frames in new and in reused memory, pageable, mlocked and
pinned, with both directions one after the other and overlapped.`,
		Related: "pincheck bench bandwidth",
		Views: []result.View{
			{Title: "Bytes both ways by wall time", Series: roundTrip, X: result.Method, Lines: []string{result.Device, result.Size}},
			{Title: "Where the time of a step goes", Series: stageTime, X: framesStage, Lines: []string{result.Device, result.Size, result.Method}},
		},
		Plan: onDevices(func(env measure.Env) ([]measure.Group, error) {
			var groups []measure.Group
			for _, dev := range env.Devices {
				for _, n := range batches(env, dev) {
					groups = append(groups, framesGroups(env, dev, n, now, lock)...)
				}
			}
			return groups, nil
		}),
		Explain: explainFrames,
	}
}

// frameOf returns the bytes of a frame.
func frameOf(env measure.Env) int { return cmp.Or(env.Frames.Bytes, frameBytes) }

// batches returns the bytes of the batches: those that were asked for, in whole frames if
// they hold one, or as many frames as half of the memory has room for; less on a simulated
// device.
func batches(env measure.Env, dev *cudart.Device) []int {
	frame := frameOf(env)
	if env.Frames.Batch > 0 {
		return []int{env.Frames.Batch * frame}
	}
	if len(env.Sizes) > 0 {
		sizes := slices.Sorted(slices.Values(env.Sizes))
		for i, n := range sizes {
			if n > frame {
				sizes[i] = n / frame * frame
			}
		}
		return slices.Compact(sizes)
	}
	if isSimulated(env) {
		return []int{cmp.Or(env.Frames.Bytes, maxSimulated)}
	}
	count := batchFrames
	if env.Quick {
		count = quickFrames
	}
	if available, ok := hostmem.Available(); ok {
		count = min(count, available/2/(2*frame))
	}
	if free, _, err := dev.MemInfo(); err == nil {
		count = min(count, free/2/frame)
	}
	return []int{max(count, 1) * frame}
}

// A trip takes a batch to the GPU and back in one of the methods.
type trip struct {
	resources
	method string
	n      int
	lock   locker
	up     *cudart.Stream
	spent  map[string]time.Duration // in each part of the last step

	source, returned hostkind.Memory // returned is nil if it is allocated anew
	mem              cudart.DevPtr

	// allocated anew: the batch as it came back last, and what releases it
	current hostkind.Direct
	release func() error
	// overlapped: the stream of the other direction
	down *cudart.Stream
}

// stages returns the parts of a step.
func (t *trip) stages() []string {
	switch t.method {
	case framesAnew:
		return []string{stageDeviceAlloc, stageUpload, stageHostAlloc, stageDownload, stageRelease}
	case framesPinned:
		return []string{stageDeviceAlloc, stageUpload, stageHostAlloc, stageDownload, stageHostCopy, stageRelease}
	case framesOverlapped:
		return nil // they are not apart
	}
	return []string{stageUpload, stageDownload}
}

// reuses reports whether all memory is allocated once.
func (t *trip) reuses() bool { return t.method != framesAnew && t.method != framesPinned }

// kind returns the kind of the memory at both ends, or of the source alone if the other end is allocated anew.
func (t *trip) kind() hostKind {
	locked := func(way string) hostKind {
		return hostKind{name: t.method, open: func(_ context.Context, w *resources, n int) (hostkind.Memory, error) {
			b, unmap, err := t.lock(n, way)
			if err != nil {
				return nil, err
			}
			w.undo.PushClose(unmap)
			return hostkind.Direct(b), nil
		}}
	}
	switch t.method {
	case framesAnew, framesPageable:
		return unpinnedAsync
	case framesMlock:
		return locked(byMlock)
	case framesMapLocked:
		return locked(byMapLocked)
	}
	return registered
}

func (t *trip) footprint() measure.Footprint {
	ends := measure.Footprint{Device: t.n}
	for _, pinned := range []bool{t.kind().pinned, t.kind().pinned && t.reuses()} {
		if pinned {
			ends.Pinned += t.n
		} else {
			ends.Pageable += t.n
		}
	}
	return ends
}

// node returns the NUMA node of the pinned memory.
func (t *trip) node() (int, bool) {
	memory := [][]byte{t.source.Bytes()}
	if t.returned != nil {
		memory = append(memory, t.returned.Bytes())
	}
	return nodeOfMemory(t.dev, memory...)
}

func (t *trip) open(ctx context.Context) error {
	t.undo.PushClose(t.releaseAnew)
	kind := t.kind()
	host := func() (hostkind.Memory, error) { return kind.open(ctx, &t.resources, t.n) }
	err := inTurn(
		made(host, &t.source),
		func() error { return uploaded.fill(ctx, t.source.Bytes()) },
		made(t.stream, &t.up, &t.down),
	)
	if err != nil || !t.reuses() {
		return err
	}
	return inTurn(
		t.allocated(t.n, &t.mem),
		made(host, &t.returned),
		func() error { return t.up.Memset(t.mem, poison, t.n) },
		func() error { return t.up.Synchronize(ctx) },
	)
}

// releaseAnew releases what a step allocated, if it was interrupted.
func (t *trip) releaseAnew() error {
	err := t.releaseHost()
	if err == nil && t.mem != 0 && !t.reuses() {
		err = t.releaseDevice()
	}
	return err
}

func (t *trip) releaseHost() error {
	if t.release == nil {
		return nil
	}
	err := t.release()
	if err == nil {
		t.current, t.release = nil, nil
	}
	return err
}

func (t *trip) releaseDevice() error {
	err := t.dev.Free(t.mem)
	if err == nil {
		t.mem = 0
	}
	return err
}

// part returns a function that does a part of the step, and counts its time.
func (t *trip) part(stage string, do func() error) func() error {
	return func() error {
		began := t.now()
		err := do()
		t.spent[stage] += t.now() - began
		return err
	}
}

// copy copies the batch and waits for it.
func (t *trip) copy(ctx context.Context, direction string, m hostkind.Memory) error {
	err := pieces(ctx, t.n, func(off, n int) error {
		return copyMemory(ctx, direction, m, t.up, t.mem+cudart.DevPtr(off), off, n)
	})
	if err != nil {
		return err
	}
	return t.up.Synchronize(ctx)
}

func (t *trip) step(ctx context.Context) error {
	t.spent = make(map[string]time.Duration)
	switch {
	case t.method == framesOverlapped:
		return t.overlapped(ctx)
	case t.reuses():
		return inTurn(
			t.part(stageUpload, func() error { return t.copy(ctx, result.HostToDevice, t.source) }),
			t.part(stageDownload, func() error { return t.copy(ctx, result.DeviceToHost, t.returned) }),
		)
	}
	return t.anew(ctx)
}

// anew allocates what it needs, as `x.cuda()` and `x.cpu()` do. The batch that came back
// is the next one to go, or is copied to the pinned source.
func (t *trip) anew(ctx context.Context) error {
	source := t.source
	if t.current != nil {
		source = t.current
	}
	err := inTurn(
		t.part(stageDeviceAlloc, func() (err error) { t.mem, err = t.dev.Malloc(t.n); return err }),
		t.part(stageUpload, func() error { return t.copy(ctx, result.HostToDevice, source) }),
		t.part(stageRelease, t.releaseHost),
		t.part(stageHostAlloc, func() (err error) {
			var b []byte
			b, t.release, err = hostos.Map(t.n, 0)
			t.current = b
			return err
		}),
		t.part(stageDownload, func() error { return t.copy(ctx, result.DeviceToHost, t.current) }),
		t.part(stageRelease, t.releaseDevice),
	)
	if err != nil || t.method != framesPinned {
		return err
	}
	return inTurn(
		t.part(stageHostCopy, func() error {
			return pieces(ctx, t.n, func(off, n int) error { copy(t.source.Bytes()[off:off+n], t.current[off:]); return nil })
		}),
		t.part(stageRelease, t.releaseHost),
	)
}

// overlapped sends one half while the other comes back, and then the other way round.
// The half that comes back first was sent in the step before.
func (t *trip) overlapped(ctx context.Context) error {
	half := t.n / 2
	send := func(off, n int) error { return t.source.CopyToDevice(ctx, t.up, t.mem+cudart.DevPtr(off), off, n) }
	fetch := func(off, n int) error {
		return t.returned.CopyFromDevice(ctx, t.down, t.mem+cudart.DevPtr(off), off, n)
	}
	var sent, fetched cudart.Point
	return inTurn(
		func() error { return fetch(half, t.n-half) },
		func() error { return send(0, half) },
		func() error { fetched, sent = t.down.Point(), t.up.Point(); return t.up.WaitPoint(fetched) },
		func() error { return t.down.WaitPoint(sent) },
		func() error { return send(half, t.n-half) },
		func() error { return fetch(0, half) },
		func() error { return t.up.Synchronize(ctx) },
		func() error { return t.down.Synchronize(ctx) },
	)
}

// verify compares the batch as it came back last.
func (t *trip) verify(ctx context.Context) error {
	returned := t.source // of framesPinned
	switch {
	case t.reuses():
		returned = t.returned
	case t.method == framesAnew:
		returned = t.current
	}
	return uploaded.compare(ctx, returned.Bytes(), 0)
}

// framesGroups are the methods on a batch of n bytes: a group each, because each has
// memory of its own.
func framesGroups(env measure.Env, dev *cudart.Device, n int, now clock, lock locker) (groups []measure.Group) {
	// About what a step takes, at the few GB/s of new memory, or else of the link.
	slow, fast := time.Duration(2*n/3), time.Duration(2*n/20)
	for _, method := range framesMethods {
		t := &trip{resources: resources{dev: dev, now: now}, method: method, n: n, lock: lock}
		if method == framesOverlapped && n < 2 {
			continue // there are no halves
		}
		labels := labelsOf(dev, result.Method, method, result.Size, strconv.Itoa(n))
		step := slow
		if t.reuses() && t.kind().pinned {
			step = fast
		}
		c := measure.Case{
			Series: result.Series{Name: roundTrip, Labels: labels, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: 2 * n},
			WarmUp: 1, MinSamples: 2, Samples: 10, Budget: max(2*step, 50*time.Millisecond),
			Sample: func(ctx context.Context) (float64, error) {
				began := t.now()
				if err := t.step(ctx); err != nil {
					return 0, err
				}
				return float64(2*n) / float64((t.now() - began).Nanoseconds()), nil
			},
			Verify: t.verify,
		}
		if t.kind().pinned {
			c.Node = t.node
		}
		if repeats := env.Frames.Repeats; repeats > 0 {
			c.MinSamples, c.Samples, c.Budget = repeats, repeats, time.Duration(repeats)*step
		}
		if env.Frames.WarmUp != nil {
			c.WarmUp = *env.Frames.WarmUp
		}
		for _, stage := range t.stages() {
			c.Also = append(c.Also, measure.Also{
				Series: result.Series{Name: stageTime, Labels: labels.With(framesStage, stage), Unit: result.Seconds, Better: result.Lower, BytesPerSample: 2 * n},
				Last:   func() (float64, bool) { return t.spent[stage].Seconds(), true },
			})
		}
		groups = append(groups, measure.Group{
			Name:      fmt.Sprintf("%s, %s, on device %d", batchText(n, frameOf(env)), strings.ReplaceAll(method, "_", " "), dev.Ordinal()),
			Footprint: t.footprint(), Setup: setupTime(n) + time.Duration(c.WarmUp)*step, Open: t.open, Close: t.close, Cases: []measure.Case{c},
		})
	}
	return groups
}

// batchText describes a batch of n bytes: 50 frames (4.98 GB).
func batchText(n, frame int) string {
	switch {
	case n == frame:
		return fmt.Sprintf("1 frame (%s)", units.Data(n))
	case n%frame == 0:
		return fmt.Sprintf("%s (%s)", units.Things(n/frame, "frame", "frames"), units.Data(n))
	}
	return units.Bytes(n)
}

// framesNames are the methods with their names in a table.
var framesNames = []struct{ method, name string }{
	{framesAnew, "new"}, {framesPinned, "pinned source"}, {framesPageable, "reused pageable"}, {framesMlock, "mlock"},
	{framesMapLocked, "MAP_LOCKED"}, {framesReused, "reused pinned"}, {framesOverlapped, "overlapped"},
}

func explainFrames(env measure.Env, b *result.Bench) ([]string, []result.Table) {
	of := func(a *answers, method string) *result.Series { return a.largest(roundTrip, result.Method, method) }
	return explained(b, func(a *answers) *result.Series { return of(a, framesReused) }, func(a *answers) {
		a.faster("%s are %s as fast as %s.", named{"reused pinned buffers", of(a, framesReused)}, named{"new pageable buffers", of(a, framesAnew)})
	}, func(a *answers) {
		var cells []named
		at := a.largest(roundTrip)
		for _, n := range framesNames {
			cells = append(cells, named{n.name, a.other(at, roundTrip, result.Method, n.method)})
		}
		if at == nil {
			return
		}
		a.row("both ways, "+batchText(at.Labels.Size(), frameOf(env)), cells...)
		if s := of(a, framesAnew); s != nil {
			if down, up := a.stageShare(s, stageDownload), a.stageShare(s, stageUpload); down > 0 && up > 0 {
				a.say("With new buffers %s of the time is the download, whose target has no pages yet, and %s the upload.", units.Share(down), units.Share(up))
			}
		}
		if s := of(a, framesPinned); s != nil {
			if down, copied := a.stageShare(s, stageDownload), a.stageShare(s, stageHostCopy); down > 0 && copied > 0 {
				a.say("With a pinned source alone, the download to new pageable memory takes %s of the time and the copy from there %s.", units.Share(down), units.Share(copied))
			}
		}
		if of(a, framesMlock) != nil || of(a, framesMapLocked) != nil {
			a.say("Memory that mlock or MAP_LOCKED keeps resident is not pinned for CUDA, which stages its copies.")
		}
		a.faster("%s are %s as fast as %s.", named{"copies both ways at once", of(a, framesOverlapped)}, named{"one way after the other", of(a, framesReused)})
	})
}

// stageShare returns the share of a part of a step in the time of all parts.
func (a *answers) stageShare(s *result.Series, stage string) float64 {
	var part, all float64
	for _, p := range a.Select(result.View{Series: stageTime, Where: s.Labels}) {
		all += p.Median
		if p.Labels.Get(framesStage) == stage {
			part = p.Median
		}
	}
	return part / max(all, 1e-9)
}
