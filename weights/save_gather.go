package weights

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// CUDA takes 3 µs or more to queue a copy. So many small runs are copied to leased memory by a kernel, on a few
// multiprocessors.
const (
	minGathered      = 64       // runs of a piece, at least
	maxGathered      = 32 << 10 // their mean size, at most
	gatherPart       = 8 << 10  // that one warp copies, at most
	gatherProcessors = 16       // 4 and 64 take as long (H200, 2026-11-29)
)

// idleGather has the kernels of saves that have ended.
var idleGather idle[*gpukernels.Parts]

// gathered reports whether runs are many and small.
func gathered(runs []savedRun) bool {
	n := 0
	for _, r := range runs {
		n += r.n
	}
	return len(runs) >= minGathered && n/len(runs) <= maxGathered
}

// openGather loads the kernel on devices whose runs of a piece are many and small. Where it cannot be had, copy engines
// do.
func (n *pipeline) openGather(piece []savedRun) {
	if len(piece) < minGathered {
		return
	}
	for dev, runs := range byDevice(piece) {
		if _, tried := n.gather[dev]; !tried && gathered(runs) {
			n.gather[dev], _ = idleGather.take(dev, func() (*gpukernels.Parts, error) { return gpukernels.NewParts(n.ctx, dev) })
		}
	}
}

// countParts returns the number of parts that runs are cut into.
func countParts(runs []savedRun) (n int) {
	for _, r := range runs {
		n += (r.n + gatherPart - 1) / gatherPart
	}
	return n
}

// gatherRuns is queueRuns by the kernel, whose list is in the lease too.
func gatherRuns(k *gpukernels.Parts, lease pool.Lease, off int64, list int, runs []savedRun, on *cudart.Stream) error {
	view, err := on.Device().HostDevicePointer(lease.Pointer())
	if err != nil {
		return queueRuns(lease, off, runs, on)
	}
	count := countParts(runs)
	parts := unsafe.Slice((*gpukernels.Part)(unsafe.Pointer(&lease.Bytes()[list])), count)[:0]
	for _, r := range runs {
		for from := 0; from < r.n; from += gatherPart {
			parts = append(parts, gpukernels.Part{
				Dst: view + cudart.DevPtr(int(r.off-off)+from), Src: r.ptr + cudart.DevPtr(from), Size: uint64(min(gatherPart, r.n-from)),
			})
		}
	}
	return k.Copy(on, 0, 0, view+cudart.DevPtr(list), count, gatherProcessors)
}
