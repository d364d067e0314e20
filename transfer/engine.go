package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	peerpaths "github.com/gopinned/pinned/internal/peers"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// An engine is the state that a Copier or a Fanout shares with its views.
type engine struct {
	what    string // in messages
	o       Options
	members []*member      // by device
	stages  []*stage.Stage // of the members
	// groups have the indexes of members that can access each other's memory. Each chunk
	// is copied over the link of one member of each group.
	groups [][]int
	peers  []peer // ordered pairs of a group
	prover peerpaths.Prover
	notes  []string // why devices are in different groups although CUDA reports access
	// forwarding counts the goroutines that queue copies between members. A call into CUDA
	// may keep one long after its copy was abandoned.
	forwarding lifetime.Lifetime
	// scattering copies small parts; sameAddress is set if the device can access host memory by its address.
	scattering  lazyScatterer
	sameAddress bool
	queued      *pool.Pool // memory for copies on callers' streams; nil for several devices
	stats       counters
	life        lifetime.Lifetime
	opened      []func(context.Context) error // release functions, in the order of opening
}

// A member is a device of an engine.
type member struct {
	dev    *cudart.Device
	direct [2]*cudart.Stream // for pinned memory: up, down
}

// A peer is a member's access to another one's memory.
type peer struct {
	from, to int
	stream   *cudart.Stream // of from, for copies to the other one
}

// newEngine opens an engine. When ctx ends it abandons calls that do not return, and releases
// what these make later. After another error nothing stays open, unless the error says that
// it could not be released.
func newEngine(ctx context.Context, what string, devs []*cudart.Device, o Options) (*engine, error) {
	e := &engine{what: what, o: o}
	err := e.check(ctx, devs)
	if err == nil {
		_, err = bounded.Do(ctx, bounded.Call[struct{}]{
			Run: func() (none struct{}, err error) {
				if err = e.open(ctx, devs); err != nil {
					err = errors.Join(err, lifetime.Undo(ctx, e.release))
				}
				return none, err
			},
			Late: func(struct{}, error) { _ = lifetime.Undo(ctx, e.release) },
		})
	}
	if err != nil {
		return nil, fmt.Errorf("transfer: new %s: %w", what, err)
	}
	return e, nil
}

func (e *engine) check(ctx context.Context, devs []*cudart.Device) error {
	if ctx == nil {
		return errNilContext
	}
	if err := cmp.Or(checkDevices(devs), e.o.validate()); err != nil || ctx.Err() == nil {
		return err
	}
	return bounded.Ended(ctx)
}

func checkDevices(devs []*cudart.Device) error {
	if len(devs) == 0 {
		return errors.New("no devices")
	}
	for i, d := range devs {
		switch {
		case (d == nil || d.Runtime() == nil) && len(devs) == 1:
			return errNilDevice
		case d == nil || d.Runtime() == nil:
			return fmt.Errorf("device %d of %d: %w", i, len(devs), errNilDevice)
		case d.Runtime() != devs[0].Runtime():
			return fmt.Errorf("%v and %v are of different CUDA libraries: open them with one cudart.Open", devs[0], d)
		case slices.Contains(devs[:i], d):
			return fmt.Errorf("duplicate device: %v", d)
		}
	}
	return nil
}

func (e *engine) open(ctx context.Context, devs []*cudart.Device) (err error) {
	for _, dev := range devs {
		m := &member{dev: dev}
		e.members = append(e.members, m)
		if err := e.openMember(ctx, m); err != nil {
			return e.of(dev, err)
		}
	}
	if len(devs) == 1 {
		e.groups = [][]int{{0}}
		e.queued, err = pool.New(devs[0], pool.Options{MaxBytes: queuedBytes, Buffer: hostmem.Options{Label: "transfer queue"}})
		if err == nil {
			e.opened = append(e.opened, e.releaseQueued, e.releaseScatterer)
			var same int
			same, err = devs[0].Attribute(cudart.AttrCanUseHostPointerForRegisteredMem)
			e.sameAddress = same != 0
		}
		return err
	}
	e.opened = append(e.opened, e.releasePeers)
	for i := range devs {
		if err := e.join(ctx, i); err != nil {
			return err
		}
	}
	if err := e.prover.Release(ctx); err != nil {
		return err
	}
	for i := range e.peers {
		p := &e.peers[i]
		if p.stream, err = devs[p.from].NewStream(cudart.StreamOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func (e *engine) openMember(ctx context.Context, m *member) error {
	st, err := stage.Acquire(ctx, m.dev)
	if err != nil {
		return err
	}
	e.stages = append(e.stages, st)
	e.opened = append(e.opened, func(ctx context.Context) error { return e.of(m.dev, st.Release(ctx)) })
	for i := range m.direct {
		s, err := m.dev.NewStream(cudart.StreamOptions{})
		if err != nil {
			return err
		}
		m.direct[i] = s
		e.opened = append(e.opened, func(context.Context) error { return e.of(m.dev, s.Close()) })
	}
	return nil
}

// of adds a device to an error, unless there is only one.
func (e *engine) of(dev *cudart.Device, err error) error {
	if err == nil || len(e.members) == 1 {
		return err
	}
	return fmt.Errorf("%v: %w", dev, err)
}

// join adds a member to the first group to whose members it can copy, or makes one.
func (e *engine) join(ctx context.Context, i int) error {
	for g, group := range e.groups {
		ok, err := e.connect(ctx, i, group)
		if err != nil {
			return err
		}
		if ok {
			e.groups[g] = append(group, i)
			return nil
		}
	}
	e.groups = append(e.groups, []int{i})
	return nil
}

// connect enables access between a member and all members of a group, in both directions,
// and proves that copies arrive; otherwise it enables none.
func (e *engine) connect(ctx context.Context, i int, group []int) (bool, error) {
	if e.o.NoPeers {
		return false, nil
	}
	var pairs []peer
	for _, j := range group {
		pairs = append(pairs, peer{from: i, to: j}, peer{from: j, to: i})
	}
	for _, p := range pairs {
		if can, err := e.members[p.from].dev.CanAccessPeer(e.members[p.to].dev); err != nil || !can {
			return false, err
		}
	}
	if e.loses(pairs) {
		return false, nil
	}
	before := len(e.peers)
	for _, p := range pairs {
		err := e.members[p.from].dev.EnablePeerAccess(e.members[p.to].dev)
		if errors.Is(err, cudart.Code(711)) || errors.Is(err, cudart.ErrPeerAccessUnsupported) {
			return false, e.disconnect(before)
		}
		if err != nil {
			return false, err
		}
		e.peers = append(e.peers, p)
	}
	if ok, err := e.prove(ctx, pairs); err != nil || ok {
		return ok, err
	}
	return false, e.disconnect(before)
}

func (e *engine) path(p peer) peerpaths.Path {
	return peerpaths.Path{From: e.members[p.from].dev, To: e.members[p.to].dev}
}

// loses reports whether an earlier proof has shown that copies of a pair do not arrive. It
// adds a note for each such pair.
func (e *engine) loses(pairs []peer) (loses bool) {
	for _, p := range pairs {
		if lost, _ := e.path(p).Known(); lost > 0 {
			loses = true
			e.notes = append(e.notes, fmt.Sprintf("copies from %v do not arrive (%d of %d bytes were lost), although CUDA reports peer access: "+
				"each device gets all bytes over its own link; an IOMMU or ACS is the usual cause",
				e.path(p), lost, peerpaths.ProofBytes))
		}
	}
	return loses
}

// prove reports whether copies of all pairs arrive.
func (e *engine) prove(ctx context.Context, pairs []peer) (bool, error) {
	for _, p := range pairs {
		_, err := e.prover.Prove(ctx, e.path(p))
		switch {
		case errors.Is(err, peerpaths.ErrNoMemory):
			e.notes = append(e.notes, fmt.Sprintf("it is not known whether copies arrive, so each device gets all bytes over its own link: %v", err))
			return false, nil
		case err != nil && ctx.Err() == nil:
			return false, fmt.Errorf("%w (Options.NoPeers forbids copies between devices)", err)
		case err != nil:
			return false, err
		}
	}
	return !e.loses(pairs), nil
}

// disconnect disables the access that connect has enabled, from pair first on.
func (e *engine) disconnect(first int) error {
	var errs []error
	enabled := e.peers[:first]
	for _, p := range e.peers[first:] {
		if err := e.members[p.from].dev.DisablePeerAccess(e.members[p.to].dev); err != nil {
			errs = append(errs, err)
			enabled = append(enabled, p)
		}
	}
	e.peers = enabled
	return errors.Join(errs...)
}

// release releases what open has opened, the last first. It goes on after an error; a later
// call tries again what failed.
func (e *engine) release(ctx context.Context) error {
	var errs []error
	slices.Reverse(e.opened)
	e.opened = slices.DeleteFunc(e.opened, func(release func(context.Context) error) bool {
		err := release(ctx)
		errs = append(errs, err)
		return err == nil
	})
	slices.Reverse(e.opened)
	return errors.Join(errs...)
}

// releaseQueued waits for the copies on callers' streams.
func (e *engine) releaseQueued(ctx context.Context) error {
	err := e.queued.CloseContext(ctx)
	if errors.Is(err, cudart.ErrInUse) {
		return fmt.Errorf("%w: %w", stage.ErrHeld, err)
	}
	return err
}

// releasePeers waits for the copies between members, and disables peer access.
func (e *engine) releasePeers(ctx context.Context) error {
	if err := e.prover.Release(ctx); err != nil { // of an open that has failed
		return err
	}
	if e.forwarding.Seal() > 0 {
		return fmt.Errorf("copies between devices: %w: %w", ErrUnderWay, bounded.ErrStuck)
	}
	var errs []error
	for i := range e.peers {
		p := &e.peers[i]
		if p.stream == nil {
			continue
		}
		err := p.stream.Point().Wait(ctx)
		if err == nil {
			err = p.stream.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("copies from %v to %v: %w", e.members[p.from].dev, e.members[p.to].dev, err))
			continue
		}
		p.stream = nil
	}
	if len(errs) == 0 { // else peer access may be in use
		errs = append(errs, e.disconnect(0))
	}
	return errors.Join(errs...)
}

// close implements Close of Copier and Fanout.
func (e *engine) close() error {
	if e != nil {
		if n := e.life.Seal(); n > 0 {
			return fmt.Errorf("transfer: close %s: still copying (calls: %d): close it when they have returned, or with CloseContext, which waits for them", e.what, n)
		}
	}
	return e.closeContext(context.Background())
}

func (e *engine) closeContext(ctx context.Context) error {
	switch {
	case e == nil:
		return fmt.Errorf("transfer: close: %w", errNotMade)
	case ctx == nil:
		return fmt.Errorf("transfer: close %s: %w", e.what, errNilContext)
	}
	err := e.life.Close(ctx, e.release)
	switch n := e.life.Seal(); {
	case n > 0:
		return fmt.Errorf("transfer: close %s: still copying (calls: %d): %w", e.what, n, err)
	case errors.Is(err, bounded.ErrStuck):
		return fmt.Errorf("transfer: close %s: %w: %w", e.what, ErrUnderWay, err)
	case err != nil:
		return fmt.Errorf("transfer: close %s: %w", e.what, err)
	}
	return nil
}

// do runs one copy of n bytes, without addresses to be checked.
func (v view) do(ctx context.Context, n int, copies func() (int, error)) (int, error) {
	return target{view: v}.do(ctx, n, copies)
}

// do runs one copy of n bytes, while the engine is open.
func (p target) do(ctx context.Context, n int, copies func() (int, error)) (done int, err error) {
	e := p.engine
	switch {
	case e == nil:
		return 0, errNotMade
	case ctx == nil:
		return 0, errNilContext
	case !e.life.Begin():
		return 0, cudart.ErrClosed
	}
	defer e.life.End()
	if n < 0 {
		return 0, fmt.Errorf("%d bytes: must not be negative", n)
	}
	if s := p.call.Stream; s != nil && !slices.ContainsFunc(e.members, func(m *member) bool { return m.dev == s.Device() }) {
		return 0, fmt.Errorf("Call.Stream: %v is not of the %s", s, e.what)
	}
	if err := p.check(n); err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, bounded.Ended(ctx)
	}
	if n == 0 {
		return 0, nil
	}
	e.stats.copies.Add(1)
	if done, err = copies(); err != nil {
		e.stats.failures.Add(1)
	}
	return done, err
}

// doWith is do for n bytes at an offset of a reader or writer, in the order of
// Call.Stream.
func (p target) doWith(ctx context.Context, rw any, off int64, n int, copies func() (int, error)) (int, error) {
	if isNil(rw) {
		return 0, errNilReadWriter
	}
	if err := checkOffset(off, n); err != nil {
		return 0, err
	}
	return p.do(ctx, n, func() (int, error) {
		if err := p.call.waitForStream(ctx); err != nil {
			return 0, err
		}
		return copies()
	})
}
