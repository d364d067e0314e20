package probe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
	"github.com/gopinned/pinned/internal/bounded"
)

// A Prober examines a machine.
type Prober struct {
	Local
	// Isolated makes it use child processes, whose main function passes [Children] to
	// child.Serve. Otherwise it works in this process.
	Isolated bool
}

// The names of the processes' functions.
const (
	openChild   = "probe open"
	deviceChild = "probe device"
	nvmlChild   = "probe nvml"
)

// Children returns the functions of child processes that a Prober starts.
func Children(l Local) map[string]child.Func {
	return map[string]child.Func{
		openChild: child.HandleStream(func(ctx context.Context, r Request, end <-chan struct{}, send func(Opened)) (Opened, error) {
			send(Opened{}) // it has begun
			l := l
			l.Grace = r.Grace
			return l.Open(endContext{ctx, end}, r)
		}),
		deviceChild: child.HandleStream(func(ctx context.Context, r Request, turn <-chan struct{}, send func(Device)) (Device, error) {
			if r.InTurn {
				r.Turn = turn
			}
			return l.Device(ctx, r, send)
		}),
		nvmlChild: child.HandleStream(func(ctx context.Context, r Request, _ <-chan struct{}, send func(NVML)) (NVML, error) {
			return l.NVML(ctx, r, send)
		}),
	}
}

// endContext is a context that ends when a channel is closed.
type endContext struct {
	context.Context
	end <-chan struct{}
}

func (c endContext) Done() <-chan struct{} { return c.end }

func (c endContext) Err() error {
	select {
	case <-c.end:
		return context.Canceled
	default:
		return nil
	}
}

// noTimeout stands for no limit of the whole child: silence ends it.
const noTimeout = 1000 * time.Hour

// Open is [Local.Open].
func (p Prober) Open(ctx context.Context, r Request) (Opened, error) {
	if err := bounded.Ended(ctx); err != nil {
		return Opened{}, err // no call was made that could hang
	}
	if !p.Isolated {
		return p.Local.Open(ctx, r)
	}
	began := time.Now()
	limit := p.limit(openLimit)
	extended, stop := bounded.Extend(ctx, p.grace())
	defer stop()
	r.Grace = p.grace() * 3 / 4 // the answer takes a while, too
	// The limit of the process begins when it has: on a busy host it starts late, and would not be heard to the end.
	listening, heard, stopListening := listen(extended, limit+bounded.Grace, limit+bounded.Grace, child.ErrTimeout)
	defer stopListening()
	// The process learns of ctx's end by its turn, and names the call that it is in.
	out, err := child.Stream(listening, noTimeout, openChild, r, ctx.Done(), func(Opened) { heard() })
	probe, err := outcome(ctx, err, true, unreturned(ctx, "", time.Since(began), limit))
	if probe.State == "" && err == nil {
		if out.Facts != nil && ctx.Err() != nil {
			for i := range out.Facts.Probes { // the process does not know why
				if p := &out.Facts.Probes[i]; p.State == doctor.ProbeUnfinished {
					p.Detail = unreturned(ctx, p.Call, time.Since(began), limit).Detail
				}
			}
		}
		return out, nil
	}
	if probe.State == "" {
		return Opened{}, err
	}
	probe.Name, probe.Stage, probe.Seconds = probeCUDA, doctor.StageOpen, time.Since(began).Seconds()
	facts := doctor.WithoutAnswer(probe, p.ReadHost())
	facts.Simulated = r.Simulate
	return Opened{Facts: facts}, nil
}

// Device is [Local.Device].
func (p Prober) Device(ctx context.Context, r Request, show func(Device)) (Device, error) {
	if !p.Isolated {
		return p.Local.Device(ctx, r, show)
	}
	began := time.Now()
	silence := cmp.Or(p.Silence, silenceLimit)
	limit := p.limit(openLimit) + silence // the first answer comes when the library is open
	listening, heard, stop := listen(ctx, limit, silence, errSilent)
	defer stop()
	r.InTurn = r.Turn != nil
	out, err := child.Stream(listening, noTimeout, deviceChild, r, r.Turn, func(d Device) {
		limit = silence
		heard()
		show(d)
	})
	if err == nil {
		return out, nil
	}
	call := strings.Join(out.Inside, ", ")
	hung := unreturned(ctx, call, 0, limit)
	if errors.Is(err, errSilent) {
		err = child.ErrTimeout
		hung = doctor.Probe{State: doctor.ProbeHung, Detail: fmt.Sprintf("its process sent nothing for %v", limit)}
	}
	probe, err := outcome(ctx, err, call != "", hung) // else it was at work, and in no call for long
	probe.Call = call
	out.Facts.Ordinal = r.Device
	if out.Stage == "" { // it has sent nothing
		out.Stage = doctor.StageOpen
	}
	if probe.State != "" {
		out.ended(r.probe(), probe, time.Since(began))
	}
	return out, err
}

// NVML is [Local.NVML], which in this process may not return.
func (p Prober) NVML(ctx context.Context, r Request) (NVML, error) {
	if !p.Isolated {
		return p.Local.NVML(ctx, r, func(NVML) {})
	}
	began := time.Now()
	limit := p.limit(nvmlCallLimit)
	var newest *nvml.Report
	extended, stop := bounded.Extend(ctx, p.grace())
	defer stop()
	listening, heard, stopListening := listen(extended, limit, limit, errSilent)
	defer stopListening()
	out, err := child.Stream(listening, nvmlCalls*limit, nvmlChild, r, nil, func(now NVML) {
		heard() // of a call that returned, and another one that begins
		if now.Report != nil {
			newest = now.Report
		}
	})
	if out.Report == nil {
		out.Report = newest
	}
	if errors.Is(err, child.ErrTimeout) { // each call returns, and all take long: none hangs
		out.Probe.State, out.Probe.Seconds = doctor.ProbeFailed, time.Since(began).Seconds()
		out.Probe.Detail = fmt.Sprintf("not done in %v", nvmlCalls*limit)
		return out, nil
	}
	if errors.Is(err, errSilent) {
		err = child.ErrTimeout
	}
	probe, err := outcome(ctx, err, out.Probe.Call != "", unreturned(ctx, "", 0, limit))
	if probe.State != "" {
		probe.Name, probe.Stage, probe.Call, probe.Seconds = probeNVML, doctor.StageNVML, out.Probe.Call, time.Since(began).Seconds()
		out.Probe = probe
	}
	return out, err
}

// outcome maps the error of a child process to a probe: without a State if it answered, hung if
// it did not, crashed or killed if it died, not started if it never came to its work. A context that ended is no error, and without a State
// if no call was under way.
func outcome(ctx context.Context, err error, calling bool, hung doctor.Probe) (doctor.Probe, error) {
	start := (*child.StartError)(nil)
	switch crash := (*exec.ExitError)(nil); {
	case err == nil:
	case errors.As(err, &start):
		return doctor.Probe{State: doctor.ProbeNotStarted, Detail: start.Error()}, nil
	case ctx.Err() != nil && !calling:
		return doctor.Probe{}, nil
	case ctx.Err() != nil, errors.Is(err, child.ErrTimeout):
		return hung, nil
	case child.Killed(err):
		return doctor.Probe{State: doctor.ProbeKilled, Detail: err.Error()}, nil
	case errors.As(err, &crash):
		return doctor.Probe{State: doctor.ProbeCrashed, Detail: err.Error()}, nil
	}
	return doctor.Probe{}, err
}

// silentTicks is the number of ticks without an answer after which a child process counts as hung.
const silentTicks = 15

// silenceOf counts the ticks of this process in which a child process has sent nothing, or the
// library does not open. It counts ticks and not time, because processes stop after Ctrl-Z and in a
// frozen control group.
type silenceOf struct{ left atomic.Int64 }

// allow sets the number of ticks that may pass without an answer.
func (s *silenceOf) allow(ticks int) { s.left.Store(int64(ticks)) }

// errSilent is the cause of a context that ends because a process has sent nothing for too long.
var errSilent = errors.New("silent")

// listen returns a context that ends with cause if heard is not called in time: within first at
// the beginning, and within then after each call.
func listen(ctx context.Context, first, then time.Duration, cause error) (listening context.Context, heard, stop func()) {
	listening, cancel := context.WithCancelCause(ctx)
	tick := then / silentTicks
	ticker := time.NewTicker(tick)
	allowance := new(silenceOf)
	allowance.allow(int(first / tick))
	go allowance.watch(listening, ticker.C, func() { cancel(cause) })
	return listening, func() { allowance.allow(silentTicks) }, func() { ticker.Stop(); cancel(nil) }
}

// watch calls tooLong once the allowed ticks have passed. It returns then, or when ctx ends.
func (s *silenceOf) watch(ctx context.Context, ticks <-chan time.Time, tooLong func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
			if s.left.Add(-1) < 0 {
				tooLong()
				return
			}
		}
	}
}
