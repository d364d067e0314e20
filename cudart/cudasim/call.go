package cudasim

import (
	"fmt"
	"runtime/debug"

	"github.com/gopinned/pinned/cudart"
)

// A thread is the state that CUDA has for one OS thread.
type thread struct {
	id      uint64
	device  int         // the current one
	context *device     // with libcuda: the device whose context is current, nil for none
	last    cudart.Code // last error
	inHost  bool        // inside a host function
}

// A call is one call from C. Its methods run with the Sim's mu held.
type call struct {
	*Sim
	name   string
	a      *arguments
	thread *thread
	dev    *device // the current one, for exports that need a context
	async  failure // of the first operation that it enqueues
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
	return success
}

// dispatch runs a call of an export.
func (s *Sim) dispatch(export int, a *arguments) uintptr {
	if !s.life.Begin() {
		return closedResult(export)
	}
	defer s.life.End()
	e := &exports[export]
	name := s.exported[export]
	if name == "" {
		return closedResult(export) // an entry of another version
	}
	id := s.threads.current()
	if code := s.unattached(e, id); code != success {
		return result(code)
	}
	in := s.strike(export, name, a)
	if !s.delay(name, in.early) {
		return closedResult(export)
	}
	if e.text != nil {
		return e.text(cudart.Code(int32(a[0])))
	}
	code := s.run(e, name, a, id, in)
	if !s.delay(name, in.late) {
		return closedResult(export)
	}
	if code == success && in.late.code != success {
		code = in.late.code
		s.mu.Lock()
		s.thread(id).keep(e, code)
		s.mu.Unlock()
	}
	for _, after := range in.after {
		after()
	}
	return result(code)
}

// thread is the state of the thread with a number. It needs mu.
func (s *Sim) thread(id uint64) *thread {
	t := s.contexts[id]
	if t == nil {
		t = &thread{id: id}
		s.contexts[id] = t
	}
	return t
}

// keep makes the result of a call the thread's last error, if it is an error.
func (t *thread) keep(e *export, code cudart.Code) {
	if code != success && e.traits&keepsLast == 0 {
		t.last = code
	}
}

// run does the work of a call.
func (s *Sim) run(e *export, name string, a *arguments, id uint64, in injection) (code cudart.Code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.thread(id)
	defer func() {
		if r := recover(); r != nil {
			s.fail("%s: panic in %s: %v\n%s", s, name, r, debug.Stack())
			code = cudart.ErrUnknown
		}
		t.keep(e, code)
	}()
	if t.inHost {
		s.record(Misuse{Kind: callFromHostFunction, Call: name, Thread: t.id, Current: t.device, Want: -1,
			Detail: "host functions must not call CUDA"})
		return cudart.ErrNotPermitted
	}
	if in.early.code != success {
		return in.early.code
	}
	c := &call{Sim: s, name: name, a: a, thread: t, async: in.async}
	if code := c.ready(e); code != success {
		return code
	}
	return e.run(c)
}

// ready checks driver and devices, and makes the context that the call needs.
func (c *call) ready(e *export) cudart.Code {
	switch {
	case e.traits&withoutDriver != 0:
		return success
	case c.cfg.API == cudart.DriverAPI:
		return c.readyDriver(e)
	case c.driverTooOld():
		return cudart.ErrInsufficientDriver
	case len(c.devices) == 0:
		return cudart.ErrNoDevice
	case e.traits&withoutContext != 0:
		return success
	}
	c.dev = c.devices[c.thread.device]
	return c.dev.makeContext()
}

func (s *Sim) driverTooOld() bool { return s.cfg.DriverVersion.Major() < s.cfg.Version.Major() }

// record keeps a misuse. It needs mu.
func (s *Sim) record(m Misuse) {
	s.misused++
	if len(s.misuses) < maxMisuses {
		s.misuses = append(s.misuses, m)
	}
}

// misuse records a misuse by this call.
func (c *call) misuse(kind string, want int, format string, args ...any) {
	c.record(Misuse{Kind: kind, Call: c.name, Thread: c.thread.id, Current: c.thread.device, Want: want,
		Detail: fmt.Sprintf(format, args...)})
}

// on records a misuse if the call used something of another device than the
// current one.
func (c *call) on(d *device, what string, h uintptr) {
	if d != c.dev {
		c.misuse(wrongDevice, d.ordinal, "%s %#x belongs to device %d", what, h, d.ordinal)
	}
}

const success cudart.Code = 0
