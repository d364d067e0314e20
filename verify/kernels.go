package verify

import (
	"context"
	"encoding/hex"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/pattern"
)

// gpu fills and compares memory on the device: gpukernels.Memory, or in tests one that goes wrong.
// Addresses are device addresses.
type gpu interface {
	// Fill queues a kernel that writes n bytes of a content, from offset at on, to p.
	Fill(s *cudart.Stream, p cudart.DevPtr, n int, c pattern.Content, at uint64) error
	// Compare compares n bytes at p with a content, and waits for the result.
	Compare(ctx context.Context, s *cudart.Stream, p cudart.DevPtr, n int, c pattern.Content, at uint64) (gpukernels.Found, error)
	CloseContext(ctx context.Context) error
}

// loadKernels is a runner's load.
func loadKernels(ctx context.Context, dev *cudart.Device) (gpu, error) {
	m, err := gpukernels.NewMemory(ctx, dev)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// atMemorySpeed returns the content of the path device_memory, whose random bytes are cheaper to
// compute.
func (c content) atMemorySpeed() content {
	if c.Kind == pattern.Random {
		c.Kind = pattern.Hash
	}
	return c
}

// checkedByKernel does a case of the path kernel: a kernel checks what arrived, and then reads the
// host memory that it came from.
func (t *trip) checkedByKernel(ctx context.Context, c Case, want content) ([]Mismatch, error) {
	if err := t.poison(ctx, c, want); err != nil {
		return nil, err
	}
	if err := t.uploads(ctx, c); err != nil {
		return nil, err
	}
	if err := t.allBefore(t.streams[:1], max(c.Streams, 1)); err != nil {
		return nil, err
	}
	from := t.targets[0]
	mismatches, err := t.checkOnGPU(ctx, c, want, atDevice, from.of(c))
	if err == nil && len(mismatches) == 0 {
		view := t.source.view + cudart.DevPtr(sourceAt(c))
		mismatches, err = t.checkOnGPU(ctx, c, want, atSource, view)
	}
	if err != nil {
		return nil, err
	}
	overruns, err := t.overruns(c)
	return append(mismatches, overruns...), err
}

// checkOnGPU has the device compare the case's bytes at an address. On a mismatch it copies
// the bytes to the host to describe it.
func (t *trip) checkOnGPU(ctx context.Context, c Case, want content, at string, p cudart.DevPtr) ([]Mismatch, error) {
	found, err := t.find(ctx, c, at, p, want)
	if err != nil || found.Mismatches == 0 {
		return nil, err
	}
	if err := t.download(ctx, t.streams[0], returnAt(c), p, c.SizeBytes); err != nil {
		return nil, err
	}
	if err := t.synchronize(ctx); err != nil {
		return nil, err
	}
	mismatches, err := t.compare(ctx, c, want, t.targets[0])
	if len(mismatches) > 0 || err != nil {
		return mismatches, err
	}
	m := foundMismatch(c, at, found, want) // on the host they are right
	m.Cause = causeRead
	return []Mismatch{m}, nil
}

// find has the device compare the case's bytes.
func (t *trip) find(ctx context.Context, c Case, at string, p cudart.DevPtr, want content) (gpukernels.Found, error) {
	t.uses(t.streams[0])
	found, err := t.gpu.Compare(ctx, t.streams[0], p, c.SizeBytes, want.Content, 0)
	if err == nil && t.found != nil {
		found = t.found(c, at, found)
	}
	return found, err
}

// foundMismatch describes a mismatch that a kernel found: a kernel returns the first
// offset and the number of bytes.
func foundMismatch(c Case, at string, found gpukernels.Found, want content) Mismatch {
	return Mismatch{At: at, FirstBadOffsetBytes: found.First, LastBadOffsetBytes: found.First, BadBytes: found.Mismatches, Regions: 1,
		ExpectedHex: want.hex(found.First, min(shownBytes, c.SizeBytes-found.First))}
}

// filledByKernel does a case of the path device_memory: kernels write other bytes, then the
// expected ones, and compare.
func (t *trip) filledByKernel(ctx context.Context, c Case, want content) (mismatches []Mismatch, err error) {
	s, p := t.streams[0], t.targets[0].of(c)
	want = want.atMemorySpeed()
	t.uses(s)
	if err := s.Memset(p-guardBytes, guardByte, c.SizeBytes+2*guardBytes); err != nil {
		return nil, err
	}
	for _, k := range []content{want.poisonAt(atDevice), want} {
		if err := t.gpu.Fill(s, p, c.SizeBytes, k.Content, 0); err != nil {
			return nil, err
		}
	}
	found, err := t.find(ctx, c, atDevice, p, want)
	if err != nil {
		return nil, err
	}
	if found.Mismatches > 0 { // copies of the first bytes show their values
		m := foundMismatch(c, atDevice, found, want)
		first := make([]byte, len(m.ExpectedHex)/2)
		if err := t.dev.CopyToHost(unsafe.Pointer(&first[0]), p+cudart.DevPtr(found.First), len(first)); err != nil {
			return nil, fmt.Errorf("read the first of %d wrong bytes: %w", found.Mismatches, err)
		}
		if m.FoundHex = hex.EncodeToString(first); m.FoundHex[:2] == m.ExpectedHex[:2] {
			m.Cause = causeRead // by now it is right
		}
		mismatches = append(mismatches, m)
	}
	overruns, err := t.overruns(c)
	return append(mismatches, overruns...), err
}
