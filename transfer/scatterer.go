package transfer

import (
	"context"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A scatterer copies many small parts between the ring and the device by a kernel.
type scatterer struct {
	kernel *gpukernels.Parts
	lists  *pool.Pool
}

const (
	// minScattered is the least number of parts, and maxScattered the largest mean size, that a kernel
	// copies: of 16 blocks of 4 KiB the copy engines are about as quick (H200). Larger ones were not compared here.
	minScattered = 64
	maxScattered = 32 * kib
	// maxEntry is the size of the largest piece of a part that one warp copies.
	maxEntry = 8 * kib
	// scatterProcessors is the number of multiprocessors that the kernel occupies.
	scatterProcessors = 4
)

// small reports whether the parts are many and small.
func (p *partList) small() bool {
	return len(p.parts) >= minScattered && p.bytes()/len(p.parts) <= maxScattered
}

// A lazyScatterer is loaded by the first copy that wants it.
type lazyScatterer struct {
	begun  atomic.Bool
	loaded atomic.Pointer[scatterer] // nil before, and without a kernel where it cannot be had
}

// scatterer returns the engine's scatterer. It returns nil if it cannot be had, is being loaded for another
// call, or ctx has ended first: engines copy then. The load goes on without its caller.
func (e *engine) scatterer(ctx context.Context) *scatterer {
	s := e.scattering.loaded.Load()
	if s == nil && e.sameAddress && e.scattering.begun.CompareAndSwap(false, true) {
		s, _ = bounded.Do(ctx, bounded.Call[*scatterer]{Run: func() (*scatterer, error) {
			k, _ := gpukernels.NewParts(context.WithoutCancel(ctx), e.members[0].dev) // nil after an error
			s := &scatterer{k, e.queued}
			e.scattering.loaded.Store(s)
			return s, nil
		}})
	}
	if s == nil || s.kernel == nil {
		return nil
	}
	return s
}

// releaseScatterer waits for the kernels that were launched. It fails while the kernel is being loaded for a call
// that has gone.
func (e *engine) releaseScatterer(ctx context.Context) error {
	switch s := e.scattering.loaded.Load(); {
	case s != nil && s.kernel != nil:
		return s.kernel.CloseContext(ctx)
	case s == nil && e.scattering.begun.Load():
		return fmt.Errorf("the kernel that copies parts: %w", stage.ErrHeld)
	}
	return nil
}

// queue launches a kernel for the copies of a chunk. queued is false if they are few, there is no memory for
// their list just now, or an address is not known to be of the device: a kernel that accesses it would end the
// context, and a copy engine refuses it.
func (s *scatterer) queue(on *cudart.Stream, p *partList, mem []byte, off int) (queued bool, err error) {
	runs, count, known := 0, 0, true
	memory := queue.Allocations{Device: on.Device()}
	_ = p.runs(mem, off, &memory, func(run Part) error {
		runs, count = runs+1, count+(len(run.Host)+maxEntry-1)/maxEntry
		known = known && memory.Hold(run.Device, len(run.Host))
		return nil
	})
	if runs < minScattered || !known {
		return false, nil
	}
	lease, err := s.lists.TryGet(context.Background(), count*gpukernels.PartBytes)
	if err != nil {
		return false, nil
	}
	defer func() { _ = lease.Release(on) }() // fails only for no stream, and twice
	list := unsafe.Slice((*gpukernels.Part)(lease.Pointer()), count)[:0]
	_ = p.runs(mem, off, &memory, func(run Part) error {
		for from := 0; from < len(run.Host); from += maxEntry {
			host, device := cudart.DevPtr(uintptr(unsafe.Pointer(&run.Host[from]))), run.Device+cudart.DevPtr(from)
			if p.down {
				host, device = device, host
			}
			list = append(list, gpukernels.Part{Dst: device, Src: host, Size: uint64(min(maxEntry, len(run.Host)-from))})
		}
		return nil
	})
	return true, s.kernel.Copy(on, 0, 0, cudart.DevPtr(uintptr(lease.Pointer())), count, scatterProcessors)
}
