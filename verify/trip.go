package verify

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/kernel"
	"github.com/gopinned/pinned/transfer"
)

const (
	leadBytes  = 4096 // before a target with offset 0, which so starts a page
	guardBytes = 64   // watched on both sides of a target
	guardByte  = 0xD6

	// A copy that does not end in this time after a cancellation or an error is
	// taken to hang, and the memory that it uses stays allocated.
	drainTimeout = 20 * time.Second
	// After that, and for releasing, no more time is given than this.
	lookTimeout = 100 * time.Millisecond
)

// errBusy says that the GPU may be using memory, which must not be touched then.
var errBusy = errors.New("copies may be under way")

// trip holds what the cases of one path use: both ends, the memory on the
// device between them, and streams.
type trip struct {
	dev     *cudart.Device
	path    Path
	bytes   int              // of each memory
	copier  *transfer.Copier // of paths that use one
	gpu     gpu              // likewise
	source  end
	back    end
	device  cudart.DevPtr
	via     []target // other memory on devices that is written, in order
	peers   *peers   // of paths with another device
	streams []*cudart.Stream
	events  []*cudart.Event

	fence    fence.Fence   // of all the memory
	patience time.Duration // with copies that do not end

	// tamper lets a test spoil what came back before it is compared, and found what a kernel
	// found.
	tamper func(c Case, came []byte)
	found  func(c Case, at string, f kernel.Found) kernel.Found
}

// newTrip allocates for cases with up to n bytes, offsets included, on so many
// streams. Peer is the other device of paths with one. On an error everything is released.
func newTrip(ctx context.Context, dev, peer *cudart.Device, path Path, n, streams int) (t *trip, err error) {
	t = &trip{dev: dev, path: path, bytes: n + leadBytes + guardBytes, patience: drainTimeout}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.release(ctx))
			t = nil
		}
	}()
	if t.device, err = dev.Malloc(t.bytes); err != nil {
		return t, err
	}
	if path.peers() {
		if t.peers, err = newPeers(ctx, t, peer); err != nil {
			return t, err
		}
	}
	if path == PathHop || path == PathPeer {
		p, err := dev.Malloc(t.bytes)
		if err != nil {
			return t, err
		}
		t.via = append(t.via, target{AtHop, dev, p})
	}
	for range streams {
		s, err := dev.NewStream(cudart.StreamOptions{})
		if err != nil {
			return t, err
		}
		t.streams = append(t.streams, s)
		e, err := dev.NewEvent(cudart.EventOptions{})
		if err != nil {
			return t, err
		}
		t.events = append(t.events, e)
	}
	if path.copier() {
		if t.copier, err = transfer.NewCopier(ctx, dev, transfer.Options{}); err != nil {
			return t, err
		}
	}
	if path == PathDeviceMemory {
		return t, nil
	}
	if t.source, err = newEnd(ctx, dev, t.copier, path, t.bytes); err != nil {
		return t, err
	}
	if t.back, err = newEnd(ctx, dev, t.copier, path, t.bytes); err != nil {
		return t, err
	}
	if path == PathFanout {
		t.source = fanned{t.source, t}
	}
	return t, nil
}

// A releaseStep releases something. do may be called again after an error.
type releaseStep struct {
	what string
	do   func() error
}

// run tries twice. What cannot be released then stays.
func (s releaseStep) run() error {
	if s.do() == nil {
		return nil
	}
	if err := s.do(); err != nil {
		return fmt.Errorf("%s stays: %w", s.what, err)
	}
	return nil
}

// release waits for copies under way, and then releases everything. It goes on
// after an error of CUDA. If copies may still be under way, also those of the
// copier, everything stays that they may be using.
func (t *trip) release(ctx context.Context) error {
	if err := t.drain(ctx); err != nil {
		return fmt.Errorf("release: %s stay allocated: %w", t.memory(), err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.patience)
	defer cancel()
	for _, c := range t.closers() {
		closing := releaseStep{c.what, func() error { return c.CloseContext(ctx) }}
		if err := closing.run(); err != nil {
			return fmt.Errorf("release: %s stay allocated: %w: %w", t.memory(), errBusy, err)
		}
	}
	var errs []error
	for _, step := range t.releaseSteps(ctx) {
		errs = append(errs, step.run())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return nil
}

func (t *trip) releaseSteps(ctx context.Context) (steps []releaseStep) {
	for _, e := range []end{t.back, t.source} {
		if e != nil {
			steps = append(steps, releaseStep{units.ExactBytes(t.bytes) + " of host memory", func() error { return e.release(ctx) }})
		}
	}
	for _, e := range t.events {
		steps = append(steps, releaseStep{"an event", e.Close})
	}
	for _, s := range t.streams {
		steps = append(steps, releaseStep{"a stream", s.Close})
	}
	for _, m := range slices.Backward(t.targets()) {
		steps = append(steps, releaseStep{units.ExactBytes(t.bytes) + " of device memory", func() error { return m.dev.Free(m.p) }})
	}
	if t.peers != nil {
		steps = append(steps, t.peers.disable...)
	}
	return steps
}

// A closer is a Copier, a Fanout or the code of kernels.
type closer struct {
	what string
	contextCloser
}

type contextCloser interface {
	CloseContext(ctx context.Context) error
}

func (t *trip) closers() (list []closer) {
	const copier = "the pinned memory of a copier"
	if t.gpu != nil {
		list = append(list, closer{"the code of kernels", t.gpu})
	}
	if t.copier != nil {
		list = append(list, closer{copier, t.copier})
	}
	if t.peers != nil && t.peers.fanout != nil {
		list = append(list, closer{copier, t.peers.fanout})
	}
	if t.peers != nil && t.peers.copier != nil {
		list = append(list, closer{copier, t.peers.copier})
	}
	return list
}

// memory names what release would release.
func (t *trip) memory() string {
	host := 0
	for _, e := range []end{t.back, t.source} {
		if e != nil {
			host += t.bytes
		}
	}
	return fmt.Sprintf("%s of host memory and %s of device memory", units.ExactBytes(host), units.ExactBytes(t.bytes*len(t.targets())))
}

// drain waits until no copy uses the memory, even when ctx has ended. What the
// copies report does not matter here: one that failed has ended too. After an
// error, errBusy among others, the memory must not be touched.
func (t *trip) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.patience)
	defer cancel()
	if err := t.fence.Wait(ctx); err != nil {
		t.patience = min(t.patience, lookTimeout)
		return fmt.Errorf("%w: %w", errBusy, err)
	}
	return nil
}

// stream returns the case's stream i, nil for a case that uses none.
func (t *trip) stream(c Case, i int) *cudart.Stream {
	if c.Streams == 0 {
		return nil
	}
	return t.streams[i]
}

// upload and download are those of the ends. Also a call that failed may have
// queued something.
func (t *trip) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	defer t.uses(s)
	return t.source.upload(ctx, s, dst, off, n)
}

func (t *trip) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	defer t.uses(s)
	return t.back.download(ctx, s, off, src, n)
}

func (t *trip) uses(s *cudart.Stream) {
	if s != nil {
		t.fence.Add(s)
	}
}

// run does the case and returns what is wrong, which is at most one difference
// in the bytes themselves and one overrun a target.
func (t *trip) run(ctx context.Context, c Case, want content) ([]Difference, error) {
	switch t.path {
	case PathKernel:
		return t.runKernel(ctx, c, want)
	case PathDeviceMemory:
		return t.runDeviceMemory(ctx, c, want)
	}
	if err := t.poison(ctx, c, want); err != nil {
		return nil, err
	}
	if err := t.copies(ctx, c); err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	if err := t.synchronize(ctx); err != nil {
		return nil, err
	}
	if t.tamper != nil {
		t.tamper(c, t.back.memory()[t.backAt(c)-guardBytes:][:c.SizeBytes+2*guardBytes])
	}
	wrong, err := t.compare(ctx, c, want, t.device)
	if err != nil {
		return nil, err
	}
	overruns, err := t.overruns(c)
	if wrong = append(wrong, overruns...); err != nil || t.path != PathFanout || len(wrong) > 0 {
		return wrong, err
	}
	return t.fromPeer(ctx, c, want)
}

// compare returns what is wrong with the bytes that came back, of memory on a device.
func (t *trip) compare(ctx context.Context, c Case, want content, device cudart.DevPtr) ([]Difference, error) {
	came := t.back.memory()[t.backAt(c):][:c.SizeBytes]
	ok, err := equalAll(ctx, want, came)
	if ok || err != nil {
		return nil, err
	}
	d, _ := diff(came, want, []origin{
		{PageOfSource, t.addr(t.source, t.sourceAt(c))},
		{PageOfDevice, uintptr(device) + uintptr(t.deviceAt(c))},
		{PageOfReturn, t.addr(t.back, t.backAt(c))},
	})
	return []Difference{d}, nil
}

// target is memory on a device that a copy writes to.
type target struct {
	at  string
	dev *cudart.Device
	p   cudart.DevPtr
}

func (t *trip) targets() []target {
	if t.device == 0 {
		return nil
	}
	return append([]target{{AtDevice, t.dev, t.device}}, t.via...)
}

func (t *trip) sourceAt(c Case) int { return leadBytes + c.Source }
func (t *trip) deviceAt(c Case) int { return leadBytes + c.Device }
func (t *trip) backAt(c Case) int   { return leadBytes + c.Return }

func (t *trip) addr(e end, off int) uintptr {
	return uintptr(unsafe.Pointer(&e.memory()[off]))
}

// poison fills every target with bytes that are nowhere the expected ones, with
// guards around, and the source with the expected ones.
func (t *trip) poison(ctx context.Context, c Case, want content) error {
	source, back := t.sourceAt(c), t.backAt(c)
	sent := t.source.memory()[source-guardBytes:][:c.SizeBytes+2*guardBytes]
	for _, target := range t.targets() {
		if err := fillGuarded(ctx, want.poisonAt(target.at), sent); err != nil {
			return err
		}
		p := target.p + cudart.DevPtr(t.deviceAt(c)-guardBytes)
		if target.dev != t.dev {
			if err := target.dev.CopyToDevice(p, unsafe.Pointer(&sent[0]), len(sent)); err != nil {
				return err
			}
			if err := target.dev.Synchronize(ctx); err != nil { // streams do not wait for it
				return err
			}
			continue
		}
		if err := t.upload(ctx, t.stream(c, 0), p, source-guardBytes, len(sent)); err != nil {
			return errors.Join(err, t.drain(ctx))
		}
		if err := t.synchronize(ctx); err != nil {
			return err
		}
	}
	if err := fillAll(ctx, want, sent[guardBytes:][:c.SizeBytes]); err != nil {
		return err
	}
	return fillGuarded(ctx, want.poisonAt(AtReturn), t.back.memory()[back-guardBytes:][:len(sent)])
}

func fillGuarded(ctx context.Context, c content, b []byte) error {
	for i := range guardBytes {
		b[i], b[len(b)-1-i] = guardByte, guardByte
	}
	return fillAll(ctx, c, b[guardBytes:len(b)-guardBytes])
}

// copies queues the way to the device and back. With several streams each
// takes a part, and the parts of the way back differ from those of the way
// there, so that events have to keep the order.
func (t *trip) copies(ctx context.Context, c Case) error {
	n, k := c.SizeBytes, max(c.Streams, 1)
	device := t.device + cudart.DevPtr(t.deviceAt(c))
	if err := t.uploads(ctx, c); err != nil {
		return err
	}
	if len(t.via) > 0 && t.path != PathFanout {
		if err := t.allBefore(t.streams[:1], k); err != nil {
			return err
		}
		from := t.dev
		for _, m := range t.via {
			to := m.p + cudart.DevPtr(t.deviceAt(c))
			err := copyOn(t.streams[0], to, m.dev, device, from, n)
			t.uses(t.streams[0])
			if err != nil {
				return err
			}
			device, from = to, m.dev
		}
	}
	if err := t.allBefore(t.streams[:k], k); err != nil {
		return err
	}
	for i := range k {
		from, to := backPart(n, i, k), backPart(n, i+1, k)
		if from == to {
			continue
		}
		s := t.stream(c, (i+1)%k)
		if err := t.download(ctx, s, t.backAt(c)+from, device+cudart.DevPtr(from), to-from); err != nil {
			return err
		}
	}
	return nil
}

// uploads queues the way to the device, a part on each stream.
func (t *trip) uploads(ctx context.Context, c Case) error {
	n, k := c.SizeBytes, max(c.Streams, 1)
	device := t.device + cudart.DevPtr(t.deviceAt(c))
	for i := range k {
		from, to := n*i/k, n*(i+1)/k
		if err := t.upload(ctx, t.stream(c, i), device+cudart.DevPtr(from), t.sourceAt(c)+from, to-from); err != nil {
			return err
		}
	}
	return nil
}

// backPart is where part i of k of the way back starts: the first part is half
// as long as the others, the last one and a half times.
func backPart(n, i, k int) int {
	switch i {
	case 0:
		return 0
	case k:
		return n
	default:
		return n * (2*i - 1) / (2 * k)
	}
}

// allBefore makes what is queued on waiting later wait for all that the first
// k streams have queued so far.
func (t *trip) allBefore(waiting []*cudart.Stream, k int) error {
	if k == 1 {
		return nil
	}
	for i, s := range t.streams[:k] {
		if err := s.Record(t.events[i]); err != nil {
			return err
		}
	}
	for i, s := range waiting {
		for j, e := range t.events[:k] {
			if i == j {
				continue
			}
			if err := s.WaitEvent(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// synchronize waits for all streams, and returns the error of a copy. When ctx
// ends it still waits for the copies under way, which memory depends on.
func (t *trip) synchronize(ctx context.Context) error {
	for _, s := range t.streams {
		if err := s.Synchronize(ctx); err != nil {
			return errors.Join(err, t.drain(ctx))
		}
	}
	return nil
}

// overruns looks at the guards around every target.
func (t *trip) overruns(c Case) ([]Difference, error) {
	var wrong []Difference
	look := func(at string, before, after []byte) {
		if d, ok := overrun(at, before, after, c.SizeBytes); !ok {
			wrong = append(wrong, d)
		}
	}
	if t.back != nil {
		back := t.back.memory()[t.backAt(c)-guardBytes:][:c.SizeBytes+2*guardBytes]
		look(AtReturn, back[:guardBytes], back[len(back)-guardBytes:])
	}

	var before, after [guardBytes]byte
	for _, target := range t.targets() {
		p := target.p + cudart.DevPtr(t.deviceAt(c))
		if err := target.dev.CopyToHost(unsafe.Pointer(&before), p-guardBytes, guardBytes); err != nil {
			return wrong, err
		}
		if err := target.dev.CopyToHost(unsafe.Pointer(&after), p+cudart.DevPtr(c.SizeBytes), guardBytes); err != nil {
			return wrong, err
		}
		look(target.at, before[:], after[:])
	}
	return wrong, nil
}

// overrun compares the guards around a target of n bytes.
func overrun(at string, before, after []byte, n int) (d Difference, ok bool) {
	guard := bytes.Repeat([]byte{guardByte}, guardBytes)
	d = Difference{Cause: CauseOverrun, At: at}
	for _, side := range []struct {
		found []byte
		off   int
	}{{before, -guardBytes}, {after, n}} {
		if bytes.Equal(side.found, guard) {
			continue
		}
		s := scan{size: guardBytes}
		s.block(side.found, guard, 0)
		s.endRegion()
		if d.BadBytes == 0 {
			d.FirstBadOffsetBytes = side.off + s.first
			d.Found = append(Hex(nil), side.found[s.first:min(s.first+shownBytes, guardBytes)]...)
			d.Expected = append(Hex(nil), guard[:len(d.Found)]...)
		}
		d.LastBadOffsetBytes = side.off + s.last
		d.BadBytes += s.bad
		d.BadBits += s.bits
		d.Regions += s.regions.n
	}
	return d, d.BadBytes == 0
}
