package stage

import (
	"context"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/linux"
)

// cores are the CPUs of a NUMA node; none if the node is not known.
type cores struct{ set *unix.CPUSet }

// coresOf returns the device's NUMA node, and the CPUs of the node that this process may use.
func coresOf(dev *cudart.Device) (node int, c cores) {
	node, ok := hostmem.NodeOf(context.Background(), dev)
	if !ok {
		return 0, cores{}
	}
	cpus, err := linux.NUMANode(node).CPUs(os.DirFS("/"))
	var allowed unix.CPUSet
	if err != nil || unix.SchedGetaffinity(0, &allowed) != nil {
		return node, cores{}
	}
	return node, cores{set: allowedCPUs(cpus, allowed)}
}

// allowedCPUs returns the CPUs of a node that are allowed, nil if there are none.
func allowedCPUs(cpus []int, allowed unix.CPUSet) *unix.CPUSet {
	var set unix.CPUSet
	for _, cpu := range cpus {
		if allowed.IsSet(cpu) {
			set.Set(cpu)
		}
	}
	if set.Count() == 0 {
		return nil
	}
	return &set
}

// count returns the number of CPUs, or a maximum if the set is empty.
func (c cores) count() int {
	if c.set == nil {
		return math.MaxInt32
	}
	return c.set.Count()
}

// bind keeps the calling goroutine on these CPUs until restore is called.
func (c cores) bind() (restore func()) {
	var before unix.CPUSet
	if c.set == nil {
		return func() {}
	}
	runtime.LockOSThread()
	if unix.SchedGetaffinity(0, &before) != nil || unix.SchedSetaffinity(0, c.set) != nil {
		return runtime.UnlockOSThread
	}
	return func() {
		// A thread that stays bound must not serve others: it ends with the
		// goroutine if it stays locked.
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread()
		}
	}
}
