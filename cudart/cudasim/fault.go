package cudasim

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A Fault describes what happens to coming calls of a function. [Sim.Fail] and
// [Sim.Block] arm it. The fields from Stream to Times select the calls, the
// others say what happens to them.
type Fault struct {
	// Stream selects calls with this stream as argument, and calls with an event
	// that was last recorded in it. 1 is the legacy default stream, also for
	// calls that name it 0; 0 selects all calls.
	Stream cudart.StreamHandle

	// Event selects calls with this event as argument; 0 selects all calls.
	Event cudart.EventHandle

	// Devices selects calls that need the context of one of these devices, which is
	// current on their thread; none selects all calls. With Block, an empty function and
	// Times -1 it is a device that hangs.
	Devices []int

	Nth   int // the first of the selected calls to fail, counted from now on; 0 and 1 are the next
	Times int // how many selected calls from there on; 0 is 1, negative is all

	// Code is the result of the call instead of doing its work. cudaSuccess lets
	// it work.
	Code cudart.Code

	// Stall is the time that is added to the call.
	Stall time.Duration

	// Late lets the call do its work first; Stall, Block and Code come after it.
	// Code then takes the place of cudaSuccess only: this is how a call returns
	// an error of earlier work although it did its own.
	Late bool

	// Async lets the call succeed. The first operation that it enqueues fails
	// with Code instead, and every later call on that device fails with it too.
	Async bool

	// Transient, with Async, makes the device recover: Code is returned once,
	// by the next call that reports how the operation ended. Those calls are
	// cudaStreamQuery and cudaStreamSynchronize of its stream, cudaEventQuery
	// and cudaEventSynchronize of an event that was recorded after it, and
	// cudaDeviceSynchronize.
	Transient bool

	// After runs at the end of the call, on its thread.
	After func()
}

// Fail arms a fault for the C function fn. An empty fn stands for every function
// that can fail. A name that the version does not export, and a fault that
// cannot happen to the function, are errors that [Sim.Check] and [Sim.Close]
// return.
func (s *Sim) Fail(fn string, f Fault) { s.arm("Fail", fn, f, nil) }

// Block arms a fault as [Sim.Fail] does, which also stops the calls: they do not
// return until unblock is called or the Sim is closed. With f.Late they have done
// their work by then, otherwise they have yet to begin. Other calls go on.
// unblock disarms the fault; calling it again does nothing. Each blocked call
// occupies an OS thread.
func (s *Sim) Block(fn string, f Fault) (unblock func()) {
	a := s.arm("Block", fn, f, make(chan struct{}))
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.disarm(a)
	}
}

// FailCall makes call number k since New return a code instead of doing its
// work, whichever function it is. Calls are numbered from 1 as [Sim.TotalCalls]
// counts them: a test can run once to get the count, and then once for each k.
func (s *Sim) FailCall(k int, code cudart.Code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.add(&armedFault{Fault: Fault{Times: 1, Code: code}, export: anyExport, call: int64(k)})
}

// ResetFaults disarms all faults, and lets go on the calls that [Sim.Block]
// stopped. A lost device stays lost.
func (s *Sim) ResetFaults() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.faults.list) > 0 {
		s.disarm(s.faults.list[0])
	}
}

// Calls returns how often a C function was called.
func (s *Sim) Calls(fn string) int {
	if i, ok := s.names[fn]; ok {
		return int(s.faults.calls[i].Load())
	}
	return 0
}

// TotalCalls returns the number of calls of all functions that can fail, which
// are all but cudaGetLastError, cudaPeekAtLastError, cudaGetErrorName and
// cudaGetErrorString.
func (s *Sim) TotalCalls() int { return int(s.faults.total.Load()) }

// OnCall sets a function that runs at the start of every call, on the thread of
// the call, with the C name and the number of this call among those of the
// function. It may use the Sim. Nil removes it.
func (s *Sim) OnCall(f func(fn string, n int)) {
	if f == nil {
		s.faults.hook.Store(nil)
		return
	}
	s.faults.hook.Store(&f)
}

// LoseDevice makes a device fall off the bus: its pending work, and every later
// call that needs it, fail with cudaErrorLaunchFailure. What was allocated there
// stays outstanding. It returns an error if there is no such device.
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

// faults counts the calls and holds the armed faults.
type faults struct {
	calls []atomic.Int64 // by export
	total atomic.Int64
	hook  atomic.Pointer[func(string, int)]
	armed atomic.Bool   // the list is not empty
	list  []*armedFault // under the Sim's mu
}

// anyExport is the export of a fault for every function that can fail.
const anyExport = -1

// An armedFault is a fault that waits for its calls, or that blocks some.
type armedFault struct {
	Fault
	export int           // index of the function, or anyExport
	call   int64         // number of the only call that it is for, 0 for any
	block  chan struct{} // closed to let calls go on; nil for a fault that does not block
}

// arm checks a fault and adds it to the list. method is for errors.
func (s *Sim) arm(method, fn string, f Fault, block chan struct{}) *armedFault {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &armedFault{Fault: f, export: anyExport, block: block}
	var problem string
	if fn != "" {
		export, ok := s.names[fn]
		if ok {
			a.export = export
			problem = exports[export].misfit(f)
		} else {
			problem = "no such function in this version"
		}
	}
	switch {
	case problem != "":
	case f.Async && f.Code == success:
		problem = "Fault.Async needs a Code"
	case f.Transient && !f.Async:
		problem = "Fault.Transient needs Async"
	}
	if problem != "" {
		s.fail("%s: %s(%q): %s", s, method, fn, problem)
		return nil
	}
	if a.Times == 0 {
		a.Times = 1
	}
	s.faults.add(a)
	return a
}

// misfit says why a fault cannot happen to the function, "" where it can.
func (e *export) misfit(f Fault) string {
	switch {
	case f.Stream != 0 && e.stream == 0 && e.event == 0:
		return "Fault.Stream: the function takes no stream and no event"
	case f.Event != 0 && e.event == 0:
		return "Fault.Event: the function takes no event"
	case len(f.Devices) > 0 && e.traits&(withoutDriver|withoutContext) != 0:
		return "Fault.Devices: the function needs no context"
	}
	return ""
}

func (f *faults) add(a *armedFault) {
	f.list = append(f.list, a)
	f.armed.Store(true)
}

// disarm removes a fault and lets the calls go on that it blocks. It needs mu.
func (s *Sim) disarm(a *armedFault) {
	i := slices.Index(s.faults.list, a)
	if i < 0 {
		return
	}
	s.faults.list = slices.Delete(s.faults.list, i, i+1)
	s.faults.armed.Store(len(s.faults.list) > 0)
	if a.block != nil {
		close(a.block)
	}
}

// selects reports whether the fault is for a call.
func (a *armedFault) selects(export int, call int64, device int, stream, event uintptr) bool {
	switch {
	case len(a.Devices) > 0 && !slices.Contains(a.Devices, device):
		return false
	case a.export == anyExport && call == 0, a.export != anyExport && a.export != export:
		return false
	case a.call != 0 && a.call != call:
		return false
	}
	return (a.Stream == 0 || uintptr(a.Stream) == stream) && (a.Event == 0 || uintptr(a.Event) == event)
}

// An injection is what faults do to one call: a hit before its work, one after
// it, and an error for the operation that it enqueues.
type injection struct {
	early, late hit
	async       failure
	after       []func()
}

// A hit delays a call, and decides what it returns.
type hit struct {
	stall  time.Duration
	blocks []chan struct{}
	code   cudart.Code
}

// A failure is how an operation is to fail.
type failure struct {
	code      cudart.Code
	transient bool
}

// strike counts a call and returns what the armed faults do to it.
func (s *Sim) strike(export int, name string, a *arguments) (in injection) {
	f, counted := &s.faults, s.counted[export]
	n := f.calls[counted].Add(1)
	var call int64
	if exports[export].traits&infallible == 0 {
		call = f.total.Add(1)
	}
	if hook := f.hook.Load(); hook != nil && exports[export].traits&hidden == 0 {
		s.callHook(*hook, name, int(n))
	}
	if !f.armed.Load() {
		return in
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stream, event := s.handlesOf(&exports[export], a)
	device := -1
	if exports[export].traits&(withoutDriver|withoutContext) == 0 {
		device = s.thread(s.threads.current()).device
	}
	for _, fault := range slices.Clone(f.list) {
		if !fault.selects(counted, call, device, stream, event) {
			continue
		}
		if fault.Nth--; fault.Nth > 0 || fault.Times == 0 {
			continue
		}
		fault.Times--
		in.add(fault)
		if fault.Times == 0 && fault.block == nil {
			s.disarm(fault)
		}
	}
	return in
}

func (in *injection) add(f *armedFault) {
	h := &in.early
	if f.Late {
		h = &in.late
	}
	h.stall += f.Stall
	if f.block != nil {
		h.blocks = append(h.blocks, f.block)
	}
	switch {
	case f.Async:
		in.async = failure{f.Code, f.Transient}
	case f.Code != success:
		h.code = f.Code
	}
	if f.After != nil {
		in.after = append(in.after, f.After)
	}
}

// handlesOf returns the stream and the event among the arguments of a call, 0 for none. It
// needs mu.
func (s *Sim) handlesOf(e *export, a *arguments) (stream, event uintptr) {
	if e.event > 0 {
		event = a[e.event-1]
		if ev := s.events[event]; ev != nil && ev.record != nil {
			stream = ev.record.stream.handle
		}
	}
	if e.stream > 0 {
		stream = max(a[e.stream-1], streamLegacy)
	}
	return stream, event
}

// delay stalls and blocks the calling thread, without mu. It is false when the
// Sim was closed meanwhile.
func (s *Sim) delay(name string, h hit) bool {
	s.pause(h.stall)
	for _, block := range h.blocks {
		s.mu.Lock()
		s.addBlocked(name, 1)
		s.mu.Unlock()
		select {
		case <-block:
		case <-s.closing:
		}
		s.mu.Lock()
		s.addBlocked(name, -1)
		s.mu.Unlock()
	}
	return !s.life.Sealed()
}

// callHook turns a panic of the test's function into an error of the Sim, since
// a panic on a thread of C's ends the process without a word.
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

// pause sleeps, but not past Close.
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
