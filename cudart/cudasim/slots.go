package cudasim

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// arguments are what C passed. Those beyond the function's own are garbage.
type arguments [11]uintptr

// maxSlots bounds the callbacks that this package makes: a process can have 2000
// and free none.
const maxSlots = 16

// A slot is a table of C function pointers, one for each export, which serves
// one Sim at a time.
type slot struct {
	entries []uintptr
	sim     atomic.Pointer[Sim]
	served  []uintptr // address spaces of the Sims that it has served; its holder changes it
}

// slots has the process's free tables, nil for one that is not made yet. The one that
// has been unused for longest is taken first: a stray call to a closed Sim then
// fails for as long as possible, and does not reach another Sim.
var slots = func() chan *slot {
	free := make(chan *slot, maxSlots)
	for range maxSlots {
		free <- nil
	}
	return free
}()

// slotTimeout bounds how long New waits for another Sim to be closed: tests
// that run in parallel on a large machine can be more than there are slots.
const slotTimeout = time.Minute

// takeSlot returns a table of entries that call the Sim.
func takeSlot(ctx context.Context, s *Sim) (*slot, error) {
	timeout := time.NewTimer(slotTimeout)
	defer timeout.Stop()
	var t *slot
	select {
	case t = <-slots:
	case <-ctx.Done():
		return nil, fmt.Errorf("cudasim: open: all %d simulators of this process are in use: %w", maxSlots, ctx.Err())
	case <-timeout.C:
		return nil, fmt.Errorf("cudasim: all %d simulators of this process were in use for %v: close one", maxSlots, slotTimeout)
	}
	if t == nil {
		made, err := newSlot()
		if err != nil {
			slots <- nil
			return nil, err
		}
		t = made
	}
	s.earlier = t.served
	t.served = append(t.served, s.base)
	t.sim.Store(s)
	return t, nil
}

// release makes the entries fail, and the table available to another Sim.
func (t *slot) release() {
	t.sim.Store(nil)
	slots <- t
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

// closedResult is the result of all entries of a closed Sim.
func closedResult(export int) uintptr {
	if exports[export].text != nil {
		return 0
	}
	return result(cudart.ErrCudartUnloading)
}

// result is the code as a C function returns it.
func result(c cudart.Code) uintptr { return uintptr(uint32(c)) }
