package verify

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/transfer"
)

const (
	leadBytes  = 4096 // before a target with offset 0, which so starts a page
	guardBytes = 64   // compared on both sides of a target
	guardByte  = 0xD6

	// drainTimeout is the time after a cancellation or an error within which copies must
	// end. Else they hang, and their memory stays allocated. From then on the time is
	// bounded.QueryTimeout.
	drainTimeout = 20 * time.Second
)

// errBusy is the error while the GPU may use the memory, which must not be touched then.
var errBusy = errors.New("copies may be under way")

// A trip has the resources of the cases of one path: both ends, the memory on the devices
// between them, and streams.
type trip struct {
	*runner
	path    Path
	bytes   int              // of each memory
	copier  *transfer.Copier // of paths that use one
	fanout  *transfer.Fanout // likewise
	there   *transfer.Copier // of the other device
	gpu     gpu              // of paths with kernels
	source  *end
	sink    *end
	targets []target // uploads write the first
	streams []*cudart.Stream

	fence   fence.Fence    // of all the memory
	grace   time.Duration  // for copies that do not end
	closers lifetime.Stack // of copiers and kernels, which may have work under way
	undo    lifetime.Stack // of everything else
}

// A target is memory on a device that a copy writes to.
type target struct {
	at  string
	dev *cudart.Device
	p   cudart.DevPtr
}

// newTrip allocates for cases with up to n bytes, offsets included, on that number of
// streams. On an error everything is released.
func (r *runner) newTrip(ctx context.Context, path Path, n, streams int) (*trip, error) {
	t := &trip{runner: r, path: path, bytes: n + leadBytes + guardBytes, grace: r.grace}
	if err := t.allocate(ctx, streams); err != nil {
		return nil, errors.Join(err, t.release(ctx))
	}
	return t, nil
}

func (t *trip) allocate(ctx context.Context, streams int) (err error) {
	if err := t.malloc(atDevice, t.dev); err != nil {
		return err
	}
	if t.path.info().peer {
		if err := t.connect(ctx); err != nil {
			return err
		}
	}
	if t.path.info().hop {
		if err := t.malloc(atHop, t.dev); err != nil {
			return err
		}
	}
	for range streams {
		s, err := t.dev.NewStream(cudart.StreamOptions{})
		if err != nil {
			return err
		}
		t.streams = append(t.streams, s)
		t.onRelease("a stream", s.Close)
	}
	if t.path.info().copier {
		if t.copier, err = t.newCopier(ctx, t.dev); err != nil {
			return err
		}
	}
	if t.path.info().kernels {
		if t.gpu, err = t.load(ctx, t.dev); err != nil {
			return err
		}
		t.closers.Push(releasing("the code of kernels", t.gpu.CloseContext))
	}
	return t.openEnds(ctx)
}

// openEnds allocates host memory, if the path has some.
func (t *trip) openEnds(ctx context.Context) error {
	open := t.path.info().open
	if open == nil {
		return nil
	}
	for _, e := range []**end{&t.source, &t.sink} {
		made, err := open(ctx, t)
		if err != nil {
			return err
		}
		*e = made
		t.undo.Push(releasing(units.ExactBytes(t.bytes)+" of host memory", made.release))
	}
	return nil
}

// malloc allocates device memory, as one more target.
func (t *trip) malloc(at string, dev *cudart.Device) error {
	p, err := dev.Malloc(t.bytes)
	if err != nil {
		return err
	}
	t.targets = append(t.targets, target{at, dev, p})
	t.onRelease(units.ExactBytes(t.bytes)+" of device memory", func() error { return dev.Free(p) })
	return nil
}

const copierMemory = "the pinned memory of a copier"

func (t *trip) newCopier(ctx context.Context, dev *cudart.Device) (*transfer.Copier, error) {
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err == nil {
		t.closers.Push(releasing(copierMemory, c.CloseContext))
	}
	return c, err
}

// connect allocates the resources of paths with another device.
func (t *trip) connect(ctx context.Context) (err error) {
	peer := t.plan.Peer
	if err := t.malloc(atPeer, peer); err != nil {
		return err
	}
	if t.path == pathFanout {
		if t.fanout, err = transfer.NewFanout(ctx, []*cudart.Device{t.dev, peer}, transfer.Options{}); err != nil {
			return err
		}
		t.closers.Push(releasing(copierMemory, t.fanout.CloseContext))
		t.there, err = t.newCopier(ctx, peer)
		return err
	}
	pairs := [...][2]*cudart.Device{{t.dev, peer}, {peer, t.dev}}
	for _, pair := range pairs {
		if can, err := pair[0].CanAccessPeer(pair[1]); err != nil || !can {
			return nil // copies go through the host
		}
	}
	for _, pair := range pairs {
		if err := pair[0].EnablePeerAccess(pair[1]); err != nil {
			return err
		}
		t.onRelease("peer access", func() error { return pair[0].DisablePeerAccess(pair[1]) })
	}
	return nil
}

func (t *trip) onRelease(what string, do func() error) {
	t.undo.Push(releasing(what, func(context.Context) error { return do() }))
}

// releasing returns a function that calls do, and once more after an error: CUDA reports each
// error of other work once.
func releasing(what string, do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if do(ctx) == nil {
			return nil
		}
		if err := do(ctx); err != nil {
			return fmt.Errorf("%s stays: %w", what, err)
		}
		return nil
	}
}

// release waits for copies under way, and then releases everything, the last first. It
// goes on after an error of CUDA. While copies may be under way, also of the copier, it
// releases none of the memory.
func (t *trip) release(ctx context.Context) error {
	if err := t.drain(ctx); err != nil {
		return fmt.Errorf("release: %s stay allocated: %w", t.memory(), err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.grace)
	defer cancel()
	if err := t.closers.Run(ctx); err != nil {
		return fmt.Errorf("release: %s stay allocated: %w: %w", t.memory(), errBusy, err)
	}
	if err := t.undo.Run(ctx); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return nil
}

// memory returns the sizes of the memory for messages.
func (t *trip) memory() string {
	host := 0
	for _, e := range []*end{t.sink, t.source} {
		if e != nil {
			host += t.bytes
		}
	}
	return fmt.Sprintf("%s of host memory and %s of device memory", units.ExactBytes(host), units.ExactBytes(t.bytes*len(t.targets)))
}

// drain waits until no copy uses the memory, even after the end of ctx. Errors of the copies
// are ignored: a copy that failed has ended too. After an error of drain, which wraps
// errBusy, the memory must not be touched.
func (t *trip) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.grace)
	defer cancel()
	if err := t.fence.Wait(ctx); err != nil {
		t.grace = min(t.grace, bounded.QueryTimeout)
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

// upload and download call the ends' functions, and record the use of the stream: a call
// that failed may have queued a copy, too.
func (t *trip) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	defer t.uses(s)
	return t.source.upload(ctx, s, dst, off, n)
}

func (t *trip) download(ctx context.Context, s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	defer t.uses(s)
	return t.sink.download(ctx, s, src, off, n)
}

func (t *trip) uses(s *cudart.Stream) {
	if s != nil {
		t.fence.Add(s)
	}
}

// run does the case and returns its mismatches: one in the bytes at most, and one overrun
// for each target. After an error it has waited for the copies under way, also if ctx has
// ended.
func (t *trip) run(ctx context.Context, c Case, want content) (mismatches []Mismatch, err error) {
	switch t.path {
	case pathKernel:
		mismatches, err = t.checkedByKernel(ctx, c, want)
	case pathDeviceMemory:
		mismatches, err = t.filledByKernel(ctx, c, want)
	default:
		mismatches, err = t.roundTrip(ctx, c, want)
	}
	if err != nil {
		err = errors.Join(err, t.drain(ctx))
	}
	return mismatches, err
}

// roundTrip does a case whose bytes are copied back.
func (t *trip) roundTrip(ctx context.Context, c Case, want content) ([]Mismatch, error) {
	if err := t.poison(ctx, c, want); err != nil {
		return nil, err
	}
	if err := t.copies(ctx, c); err != nil {
		return nil, err
	}
	if err := t.synchronize(ctx); err != nil {
		return nil, err
	}
	if t.tamper != nil {
		t.tamper(c, t.returned(c))
	}
	mismatches, err := t.arrived(ctx, c, want, t.targets[0])
	if err != nil || t.path != pathFanout || len(mismatches) > 0 {
		return mismatches, err
	}
	there, received := t.targets[1], t.returned(c)
	if err := fillGuarded(ctx, want.poisonAt(atReturn), received); err != nil {
		return nil, err
	}
	if err := t.there.Download(ctx, received[guardBytes:][:c.SizeBytes], there.of(c)); err != nil {
		return nil, err
	}
	return t.arrived(ctx, c, want, there)
}

// arrived returns the mismatches of the bytes that came back from a device, and of the guards
// around all targets.
func (t *trip) arrived(ctx context.Context, c Case, want content, from target) ([]Mismatch, error) {
	mismatches, err := t.compare(ctx, c, want, from)
	if err != nil {
		return nil, err
	}
	overruns, err := t.overruns(c)
	return append(mismatches, overruns...), err
}

// compare returns the mismatch of the bytes that came back from a device.
func (t *trip) compare(ctx context.Context, c Case, want content, from target) ([]Mismatch, error) {
	sent, came := t.sent(c)[guardBytes:], t.returned(c)[guardBytes:][:c.SizeBytes]
	ok, err := equalAll(ctx, want, came)
	if ok || err != nil {
		return nil, err
	}
	d, _ := diff(came, want, []origin{
		{pageOfSource, uintptr(unsafe.Pointer(&sent[0]))},
		{pageOfDevice, uintptr(from.of(c))},
		{pageOfReturn, uintptr(unsafe.Pointer(&came[0]))},
	})
	return []Mismatch{d}, nil
}

func sourceAt(c Case) int { return leadBytes + c.Source }
func returnAt(c Case) int { return leadBytes + c.Return }

// of returns the address of the case's bytes.
func (m target) of(c Case) cudart.DevPtr { return m.p + leadBytes + cudart.DevPtr(c.Device) }

// sent and returned return the case's host memory with its guards.
func (t *trip) sent(c Case) []byte     { return guarded(t.source, sourceAt(c), c) }
func (t *trip) returned(c Case) []byte { return guarded(t.sink, returnAt(c), c) }

func guarded(e *end, at int, c Case) []byte {
	return e.mem[at-guardBytes:][:c.SizeBytes+2*guardBytes]
}

// poison fills every target with its poison and with guards around it, and the source with
// the expected bytes.
func (t *trip) poison(ctx context.Context, c Case, want content) error {
	sent := t.sent(c)
	for _, m := range t.targets {
		if err := fillGuarded(ctx, want.poisonAt(m.at), sent); err != nil {
			return err
		}
		if m.dev != t.dev {
			if err := m.dev.CopyToDevice(m.of(c)-guardBytes, unsafe.Pointer(&sent[0]), len(sent)); err != nil {
				return err
			}
			if err := m.dev.Synchronize(ctx); err != nil { // streams do not wait for it
				return err
			}
			continue
		}
		if err := t.upload(ctx, t.stream(c, 0), m.of(c)-guardBytes, sourceAt(c)-guardBytes, len(sent)); err != nil {
			return err
		}
		if err := t.synchronize(ctx); err != nil {
			return err
		}
	}
	if err := fillAll(ctx, want, sent[guardBytes:][:c.SizeBytes]); err != nil {
		return err
	}
	return fillGuarded(ctx, want.poisonAt(atReturn), t.returned(c))
}

func fillGuarded(ctx context.Context, c content, b []byte) error {
	for i := range guardBytes {
		b[i], b[len(b)-1-i] = guardByte, guardByte
	}
	return fillAll(ctx, c, b[guardBytes:len(b)-guardBytes])
}

// copies queues the copies to the device and back. Several streams have a part each; the
// parts of uploads and downloads differ, so that waits have to keep the order.
func (t *trip) copies(ctx context.Context, c Case) error {
	n, k := c.SizeBytes, max(c.Streams, 1)
	if err := t.uploads(ctx, c); err != nil {
		return err
	}
	last := t.targets[0]
	if len(t.targets) > 1 && t.path != pathFanout {
		if err := t.allBefore(t.streams[:1], k); err != nil {
			return err
		}
		for _, m := range t.targets[1:] {
			s, err := t.streams[0], error(nil)
			if m.dev == last.dev {
				err = s.CopyOnDevice(m.of(c), last.of(c), n)
			} else {
				err = s.CopyPeer(m.of(c), m.dev, last.of(c), last.dev, n)
			}
			t.uses(s)
			if err != nil {
				return err
			}
			last = m
		}
	}
	if err := t.allBefore(t.streams[:k], k); err != nil {
		return err
	}
	for i := range k {
		from, to := returnPart(n, i, k), returnPart(n, i+1, k)
		if from == to {
			continue
		}
		s := t.stream(c, (i+1)%k)
		if err := t.download(ctx, s, returnAt(c)+from, last.of(c)+cudart.DevPtr(from), to-from); err != nil {
			return err
		}
	}
	return nil
}

// uploads queues the uploads, a part on each stream.
func (t *trip) uploads(ctx context.Context, c Case) error {
	n, k := c.SizeBytes, max(c.Streams, 1)
	for i := range k {
		from, to := n*i/k, n*(i+1)/k
		if err := t.upload(ctx, t.stream(c, i), t.targets[0].of(c)+cudart.DevPtr(from), sourceAt(c)+from, to-from); err != nil {
			return err
		}
	}
	return nil
}

// returnPart returns the start of download i of k: the first part is half as long as the
// others, the last one and a half times.
func returnPart(n, i, k int) int {
	switch i {
	case 0:
		return 0
	case k:
		return n
	default:
		return n * (2*i - 1) / (2 * k)
	}
}

// allBefore makes later work on the waiting streams wait for all work on the first k streams.
func (t *trip) allBefore(waiting []*cudart.Stream, k int) error {
	if k == 1 {
		return nil
	}
	points := make([]cudart.Point, k)
	for i, s := range t.streams[:k] {
		points[i] = s.Point()
	}
	for _, s := range waiting {
		for _, p := range points {
			if err := s.WaitPoint(p); err != nil { // none for its own
				return err
			}
		}
	}
	return nil
}

// synchronize waits for all streams, and returns the error of a copy.
func (t *trip) synchronize(ctx context.Context) error {
	for _, s := range t.streams {
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
	}
	return nil
}

// overruns compares the guards around every target.
func (t *trip) overruns(c Case) (mismatches []Mismatch, err error) {
	compare := func(at string, before, after []byte) {
		if d, ok := overrun(at, before, after, c.SizeBytes); !ok {
			mismatches = append(mismatches, d)
		}
	}
	if t.sink != nil {
		received := t.returned(c)
		compare(atReturn, received[:guardBytes], received[len(received)-guardBytes:])
	}
	var before, after [guardBytes]byte
	for _, m := range t.targets {
		if err := m.dev.CopyToHost(unsafe.Pointer(&before), m.of(c)-guardBytes, guardBytes); err != nil {
			return mismatches, err
		}
		if err := m.dev.CopyToHost(unsafe.Pointer(&after), m.of(c)+cudart.DevPtr(c.SizeBytes), guardBytes); err != nil {
			return mismatches, err
		}
		compare(m.at, before[:], after[:])
	}
	return mismatches, nil
}

// overrun compares the guards around a target of n bytes.
func overrun(at string, before, after []byte, n int) (m Mismatch, ok bool) {
	guard := bytes.Repeat([]byte{guardByte}, guardBytes)
	m = Mismatch{Cause: causeOverrun, At: at}
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
		if m.BadBytes == 0 {
			m.FirstBadOffsetBytes = side.off + s.first
			shown := side.found[s.first:min(s.first+shownBytes, guardBytes)]
			m.FoundHex, m.ExpectedHex = hex.EncodeToString(shown), hex.EncodeToString(guard[:len(shown)])
		}
		m.LastBadOffsetBytes = side.off + s.last
		m.BadBytes += s.bad
		m.BadBits += s.bits
		m.Regions += s.regions.n
	}
	return m, m.BadBytes == 0
}
