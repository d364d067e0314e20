package verify

import (
	"context"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// peers are what paths with another device have there.
type peers struct {
	dev     *cudart.Device
	disable []releaseStep
	fanout  *transfer.Fanout // only on PathFanout, as is
	copier  *transfer.Copier // of dev
}

// accessible reports whether two devices can access each other's memory.
func accessible(a, b *cudart.Device) bool {
	there, err := a.CanAccessPeer(b)
	back, failed := b.CanAccessPeer(a)
	return err == nil && failed == nil && there && back
}

// newPeers allocates memory on the other device, which becomes a target of the trip.
// Also after an error it returns what is to be released.
func newPeers(ctx context.Context, t *trip, dev *cudart.Device) (p *peers, err error) {
	p = &peers{dev: dev}
	mem, err := p.dev.Malloc(t.bytes)
	if err != nil {
		return p, err
	}
	t.via = append(t.via, target{AtPeer, p.dev, mem})
	if t.path == PathFanout {
		if p.fanout, err = transfer.NewFanout(ctx, []*cudart.Device{t.dev, p.dev}, transfer.Options{}); err != nil {
			return p, err
		}
		p.copier, err = transfer.NewCopier(ctx, p.dev, transfer.Options{})
		return p, err
	}
	if !accessible(t.dev, p.dev) {
		return p, nil
	}
	for _, pair := range [...][2]*cudart.Device{{t.dev, p.dev}, {p.dev, t.dev}} {
		if err := pair[0].EnablePeerAccess(pair[1]); err != nil {
			return p, err
		}
		p.disable = append(p.disable, releaseStep{"peer access", func() error { return pair[0].DisablePeerAccess(pair[1]) }})
	}
	return p, nil
}

// copyOn queues a copy on one device, or between two.
func copyOn(s *cudart.Stream, dst cudart.DevPtr, to *cudart.Device, src cudart.DevPtr, from *cudart.Device, n int) error {
	if to == from {
		return s.CopyOnDevice(dst, src, n)
	}
	return s.CopyPeer(dst, to, src, from, n)
}

// fanned goes to both devices by a Fanout.
type fanned struct {
	end
	t *trip
}

func (e fanned) upload(ctx context.Context, s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	there := e.t.via[0].p + (dst - e.t.device)
	f := e.t.peers.fanout.With(transfer.Call{Stream: s})
	return f.Upload(ctx, []cudart.DevPtr{dst, there}, e.memory()[off:off+n])
}

// fromPeer returns what is wrong with the bytes that a Fanout brought to the other
// device.
func (t *trip) fromPeer(ctx context.Context, c Case, want content) ([]Difference, error) {
	back := t.back.memory()[t.backAt(c)-guardBytes:][:c.SizeBytes+2*guardBytes]
	if err := fillGuarded(ctx, want.poisonAt(AtReturn), back); err != nil {
		return nil, err
	}
	p := t.via[0].p
	if err := t.peers.copier.Download(ctx, back[guardBytes:][:c.SizeBytes], p+cudart.DevPtr(t.deviceAt(c))); err != nil {
		return nil, err
	}
	wrong, err := t.compare(ctx, c, want, p)
	if err != nil {
		return nil, err
	}
	overruns, err := t.overruns(c)
	return append(wrong, overruns...), err
}
