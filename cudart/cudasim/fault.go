package cudasim

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A Fault is what a coming call of a function is to suffer.
type Fault struct {
	Nth   int           // which call of the function from now on; 0 and 1 are the next
	Times int           // how many calls from there; 0 is 1, negative all
	Stall time.Duration // the call takes this much longer
	Code  cudart.Code   // the call does nothing but return this; Success lets it work
	Async bool          // the call succeeds, and the work it enqueued fails with Code, which stays with the device
	After func()        // runs at the end of the call, on the calling thread
}

// Fail arms a fault for a function, by its exported name. A name that the
// version does not export is an error which [Sim.Check] and [Sim.Close]
// report.
func (s *Sim) Fail(fn string, f Fault) {
	export, ok := s.names[fn]
	if !ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.fail("%s: Fail(%q): no such function in this version", s, fn)
		return
	}
	if f.Nth <= 0 {
		f.Nth = 1
	}
	if f.Times == 0 {
		f.Times = 1
	}
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.byExport[export] = append(s.faults.byExport[export], &f)
	s.faults.armed.Add(1)
}

// Stall makes the nth coming call of a function take d longer.
func (s *Sim) Stall(fn string, nth int, d time.Duration) { s.Fail(fn, Fault{Nth: nth, Stall: d}) }

// FailCall makes the kth call since New fail with a code, whichever function
// it is. Calls are counted as [Sim.TotalCalls] does, so that a test can run
// once to learn the count and then once for every k.
func (s *Sim) FailCall(k int, code cudart.Code) {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.byCall[int64(k)] = code
	s.faults.armed.Add(1)
}

// ResetFaults disarms what Fail, Stall and FailCall armed. A lost device stays
// lost.
func (s *Sim) ResetFaults() {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	clear(s.faults.byExport)
	clear(s.faults.byCall)
	s.faults.armed.Store(0)
}

// Calls returns how often a function was called.
func (s *Sim) Calls(fn string) int {
	if i, ok := s.names[fn]; ok {
		return int(s.faults.calls[i].Load())
	}
	return 0
}

// TotalCalls returns the number of calls of all functions but those that
// cannot fail: cudaGetLastError, cudaPeekAtLastError, cudaGetErrorName and
// cudaGetErrorString.
func (s *Sim) TotalCalls() int { return int(s.faults.total.Load()) }

// OnCall sets a function that runs at the start of every call, on the calling
// thread, with the C name and the count of that function's calls. It may use
// the Sim. Nil removes it.
func (s *Sim) OnCall(f func(fn string, n int)) {
	if f == nil {
		s.faults.hook.Store(nil)
		return
	}
	s.faults.hook.Store(&f)
}

// faults counts the calls and knows which are to fail.
type faults struct {
	calls []atomic.Int64 // by export
	total atomic.Int64
	hook  atomic.Pointer[func(string, int)]
	armed atomic.Int64 // more than 0 when there may be faults

	mu       sync.Mutex
	byExport map[int][]*Fault
	byCall   map[int64]cudart.Code
}

func (f *faults) init(exports int) {
	f.calls = make([]atomic.Int64, exports)
	f.byExport = make(map[int][]*Fault)
	f.byCall = make(map[int64]cudart.Code)
}

// An injection is what the faults do to one call.
type injection struct {
	code, async cudart.Code
	after       []func()
}

// next counts a call, and waits through its stalls.
func (f *faults) next(s *Sim, export int, name string, fallible bool) injection {
	n := f.calls[export].Add(1)
	var total int64
	if fallible {
		total = f.total.Add(1)
	}
	if hook := f.hook.Load(); hook != nil {
		s.callHook(*hook, name, int(n))
	}
	var in injection
	if f.armed.Load() == 0 {
		return in
	}
	f.mu.Lock()
	var stall time.Duration
	if fallible {
		in.code = f.byCall[total]
	}
	for _, fault := range f.byExport[export] {
		if fault.Nth--; fault.Nth > 0 || fault.Times == 0 {
			continue
		}
		fault.Times--
		stall += fault.Stall
		if fault.Async {
			in.async = fault.Code
		} else if fault.Code != cudart.Success {
			in.code = fault.Code
		}
		if fault.After != nil {
			in.after = append(in.after, fault.After)
		}
	}
	f.mu.Unlock()
	s.pause(stall)
	return in
}

// callHook keeps a panic of a test's function from ending the process with
// nothing said.
func (s *Sim) callHook(hook func(string, int), name string, n int) {
	defer func() {
		if r := recover(); r != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.fail("%s: panic in the OnCall function at %s: %v", s, name, r)
		}
	}()
	hook(name, n)
}

// pause waits, but not past Close.
func (s *Sim) pause(d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.closing:
	}
}

// LoseDevice makes a device fall off the bus: work that is pending on it and
// every later call that needs it fail with cudaErrorLaunchFailure. What it
// held stays outstanding.
func (s *Sim) LoseDevice(ordinal int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ordinal < 0 || ordinal >= len(s.devices) {
		return fmt.Errorf("%s: LoseDevice(%d): there are %d devices", s, ordinal, len(s.devices))
	}
	s.devices[ordinal].broken = cudart.ErrLaunchFailure
	s.wakeAll()
	return nil
}
