package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A Fanout copies one source onto several devices, and reads it once. Its copies
// are the methods of [FanoutView].
//
// Devices that can access each other's memory share the work: each of them gets
// every so many chunks over its own link, and passes them on to the others
// (cudaMemcpyPeerAsync, over NVLink or PCI Express). So two devices get the whole
// source in half the time that one takes. Where there is no peer access, each
// chunk goes to all devices from the same pinned memory, each over its own link,
// in the time that one device takes.
type Fanout struct{ FanoutView }

// A FanoutView has the methods of a [Fanout] that copy. All views of a Fanout share
// its devices and its Stats, and end with its Close.
//
// For all these methods: dsts are addresses, one for each device in the order of
// NewFanout, with room for all the bytes. They must not overlap. A copy is complete
// when its method returns: all bytes are on all devices. After an error the bytes
// before the count that is returned are there; those after may be on some of them.
// The error names the device that failed, and no device copies any more, unless the
// error wraps [ErrUnderWay]. ctx must not be nil, nor a reader, and
// sizes are bytes, 0 or more. Copies of nothing succeed at once. The other errors
// are those of ctx, of the reader, of CUDA, and [ErrClosed].
type FanoutView struct {
	*fan
	call Call
}

// A fan is what a Fanout and its views share.
type fan struct {
	o       Options
	devs    []*cudart.Device
	members []*engine      // one for each device
	stages  []*stage.Stage // of the members
	// groups are members that can access each other. Each chunk goes over the link
	// of one of each group.
	groups [][]int
	peers  []peer // ordered pairs of a group
	// queueing counts the goroutines that queue copies between members. A call into CUDA
	// may keep one long after its copy was given up.
	queueing lifetime.Lifetime
	stats    counters
	life     lifetime.Lifetime
}

// A peer is a member's access to another one's memory.
type peer struct {
	from, to int
	stream   *cudart.Stream // of from, for copies to the other one
}

// NewFanout returns a Fanout for devices of one CUDA library, each of them once. It
// uses the rings that the Copiers of these devices share, and allocates those that
// are missing, 39 MiB a device at most. It enables peer access in both directions
// between those that can have it (cudaDeviceEnablePeerAccess); access that other
// code of the process has enabled is used, and left enabled. When ctx ends before,
// the error is ctx's. After an error nothing is left, unless the error says that it
// could not be released.
//
// Options.Workers is for all devices together.
func NewFanout(ctx context.Context, devs []*cudart.Device, o Options) (*Fanout, error) {
	f, err := newFan(ctx, devs, o)
	if err != nil {
		return nil, fmt.Errorf("transfer: new fanout on %d devices: %w", len(devs), err)
	}
	return &Fanout{FanoutView{fan: f}}, nil
}

func newFan(ctx context.Context, devs []*cudart.Device, o Options) (*fan, error) {
	if ctx == nil {
		return nil, errNilContext
	}
	if err := checkDevices(devs); err != nil {
		return nil, err
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	f := &fan{o: o, devs: slices.Clone(devs)}
	if err := opened(ctx, f); err != nil {
		return nil, err
	}
	return f, nil
}

// opened opens what a Copier or a Fanout shares with its views. When ctx has ended it
// leaves calls that do not return, and what they make is released. After an error nothing
// is left otherwise.
func opened(ctx context.Context, of interface {
	open(context.Context) error
	release(context.Context) error
}) error {
	if ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	_, err := bounded.Do(ctx, bounded.Call[struct{}]{
		Run: func() (none struct{}, err error) {
			if err = of.open(ctx); err != nil {
				err = errors.Join(err, lifetime.Undo(ctx, of.release))
			}
			return none, err
		},
		Late: func(_ struct{}, err error) {
			if err == nil {
				_ = lifetime.Undo(ctx, of.release)
			}
		},
	})
	return err
}

func checkDevices(devs []*cudart.Device) error {
	if len(devs) == 0 {
		return errors.New("no devices")
	}
	for i, d := range devs {
		switch {
		case d == nil:
			return fmt.Errorf("device %d of %d: %w", i, len(devs), errNilDevice)
		case d.Runtime() != devs[0].Runtime():
			return fmt.Errorf("%v and %v are of different CUDA libraries: open them with one cudart.Open", devs[0], d)
		case slices.Contains(devs[:i], d):
			return fmt.Errorf("%v is there twice", d)
		}
	}
	return nil
}

func (f *fan) open(ctx context.Context) error {
	for _, dev := range f.devs {
		e := &engine{dev: dev, o: f.o}
		if err := e.open(ctx); err != nil {
			return fmt.Errorf("%v: %w", dev, errors.Join(err, lifetime.Undo(ctx, e.release)))
		}
		f.members, f.stages = append(f.members, e), append(f.stages, e.stage)
	}
	for i := range f.devs {
		if err := f.join(i); err != nil {
			return err
		}
	}
	for i := range f.peers {
		p := &f.peers[i]
		var err error
		if p.stream, err = f.devs[p.from].NewStream(cudart.StreamOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// join adds a member to the first group that it can access, or makes one.
func (f *fan) join(i int) error {
	for g, group := range f.groups {
		ok, err := f.connect(i, group)
		if err != nil {
			return err
		}
		if ok {
			f.groups[g] = append(group, i)
			return nil
		}
	}
	f.groups = append(f.groups, []int{i})
	return nil
}

// connect enables access between a member and all of a group, both ways, or none.
func (f *fan) connect(i int, group []int) (bool, error) {
	for _, j := range group {
		for _, p := range [...]peer{{from: i, to: j}, {from: j, to: i}} {
			can, err := f.devs[p.from].CanAccessPeer(f.devs[p.to])
			if err != nil || !can {
				return false, err
			}
		}
	}
	before := len(f.peers)
	for _, j := range group {
		for _, p := range [...]peer{{from: i, to: j}, {from: j, to: i}} {
			err := f.devs[p.from].EnablePeerAccess(f.devs[p.to])
			if errors.Is(err, cudart.ErrTooManyPeers) || errors.Is(err, cudart.ErrPeerAccessUnsupported) {
				return false, f.disconnect(before)
			}
			if err != nil {
				return false, err
			}
			f.peers = append(f.peers, p)
		}
	}
	return true, nil
}

// disconnect disables access that connect has enabled, but for the first ones.
func (f *fan) disconnect(first int) error {
	var errs []error
	kept := f.peers[:first]
	for _, p := range f.peers[first:] {
		if err := f.devs[p.from].DisablePeerAccess(f.devs[p.to]); err != nil {
			errs = append(errs, err)
			kept = append(kept, p)
		}
	}
	f.peers = kept
	return errors.Join(errs...)
}

// release releases what open made, as far as it got. What cannot be released keeps
// nothing else from it.
func (f *fan) release(ctx context.Context) error {
	errs := []error{f.releasePeers(ctx)}
	f.members = slices.DeleteFunc(f.members, func(e *engine) bool {
		err := e.release(ctx)
		if err != nil {
			errs = append(errs, fmt.Errorf("%v: %w", e.dev, err))
		}
		return err == nil
	})
	return errors.Join(errs...)
}

// releasePeers ends the copies between members.
func (f *fan) releasePeers(ctx context.Context) error {
	if f.queueing.Seal() > 0 {
		return fmt.Errorf("copies between devices: %w: a call into the CUDA library has not returned", ErrUnderWay)
	}
	var errs []error
	for i := range f.peers {
		p := &f.peers[i]
		if p.stream == nil {
			continue
		}
		err := p.stream.Point().Wait(ctx)
		if err == nil {
			err = p.stream.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("copies from %v to %v: %w", f.devs[p.from], f.devs[p.to], err))
			continue
		}
		p.stream = nil
	}
	if len(errs) == 0 { // else peer access may be in use
		errs = append(errs, f.disconnect(0))
	}
	return errors.Join(errs...)
}

// Close releases the Fanout: it disables the peer access that it has enabled, and
// the rings of devices that no Copier uses any more. From its call on new copies
// return [ErrClosed]. It does not wait for methods that run, as it may be called by
// one of their callbacks: it returns an error then. CloseContext waits for them.
// After an error Close may be called again; once it has returned nil it does
// nothing.
func (f *Fanout) Close() error {
	if n := f.life.Seal(); n > 0 {
		return fmt.Errorf("transfer: close fanout: still copying (calls: %d): close it when they have returned, or with CloseContext, which waits for them", n)
	}
	return f.CloseContext(context.Background())
}

// CloseContext is Close that waits for methods that run as well, until ctx ends:
// the error is ctx's then.
func (f *Fanout) CloseContext(ctx context.Context) error {
	if err := closeLifetime(ctx, &f.life, f.release); err != nil {
		return fmt.Errorf("transfer: close fanout: %w", err)
	}
	return nil
}

// Devices returns the devices, in the order of NewFanout.
func (f *FanoutView) Devices() []*cudart.Device { return slices.Clone(f.devs) }

// With returns a view whose copies are shaped by call. Call.Stream may be of any of
// the devices: a copy begins when what was queued there is done. Where other devices
// have work that must be done before, make that stream wait for it
// ([cudart.Stream.WaitPoint]).
func (f *FanoutView) With(call Call) *FanoutView { return &FanoutView{fan: f.fan, call: call} }

// Stats returns what was done so far by the Fanout and all its views: each byte of
// a source counts once, and in PeerBytes once for each device that got it from
// another one. RingBytes are those of all the devices.
func (f *FanoutView) Stats() Stats {
	s := f.stats.read()
	for _, st := range f.stages {
		s.RingBytes += st.Bytes()
	}
	return s
}

// Upload copies src, which may be any memory, to all devices.
func (f *FanoutView) Upload(ctx context.Context, dsts []cudart.DevPtr, src []byte) error {
	_, err := f.do(ctx, dsts, len(src), func(dst onDevices) (int, error) { return dst.memory(ctx, src) })
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes onto %d devices: %w", len(src), len(f.devs), err)
	}
	return nil
}

// UploadFrom copies n bytes from offset off of r to all devices, and returns how
// many, from the first on, are on all of them. r is read as [View.UploadFrom] does.
func (f *FanoutView) UploadFrom(ctx context.Context, dsts []cudart.DevPtr, r io.ReaderAt, off int64, n int) (int, error) {
	err := checkRange(r, off, n)
	done := 0
	if err == nil {
		done, err = f.do(ctx, dsts, n, func(dst onDevices) (int, error) { return uploadAt(ctx, dst, r, off, n) })
	}
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from offset %d of %s onto %d devices: %w", n, off, nameOf(r), len(f.devs), err)
	}
	return done, nil
}

// UploadReader copies the next n bytes of r to all devices, and returns how many,
// from the first on, are on all of them. r is read as [View.UploadReader] does.
func (f *FanoutView) UploadReader(ctx context.Context, dsts []cudart.DevPtr, r io.Reader, n int) (int, error) {
	err := checkRange(r, 0, n)
	done := 0
	if err == nil {
		done, err = f.do(ctx, dsts, n, func(dst onDevices) (int, error) { return uploadNext(ctx, dst, r, n) })
	}
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d bytes from %s onto %d devices: %w", n, nameOf(r), len(f.devs), err)
	}
	return done, nil
}

// do runs one copy of n bytes to all devices.
func (f *FanoutView) do(ctx context.Context, dsts []cudart.DevPtr, n int, copies func(onDevices) (int, error)) (int, error) {
	return f.run(ctx, n, func() error { return checkDsts(f.devs, dsts, n) }, func() (int, error) {
		return copies(onDevices{f, []Piece{{N: n, Dsts: dsts}}})
	})
}

// run runs one copy of n bytes, while the Fanout is open, if check finds nothing.
func (f *FanoutView) run(ctx context.Context, n int, check func() error, copies func() (int, error)) (done int, err error) {
	if ctx == nil {
		return 0, errNilContext
	}
	if !f.life.Begin() {
		return 0, ErrClosed
	}
	defer f.life.End()
	switch s := f.call.Stream; {
	case n < 0:
		return 0, fmt.Errorf("%d bytes: must not be negative", n)
	case s != nil && !slices.Contains(f.devs, s.Device()):
		return 0, fmt.Errorf("Call.Stream: %v is of none of the devices", s)
	}
	if err := check(); err != nil {
		return 0, err
	}
	switch {
	case ctx.Err() != nil:
		return 0, bounded.Ended(ctx)
	case n == 0:
		return 0, nil
	}
	f.stats.copies.Add(1)
	if err = f.call.turn(ctx); err == nil {
		done, err = copies()
	}
	if err != nil {
		f.stats.failures.Add(1)
	}
	return done, err
}

// checkDsts returns an error unless there is one place of n bytes for each device,
// and none overlaps with another: no two devices have memory at one address.
func checkDsts(devs []*cudart.Device, dsts []cudart.DevPtr, n int) error {
	if len(dsts) != len(devs) {
		return fmt.Errorf("%d destinations for %d devices: want one for each", len(dsts), len(devs))
	}
	for i, a := range dsts {
		for j, b := range dsts[:i] {
			if n > 0 && overlap(a, n, b, n) {
				return fmt.Errorf("the destinations on %v (%#x) and %v (%#x) overlap", devs[j], uintptr(b), devs[i], uintptr(a))
			}
		}
	}
	return nil
}

// overlap reports whether two ranges have a byte in common.
func overlap(a cudart.DevPtr, n int, b cudart.DevPtr, m int) bool {
	return a < b+cudart.DevPtr(m) && b < a+cudart.DevPtr(n)
}

// onDevices are places on all devices of a Fanout: of all bytes one after the
// other, or of pieces of them.
type onDevices struct {
	*FanoutView
	pieces []Piece
}

func (d onDevices) shape() Call { return d.call }

func (d onDevices) feed(ctx context.Context, c stage.Copy) (int, error) {
	c.Over, c.Groups, c.Forward = d.stages, d.groups, d.forward
	c.Queue = func(on *cudart.Stream, to int, mem []byte, off int) error {
		return d.each(off, len(mem), func(p *Piece, skip, n int) error {
			return on.CopyToDevice(p.Dsts[to]+cudart.DevPtr(skip), unsafe.Pointer(&mem[p.Off+skip-off]), n)
		})
	}
	c.Progress, c.Workers = d.call.Progress, d.o.Workers
	done, err := d.stages[0].Run(ctx, c)
	d.stats.stagedBytes.Add(int64(done))
	return done, err
}

// forward queues the copies of n bytes at off from one member of a group to the
// others, when the device has passed a Point. It returns their ends, also after an
// error.
func (d onDevices) forward(from, off, n int, after cudart.Point) (ends []cudart.Point, err error) {
	if !d.queueing.Begin() {
		return nil, ErrClosed // the copy was given up before
	}
	defer d.queueing.End()
	for _, p := range d.peers {
		if p.from != from {
			continue
		}
		err := p.stream.WaitPoint(after)
		if err == nil {
			err = d.each(off, n, func(piece *Piece, skip, n int) error {
				at := cudart.DevPtr(skip)
				err := p.stream.CopyPeer(piece.Dsts[p.to]+at, d.devs[p.to], piece.Dsts[from]+at, d.devs[from], n)
				if err == nil {
					d.stats.peerBytes.Add(int64(n))
				}
				return err
			})
		}
		ends = append(ends, p.stream.Point())
		if err != nil {
			return ends, fmt.Errorf("from %v to %v: %w", d.devs[from], d.devs[p.to], err)
		}
	}
	return ends, nil
}

func (d onDevices) memory(ctx context.Context, src []byte) (int, error) {
	if done, ok, err := d.pinned(ctx, src); ok {
		return done, err
	}
	return d.feed(ctx, fromMemory(src))
}

const (
	// Of pinned memory, too, each device gets every so many pieces.
	fanPiece  = 16 * mib
	fanPieces = 4 // at a time, for each device
)

// pinned is for memory that is pinned already; ok is false for other memory.
func (d onDevices) pinned(ctx context.Context, src []byte) (done int, ok bool, err error) {
	send, known, err := pinnedSource(ctx, d.devs[0], src)
	if send == nil {
		return 0, err != nil, err
	}
	turn := 0
	queue := func(ends []cudart.Point, off, n int) ([]cudart.Point, error) {
		defer func() { turn++ }()
		for _, group := range d.groups {
			to := group[turn%len(group)]
			on := d.members[to].direct[0]
			err := d.each(off, n, func(p *Piece, skip, n int) error {
				return send(on, p.Dsts[to]+cudart.DevPtr(skip), p.Off+skip, n)
			})
			end := on.Point()
			ends = append(ends, end)
			if err != nil {
				return ends, err
			}
			more, err := d.forward(to, off, n, end)
			if ends = append(ends, more...); err != nil {
				return ends, err
			}
		}
		return ends, nil
	}
	c := &directCopy{n: len(src), piece: fanPiece, pieces: fanPieces * len(d.devs), queue: queue}
	done, err = c.do(ctx, d.call.Progress)
	d.stats.directBytes.Add(int64(done))
	return done, known || !atSeam(err), err
}
