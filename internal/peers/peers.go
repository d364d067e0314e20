// Package peers proves that direct copies between GPUs arrive, for every package of this module
// that makes such copies.
//
// CUDA reports peer access, and copies succeed, on hosts where no byte arrives: an IOMMU that
// translates the GPUs' accesses, or PCI Express's access control (ACS), sends them elsewhere. Only
// bytes that come back through the host show it.
package peers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/pattern"
	"github.com/gopinned/pinned/internal/raw"
)

// ProofBytes is the size of the copy that proves a path: several pages of an IOMMU.
const ProofBytes = 16 << 10

// ErrNoMemory is in the error of a proof for which a device has no memory: nothing is known of
// the path.
var ErrNoMemory = errors.New("no device memory for the proof")

// A Path leads from the memory of one device to that of another, of the same Runtime.
type Path struct{ From, To *cudart.Device }

// String names both devices.
func (p Path) String() string { return fmt.Sprintf("%v to %v", p.From, p.To) }

// Back returns the path in the other direction.
func (p Path) Back() Path { return Path{From: p.To, To: p.From} }

// proven has the lost bytes of a Runtime's proofs, by the ordinals of a path. A path keeps its outcome as long as the
// Runtime exists.
var proven bounded.Each[cudart.Runtime, sync.Map]

func (p Path) key() [2]int { return [2]int{p.From.Ordinal(), p.To.Ordinal()} }

// Known returns how many of ProofBytes were lost on a path, if that was proved before.
func (p Path) Known() (lost int, known bool) {
	all, known := proven.Of(p.From.Runtime()).Load(p.key())
	lost, _ = all.(int)
	return lost, known
}

func (p Path) remember(lost int) {
	proven.Of(p.From.Runtime()).Store(p.key(), lost)
}

// A Prover has what proofs need on each device. Release it after use. The zero Prover is ready.
// Its calls may block: see package bounded.
type Prover struct {
	ends  []*end
	host  []byte      // pattern, what fills the destination, and what came back
	fence fence.Fence // of all the memory
}

// An end is the memory of a device, which holds the bytes to send and those that are received.
type end struct {
	dev    *cudart.Device
	stream *cudart.Stream
	mem    *cudart.DeviceMemory
}

func (e *end) sent() cudart.DevPtr     { return e.mem.Ptr() }
func (e *end) received() cudart.DevPtr { return e.mem.Ptr() + ProofBytes }

// Prove copies ProofBytes on a path whose peer access is enabled, reads them back through the
// host, and returns how many were lost. It remembers the outcome, and does nothing for a path that was
// proved before. An error is that of a call, and nothing is remembered; it wraps
// [ErrNoMemory] if a device has no memory for the proof.
func (p *Prover) Prove(ctx context.Context, path Path) (lost int, err error) {
	if lost, known := path.Known(); known {
		return lost, nil
	}
	if lost, err = p.prove(ctx, path); err != nil {
		return 0, fmt.Errorf("prove copies from %v: %w", path, err)
	}
	path.remember(lost)
	return lost, nil
}

func (p *Prover) prove(ctx context.Context, path Path) (lost int, err error) {
	from, err := p.end(path.From)
	if err != nil {
		return 0, err
	}
	to, err := p.end(path.To)
	if err != nil {
		return 0, err
	}
	sent, other, received := p.buffers()
	c := pattern.Content{Kind: pattern.Random, Seed: uint64(from.dev.Ordinal())<<32 | uint64(to.dev.Ordinal())}
	c.Fill(sent, 0)
	c.Mask = ^uint64(0)
	c.Fill(other, 0) // differs at each byte
	clear(received)
	if err := p.upload(to, to.received(), other); err != nil {
		return 0, err
	}
	if err := p.upload(from, from.sent(), sent); err != nil {
		return 0, err
	}
	if err := from.stream.WaitPoint(to.stream.Point()); err != nil {
		return 0, err
	}
	err = from.stream.CopyPeer(to.received(), to.dev, from.sent(), from.dev, ProofBytes)
	p.fence.Add(from.stream)
	if err == nil {
		err = from.stream.Synchronize(ctx)
	}
	if err == nil {
		err = to.dev.CopyToHost(unsafe.Pointer(&received[0]), to.received(), ProofBytes)
	}
	if err != nil {
		return 0, err
	}
	for i, b := range sent {
		if received[i] != b {
			lost++
		}
	}
	return lost, nil
}

func (p *Prover) buffers() (sent, other, received []byte) {
	if p.host == nil {
		p.host = make([]byte, 3*ProofBytes)
	}
	return p.host[:ProofBytes], p.host[ProofBytes : 2*ProofBytes], p.host[2*ProofBytes:]
}

// upload copies bytes to a device, in the order of its stream.
func (p *Prover) upload(e *end, at cudart.DevPtr, b []byte) error {
	defer p.fence.Add(e.stream)
	return raw.CopyPageable(e.stream, uintptr(at), unsafe.Pointer(&b[0]), len(b))
}

// end returns the memory for a device's proofs, and allocates it the first time.
func (p *Prover) end(dev *cudart.Device) (*end, error) {
	i := slices.IndexFunc(p.ends, func(e *end) bool { return e.dev == dev })
	if i < 0 {
		i = len(p.ends)
		p.ends = append(p.ends, &end{dev: dev})
	}
	e := p.ends[i]
	var err error
	if e.stream == nil {
		if e.stream, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
			return nil, err
		}
	}
	if e.mem == nil {
		e.mem, err = dev.Alloc(2 * ProofBytes)
		if errors.Is(err, cudart.ErrMemoryAllocation) {
			err = fmt.Errorf("%w: %w", ErrNoMemory, err)
		}
		if err != nil {
			return nil, err
		}
	}
	return e, nil
}

// Release waits until no copy is under way, and releases everything. After an error it may be
// called again; after a success it does nothing.
func (p *Prover) Release(ctx context.Context) error {
	if err := p.fence.Wait(ctx); err != nil { // the memory may be in use
		return fmt.Errorf("prove copies between devices: %w", err)
	}
	var errs []error
	for _, e := range p.ends {
		if err := errors.Join(e.mem.Close(), e.stream.Close()); err != nil {
			errs = append(errs, fmt.Errorf("prove copies between devices: %v: %w", e.dev, err))
		}
	}
	if len(errs) == 0 {
		p.ends = nil
	}
	return errors.Join(errs...)
}
