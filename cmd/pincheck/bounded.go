package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/report"
)

// usualPatience is how long a run may go on after its end, to release what it has.
const usualPatience = 2 * time.Second

// outside is what can be seen of a run from outside, while a call into the driver does not
// return.
type outside struct {
	result   atomic.Pointer[report.Result]
	runtime  atomic.Pointer[cudart.Runtime]
	progress atomic.Pointer[report.Progress]
}

// publish makes the result, as it is now, that of a run that hangs from here on.
func (s *session) publish() {
	r := *s.result
	r.Errors, r.Benches = slices.Clone(r.Errors), slices.Clone(r.Benches)
	if r.Facts != nil {
		f := *r.Facts
		f.Devices = slices.Clone(f.Devices)
		r.Facts = &f
	}
	s.seen.result.Store(&r)
}

// bounded calls do, which fills the session's result. Calls into a driver that hangs do not
// return, and no signal ends them. So do works beside: if it has not come back a little
// after ctx has ended, it is left alone, and the result is what it had published, with the
// calls that hang.
func (s *session) bounded(ctx context.Context, do func(context.Context, *session) error) error {
	began, patience := time.Now(), cmp.Or(s.sys.patience, usualPatience)
	s.publish()
	worker := *s
	own := *s.result
	worker.result = &own
	ended := make(chan error, 1)
	go func() { ended <- do(ctx, &worker) }()
	select {
	case err := <-ended:
		s.result = worker.result
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		s.result = worker.result
		return err
	case <-time.After(patience):
	}
	s.result = s.seen.result.Load()
	rt := s.seen.runtime.Load()
	if rt == nil {
		return context.Cause(ctx) // what opens a library ends with ctx
	}
	if s.result.Facts == nil {
		s.result.Facts = &doctor.Facts{Devices: []doctor.Device{}}
	}
	for _, c := range rt.Stuck(context.Background(), 0) {
		s.result.Probes = append(s.result.Probes, doctor.Probe{
			Name: "cuda", Call: c.String(), State: doctor.ProbeHung, Seconds: time.Since(began).Seconds(),
			Detail: fmt.Sprintf("it had not returned %v after the end of the run", patience),
		})
	}
	return context.Cause(ctx)
}
