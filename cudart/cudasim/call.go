package cudasim

import (
	"fmt"
	"runtime/debug"

	"github.com/gopinned/pinned/cudart"
)

// A thread is what CUDA keeps for one OS thread.
type thread struct {
	id     uint64
	device int
	last   cudart.Code // last error
	inHost bool        // inside a host function
}

// A call is one call from C under way. Handlers run with the Sim's mu held.
type call struct {
	*Sim
	name   string
	a      *arguments
	thread *thread
	dev    *device     // the current one, for exports that need a context
	async  cudart.Code // what the operation that it enqueues is to fail with
}

// ptr, num and i32 are argument i.
func (c *call) ptr(i int) uintptr { return c.a[i] }
func (c *call) num(i int) int     { return int(c.a[i]) }
func (c *call) i32(i int) int     { return int(int32(c.a[i])) }
func (c *call) u32(i int) uint32  { return uint32(c.a[i]) }

// put writes a result through a pointer argument.
func put[T any](c *call, i int, v T) cudart.Code {
	if c.a[i] == 0 {
		return cudart.ErrInvalidValue
	}
	*pointer[T](c.a[i]) = v
	return cudart.Success
}

// dispatch runs a call of an export.
func (s *Sim) dispatch(export int, a *arguments) (r uintptr) {
	if !s.enter() {
		return closedResult(export)
	}
	defer s.leave()
	e := &exports[export]
	name := s.exported[export]
	if name == "" {
		return closedResult(export) // an entry that another version exported
	}
	injected := s.faults.next(s, export, name, e.traits&infallible == 0)
	if e.text != nil {
		return e.text(cudart.Code(int32(a[0])))
	}
	code := s.run(e, name, a, injected)
	for _, after := range injected.after {
		after()
	}
	return result(code)
}

// run makes the call and keeps the thread's last error.
func (s *Sim) run(e *export, name string, a *arguments, injected injection) (code cudart.Code) {
	id := s.threads.current()
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.contexts[id]
	if t == nil {
		t = &thread{id: id}
		s.contexts[id] = t
	}
	defer func() {
		if r := recover(); r != nil {
			s.fail("%s: panic in %s: %v\n%s", s, name, r, debug.Stack())
			code = cudart.ErrUnknown
		}
		if code != cudart.Success && e.traits&keepsLast == 0 {
			t.last = code
		}
	}()
	if t.inHost {
		s.record(Misuse{Kind: CallFromHostFunction, Call: name, Thread: id, Current: t.device, Want: -1,
			Detail: "host functions must not call CUDA"})
		return cudart.ErrNotPermitted
	}
	if injected.code != cudart.Success {
		return injected.code
	}
	c := &call{Sim: s, name: name, a: a, thread: t, async: injected.async}
	if code := c.ready(e); code != cudart.Success {
		return code
	}
	return e.run(c)
}

// ready checks driver and devices, and makes the context that the call needs.
func (c *call) ready(e *export) cudart.Code {
	switch {
	case e.traits&withoutDriver != 0:
		return cudart.Success
	case c.driverTooOld():
		return cudart.ErrInsufficientDriver
	case len(c.devices) == 0:
		return cudart.ErrNoDevice
	case e.traits&withoutContext != 0:
		return cudart.Success
	}
	c.dev = c.devices[c.thread.device]
	return c.dev.makeContext()
}

func (s *Sim) driverTooOld() bool { return s.cfg.DriverVersion.Major() < s.cfg.Version.Major() }

// record keeps something that real CUDA lets pass, or punishes badly. It
// needs mu.
func (s *Sim) record(m Misuse) {
	s.misused++
	if len(s.misuses) < maxMisuses {
		s.misuses = append(s.misuses, m)
	}
}

// misuse records what this call did wrong.
func (c *call) misuse(kind MisuseKind, want int, format string, args ...any) {
	c.record(Misuse{Kind: kind, Call: c.name, Thread: c.thread.id, Current: c.thread.device, Want: want,
		Detail: fmt.Sprintf(format, args...)})
}

// on notes that the call used something of a device: real CUDA mostly accepts
// it, and makes a context on the thread's current device.
func (c *call) on(d *device, what string, h uintptr) {
	if d != c.dev {
		c.misuse(WrongDevice, d.ordinal, "%s %#x belongs to device %d", what, h, d.ordinal)
	}
}
