package cudart

import (
	"fmt"
	"sync"
)

// hostFuncs holds what waits to be called by the library, which can be given
// one C function and a number. The C function is made once a process: such
// functions are never freed.
var hostFuncs = sync.OnceValue(func() *hostFuncTable {
	t := &hostFuncTable{pending: make(map[uintptr]func())}
	t.entry = newHostFuncEntry(t.run)
	return t
})

type hostFuncTable struct {
	entry   uintptr
	mu      sync.Mutex
	next    uintptr
	pending map[uintptr]func()
}

func (t *hostFuncTable) add(fn func()) uintptr {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next++
	t.pending[t.next] = fn
	return t.next
}

func (t *hostFuncTable) take(id uintptr) func() {
	t.mu.Lock()
	defer t.mu.Unlock()
	fn := t.pending[id]
	delete(t.pending, id)
	return fn
}

func (t *hostFuncTable) run(id uintptr) {
	if fn := t.take(id); fn != nil {
		fn()
	}
}

// LaunchHostFunc queues a call of fn, on a thread of CUDA's, once the work
// queued so far is done; work queued later waits until fn returns
// (cudaLaunchHostFunc). fn must not call CUDA, nor this package, and should be
// short. If the stream's work fails before, fn is never called, and stays
// referenced: nothing reports that.
func (s *Stream) LaunchHostFunc(fn func()) error {
	if fn == nil {
		return fmt.Errorf("cudaLaunchHostFunc: %v: the function is nil", s)
	}
	t := hostFuncs()
	id := t.add(fn)
	f := s.dev.begin(s)
	f.args[0], f.args[1], f.args[2] = s.arg(), t.entry, id
	code := s.dev.guard(fnLaunchHostFunc, f)
	s.dev.rt.end(f)
	if code != Success {
		t.take(id)
		return s.dev.rt.errorf(fnLaunchHostFunc, code, "%v", s)
	}
	return nil
}
