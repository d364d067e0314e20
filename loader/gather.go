package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// A gatherer launches the kernels that copy batches from pinned memory. Host memory of its loader has
// lists of indices instead of samples.
type gatherer struct {
	data   []pinnedField // none for a loader with windows
	kernel *gpukernels.Blocks
}

// A pinnedField is a field of all samples.
type pinnedField struct {
	owner hostmem.Pinned
	at    cudart.DevPtr
}

const (
	// gatherProcessors is the number of multiprocessors of a kernel: as many filled the link of an H200
	// with the kernel of a C program.
	gatherProcessors = 4
	// gatherWorkers write lists. An index of a random order takes 27 ns (BenchmarkPermutation, one core of an
	// AMD EPYC, 2026-11-23).
	gatherWorkers = 2
	indexBytes    = 4
)

// gatherLists returns the number of lists of indices with which the GPU gathers from a source: one of
// samples, and for Shards another of places in the batch. It is 0 if the GPU does not gather: l gets
// the owners of memory that is pinned.
func (l *Loader) gatherLists(o Options) (lists int, err error) {
	if l.dev == nil || o.Transform != nil || o.HostBatches {
		return 0, nil
	}
	_, windows := l.src.(*shards)
	src, inMemory := l.src.(memory)
	if !windows && (!inMemory || src.Len() > math.MaxUint32) {
		return 0, nil
	}
	same, err := l.dev.Attribute(cudart.AttrCanUseHostPointerForRegisteredMem)
	if err == nil && same == 0 {
		err = fmt.Errorf("%v cannot access host memory by its address: %w", l.dev, errors.ErrUnsupported)
	}
	switch {
	case windows && err != nil:
		return 0, fmt.Errorf("gather by the GPU: %w", err)
	case err != nil:
		return 0, nil
	case windows:
		return 2, nil
	}
	var fields []pinnedField
	for _, data := range src.data {
		owner, _, ok := hostmem.Find(data)
		if !ok {
			return 0, nil
		}
		fields = append(fields, pinnedField{owner, address(data)})
	}
	l.gather = &gatherer{data: fields}
	return 1, nil
}

func (g *gatherer) close(ctx context.Context) error {
	if g == nil || g.kernel == nil {
		return nil
	}
	return g.kernel.CloseContext(ctx)
}

// queue queues the kernels that copy batches to slots, which are neighbours in memory. Full batches
// without padding between them take one launch.
func (g *gatherer) queue(l *Loader, slots []*slot) error {
	together := len(l.layout.sizes) == 1 && l.layout.bytes == l.layout.samples*l.layout.sizes[0]
	for len(slots) > 0 {
		s, n := slots[0], 1
		count := len(s.indices)
		for together && count == n*l.layout.samples && n < len(slots) {
			count += len(slots[n].indices)
			n++
		}
		if l.windows != nil {
			if err := l.windows.queue(g.kernel, slots[:n]); err != nil {
				return err
			}
			slots = slots[n:]
			continue
		}
		for f, size := range l.layout.sizes {
			dst := gpukernels.BlockList{Base: s.mem + cudart.DevPtr(l.layout.offsets[f]), Stride: size}
			src := gpukernels.BlockList{Base: g.data[f].at, Stride: size, Index: address(s.host)}
			err := g.data[f].owner.Use(l.stream, false, func() error {
				return l.buf.Use(l.stream, false, func() error {
					return g.kernel.Copy(l.stream, dst, src, size, count, gatherProcessors, false)
				})
			})
			if err != nil {
				return err
			}
		}
		slots = slots[n:]
	}
	return nil
}

// address returns the address of memory, which the device accesses by it.
func address(b []byte) cudart.DevPtr {
	return cudart.DevPtr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// noLists is the BatchSource of the workers of a loader with windows: the driver writes the lists.
type noLists struct{ *shards }

func (noLists) ReadBatch(context.Context, []int, [][]byte) error { return nil }

// indexLists is the BatchSource of the workers of a gatherer's loader: it writes the indices.
type indexLists struct{ memory }

var errIndices = errors.New("loader: memory for another number of indices")

func (indexLists) ReadBatch(_ context.Context, indices []int, samples [][]byte) error {
	list := samples[0]
	if len(list) != indexBytes*len(indices) {
		return errIndices
	}
	for at, i := range indices {
		binary.NativeEndian.PutUint32(list[indexBytes*at:], uint32(i))
	}
	return nil
}
