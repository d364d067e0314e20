package verify

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
)

// gpu compares bytes on the device: kernel.Memory, or what stands in for it in tests, where no
// kernels run. Addresses are the device's.
type gpu interface {
	// Fill queues that n bytes at p become those of a content from offset at on.
	Fill(s *cudart.Stream, p cudart.DevPtr, n int, c kernel.Content, at uint64) error
	// Compare waits for what it finds to be wrong.
	Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c kernel.Content, at uint64) (kernel.Found, error)
	CloseContext(ctx context.Context) error
}

// loadKernels is a runner's load.
func loadKernels(dev *cudart.Device) (gpu, error) {
	m, err := kernel.NewMemory(dev)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// newTrip allocates for cases of the path, and loads the kernels that it needs.
func (p *pathRun) newTrip(ctx context.Context, n, streams int) (*trip, error) {
	t, err := newTrip(ctx, p.dev, p.plan.Peer, p.Path, n, streams)
	if err != nil || !p.Path.kernels() {
		return t, err
	}
	if t.gpu, err = p.load(p.dev); err != nil {
		return nil, errors.Join(err, t.release(ctx))
	}
	return t, nil
}

// onGPU returns the same content for kernels.
func (c content) onGPU() kernel.Content {
	k := kernel.Content{Seed: c.seed, Mask: uint64(c.mask) * lowBytes}
	switch c.pattern {
	case WalkingBit:
		k.Kind = kernel.WalkingBit
	case Counter:
		k.Kind = kernel.Counter
	case Random:
		k.Kind = kernel.Random
	default:
		k.Kind, k.Seed = kernel.Constant, c.masked(0).word(0)
	}
	return k
}

// atMemorySpeed returns the content of PathDeviceMemory, whose random bytes are cheaper to
// compute.
func (c content) atMemorySpeed() kernel.Content {
	k := c.onGPU()
	if c.pattern == Random {
		k.Kind = kernel.Hash
	}
	return k
}

// runKernel does a case of PathKernel: a kernel checks what arrived, and then reads the host
// memory that it came from.
func (t *trip) runKernel(ctx context.Context, c Case, want content) ([]Difference, error) {
	if err := t.poison(ctx, c, want); err != nil {
		return nil, err
	}
	if err := t.uploads(ctx, c); err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	if err := t.allBefore(t.streams[:1], max(c.Streams, 1)); err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	wrong, err := t.checkOnGPU(ctx, c, want, AtDevice, t.device+cudart.DevPtr(t.deviceAt(c)))
	if err != nil {
		return nil, err
	}
	if len(wrong) == 0 {
		view := t.source.(mapped).view + cudart.DevPtr(t.sourceAt(c))
		if wrong, err = t.checkOnGPU(ctx, c, want, AtSource, view); err != nil {
			return nil, err
		}
	}
	overruns, err := t.overruns(c)
	return append(wrong, overruns...), err
}

// checkOnGPU has the device compare the case's bytes at an address. If some are wrong, it says
// more by copying them to the host.
func (t *trip) checkOnGPU(ctx context.Context, c Case, want content, at string, p cudart.DevPtr) ([]Difference, error) {
	s := t.streams[0]
	t.uses(s)
	found, err := t.gpu.Compare(ctx, s, p, c.SizeBytes, want.onGPU(), 0)
	if err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	if t.found != nil {
		found = t.found(c, at, found)
	}
	if found.Wrong == 0 {
		return nil, nil
	}
	if err := t.download(ctx, s, t.backAt(c), p, c.SizeBytes); err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	if err := t.synchronize(ctx); err != nil {
		return nil, err
	}
	wrong, err := t.compare(ctx, c, want, t.device)
	if len(wrong) > 0 || err != nil {
		return wrong, err
	}
	return []Difference{readDifference(want, c.SizeBytes, at, found)}, nil
}

// readDifference describes bytes that the device read wrong, and that are right on the host.
func readDifference(want content, size int, at string, found kernel.Found) Difference {
	d := Difference{Cause: CauseRead, At: at, FirstBadOffsetBytes: found.First, LastBadOffsetBytes: found.First, BadBytes: found.Wrong, Regions: 1}
	d.Expected = make(Hex, min(shownBytes, size-found.First))
	want.fill(d.Expected, found.First)
	return d
}

// runDeviceMemory does a case of PathDeviceMemory: kernels write other bytes, then the
// expected ones, and compare.
func (t *trip) runDeviceMemory(ctx context.Context, c Case, want content) ([]Difference, error) {
	s, p, k := t.streams[0], t.device+cudart.DevPtr(t.deviceAt(c)), want.atMemorySpeed()
	poisoned := k
	poisoned.Mask ^= uint64(want.poisonAt(AtDevice).mask) * lowBytes
	t.uses(s)
	for _, queue := range []func() error{
		func() error { return s.Memset(p-guardBytes, guardByte, c.SizeBytes+2*guardBytes) },
		func() error { return t.gpu.Fill(s, p, c.SizeBytes, poisoned, 0) },
		func() error { return t.gpu.Fill(s, p, c.SizeBytes, k, 0) },
	} {
		if err := queue(); err != nil {
			return nil, errors.Join(err, t.drain(ctx))
		}
	}
	found, err := t.gpu.Compare(ctx, s, p, c.SizeBytes, k, 0)
	if err != nil {
		return nil, errors.Join(err, t.drain(ctx))
	}
	if t.found != nil {
		found = t.found(c, AtDevice, found)
	}
	var wrong []Difference
	if found.Wrong > 0 {
		d, err := t.lookAtDevice(p, c.SizeBytes, k, found)
		if err != nil {
			return nil, err
		}
		wrong = append(wrong, d)
	}
	overruns, err := t.overruns(c)
	return append(wrong, overruns...), err
}

// lookAtDevice describes wrong bytes by copies of the first few of them.
func (t *trip) lookAtDevice(p cudart.DevPtr, size int, k kernel.Content, found kernel.Found) (Difference, error) {
	n := min(shownBytes, size-found.First)
	d := Difference{FirstBadOffsetBytes: found.First, LastBadOffsetBytes: found.First, BadBytes: found.Wrong, Regions: 1, At: AtDevice}
	d.Expected, d.Found = make(Hex, n), make(Hex, n)
	k.Fill(d.Expected, uint64(found.First))
	if err := t.dev.CopyToHost(unsafe.Pointer(&d.Found[0]), p+cudart.DevPtr(found.First), n); err != nil {
		return d, fmt.Errorf("read the first of %d wrong bytes: %w", found.Wrong, err)
	}
	if d.Found[0] == d.Expected[0] {
		d.Cause = CauseRead // by now it is right
	}
	return d, nil
}
