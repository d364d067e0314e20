package transfer

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/linux"
)

// cores are those of a NUMA node, or no choice if set is nil.
type cores struct{ set *unix.CPUSet }

// coresOf are the cores near the device that this process may use.
func coresOf(dev *cudart.Device) cores {
	node, ok := hostmem.NodeOf(dev)
	if !ok {
		return cores{}
	}
	list, err := linux.NUMANode(node).CPUs(os.DirFS("/"))
	var allowed unix.CPUSet
	if err != nil || unix.SchedGetaffinity(0, &allowed) != nil {
		return cores{}
	}
	return cores{set: near(list, allowed)}
}

// near are the cores of the list that are allowed, nil if none is.
func near(list linux.CPUList, allowed unix.CPUSet) *unix.CPUSet {
	var set unix.CPUSet
	for _, cpu := range list {
		if allowed.IsSet(cpu) {
			set.Set(cpu)
		}
	}
	if set.Count() == 0 {
		return nil
	}
	return &set
}

// enter keeps the calling goroutine on these cores until leave.
func (c cores) enter() (leave func()) {
	var before unix.CPUSet
	if c.set == nil {
		return func() {}
	}
	runtime.LockOSThread()
	if unix.SchedGetaffinity(0, &before) != nil || unix.SchedSetaffinity(0, c.set) != nil {
		return runtime.UnlockOSThread
	}
	return func() {
		// A thread that stays bound must not run other goroutines: locked, it
		// ends with this one.
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread()
		}
	}
}
