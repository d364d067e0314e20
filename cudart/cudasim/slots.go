package cudasim

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
)

// arguments are what C passed, those beyond the function's own are garbage.
type arguments [9]uintptr

// maxSlots bounds the callbacks that this package takes: a process has 2000
// and can free none.
const maxSlots = 16

// A slot is a table of C function pointers, one for each export, which serves
// one Sim at a time.
type slot struct {
	entries []uintptr
	sim     atomic.Pointer[Sim]
}

// slots are the process's tables. They are made when needed and used again,
// the longest unused one first, so that a stray call to a closed Sim has the
// best chance to fail.
var slots struct {
	mu   sync.Mutex
	made int
	free []*slot
}

// takeSlot gives the Sim a table of entries.
func takeSlot(s *Sim) (*slot, error) {
	slots.mu.Lock()
	defer slots.mu.Unlock()
	var t *slot
	switch {
	case slots.made < maxSlots:
		made, err := newSlot()
		if err != nil && len(slots.free) == 0 {
			return nil, err
		}
		if err == nil {
			slots.made++
			t = made
			break
		}
		fallthrough
	case len(slots.free) > 0:
		t = slots.free[0]
		slots.free = slots.free[1:]
	default:
		return nil, fmt.Errorf("cudasim: all %d simulators of this process are in use: close one", maxSlots)
	}
	t.sim.Store(s)
	return t, nil
}

func (t *slot) giveBack() {
	slots.mu.Lock()
	defer slots.mu.Unlock()
	t.sim.Store(nil)
	slots.free = append(slots.free, t)
}

func newSlot() (*slot, error) {
	t := &slot{entries: make([]uintptr, len(exports))}
	for i := range exports {
		e, err := newEntry(exports[i].args, func(a *arguments) uintptr {
			if sim := t.sim.Load(); sim != nil {
				return sim.dispatch(i, a)
			}
			return closedResult(i)
		})
		if err != nil {
			return nil, err
		}
		if e == 0 {
			return nil, errors.New("cudasim: a callback has no address")
		}
		t.entries[i] = e
	}
	return t, nil
}

// closedResult is what the entries of a closed Sim return.
func closedResult(export int) uintptr {
	if exports[export].text != nil {
		return 0
	}
	return result(cudart.ErrCudartUnloading)
}

// result is a code as a C function returns it.
func result(c cudart.Code) uintptr { return uintptr(uint32(c)) }
