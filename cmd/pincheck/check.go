package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bench"
	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/internal/report"
	"github.com/gopinned/pinned/verify"
)

// A session is one run of a command. Its result is complete data at every moment.
type session struct {
	*options
	cmd      *cobra.Command
	sys      system
	format   report.Format
	result   *report.Result
	progress *report.Progress // nil shows nothing
	seen     *outside
}

// produce runs a command: do fills the session's result until ctx ends, and the result is
// written whatever happened, unless the call itself was wrong. Judged is whether the
// command looks for findings.
func (o *options) produce(cmd *cobra.Command, sys system, name string, judged bool, do func(context.Context, *session) error) error {
	format, err := o.validate()
	if err != nil {
		return err
	}
	r := &report.Result{Command: name, Tool: tool(), Started: time.Now().UTC()}
	if !o.noHostName && sys.hostname != nil {
		r.HostName, _ = sys.hostname() // a host without a name has none in its reports
	}
	ctx := cmd.Context()
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done after %v (--timeout)", o.timeout))
		defer cancel()
	}
	s := &session{options: o, cmd: cmd, sys: sys, format: format, result: r, seen: &outside{}}
	if err = context.Cause(ctx); err == nil {
		err = s.bounded(ctx, do)
		r = s.result
	}
	s.seen.progress.Load().Close()
	switch usage := (usageError{}); {
	case errors.As(err, &usage):
		return err
	case err == nil:
		r.Complete = true
	case cmd.Context().Err() != nil:
		r.Stopped = "interrupted"
	case ctx.Err() != nil:
		r.Stopped = context.Cause(ctx).Error()
	default:
		r.Complete = true
		r.Errors = append(r.Errors, err.Error())
	}
	r.Seconds = time.Since(r.Started).Seconds()
	r.Conclude(judged, o.ignore...)
	if o.npd {
		return writeNPD(cmd.OutOrStdout(), r)
	}
	return s.write()
}

// write writes the result and returns its verdict as an error.
func (s *session) write() error {
	if err := s.emit(s.cmd, s.sys, func(w io.Writer, style report.Style) error {
		return report.Write(w, s.result, s.format, style)
	}); err != nil {
		return err
	}
	return judged{s.result, s.failOn(), s.cmd.Context().Err() != nil}
}

// emit calls write for the standard output, or for the file of --output.
func (o *options) emit(cmd *cobra.Command, sys system, write func(io.Writer, report.Style) error) error {
	out := cmd.OutOrStdout()
	if o.output == "" {
		if err := write(out, report.StyleFor(out, sys.getenv)); err != nil {
			return outputError{err}
		}
		return nil
	}
	var b bytes.Buffer
	err := write(&b, report.Style{})
	if err == nil {
		err = report.WriteFile(o.output, b.Bytes())
	}
	if err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	return nil
}

// show starts the display of progress.
func (s *session) show() {
	if !s.quiet && s.progress == nil {
		s.progress = report.NewProgress(s.cmd.ErrOrStderr())
		s.seen.progress.Store(s.progress)
	}
}

// withDevices opens the library, puts the facts into the result, and calls do with the
// devices that were chosen, if there are any. Having no GPU is a fact, not an error.
func (s *session) withDevices(ctx context.Context, do func(devices []*cudart.Device, readHost func() *hostinfo.Host) error) error {
	library := cudart.Options{Library: s.library}
	readHost := func() *hostinfo.Host { return hostinfo.Read(s.sys.root, s.sys.environ) }
	if s.sim {
		sim, unsupported := newSimulation()
		if unsupported != nil {
			s.result.Facts = &doctor.Facts{Host: readHost(), Devices: []doctor.Device{}}
			return unsupported
		}
		// After rt.Close below. What it still counts would be a leak of pincheck.
		defer s.closing(sim.Close)
		library = cudart.Options{Source: sim}
		readHost = func() *hostinfo.Host { return simulatedHost(s.sys) }
	}
	rt, err := s.sys.open(ctx, library)
	if failed := (*cudart.OpenError)(nil); errors.As(err, &failed) {
		// Having no GPU is a result, not an error of this run. So is a driver that hangs,
		// which is why there are facts of a run that had no time for more.
		cause := context.Cause(ctx)
		if cause == nil || doctor.Hangs(failed) {
			s.result.Facts = doctor.WithoutLibrary(failed, readHost())
			s.result.ExpectedGPUs, s.result.ExpectedRate = s.expectGPUs, s.expectRate
		}
		return cause
	}
	if err != nil {
		s.result.Facts = &doctor.Facts{Host: readHost(), Devices: []doctor.Device{}}
		return err
	}
	defer s.closing(rt.Close)
	s.seen.runtime.Store(rt)
	devices, err := s.devices.choose(rt.Devices())
	if err != nil {
		return err
	}
	host := readHost()
	s.result.Facts = &doctor.Facts{Host: host, Devices: []doctor.Device{}}
	s.publish()
	s.result.Facts = doctor.Gather(rt, devices, host)
	s.result.ExpectedGPUs, s.result.ExpectedRate = s.expectGPUs, s.expectRate
	s.publish()
	if len(devices) == 0 {
		return nil
	}
	return do(devices, readHost)
}

// closing adds the error of close to the result's.
func (s *session) closing(close func() error) {
	if err := close(); err != nil {
		s.result.Errors = append(s.result.Errors, err.Error())
	}
}

// steps are what a command does with each GPU.
type steps struct{ verify, full, bandwidth bool }

// plans are the plans of the steps.
type plans struct {
	verify    verify.Plan
	bandwidth bench.LinkPlan
}

// check does the steps with each GPU.
func (s *session) check(ctx context.Context, steps steps) error {
	plans := plans{verify: verify.Plan{Full: steps.full}}
	if s.sim {
		plans = simulatedPlans(steps)
	}
	if s.sys.adjust != nil {
		plans = s.sys.adjust(plans)
	}
	return s.withDevices(ctx, func(devices []*cudart.Device, readHost func() *hostinfo.Host) error {
		if !s.sim && steps.bandwidth {
			s.result.Processes = doctor.Processes(s.sys.root)
		}
		if steps.verify || steps.bandwidth {
			s.show()
		}
		for i, d := range devices {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			out := &s.result.Devices[i]
			if err := s.device(ctx, d, out, steps, plans, share{i, len(devices)}); err != nil {
				return err
			}
			if steps.bandwidth {
				out.Relink(readHost())
			}
			s.publish()
		}
		return nil
	})
}

// share is one of several equal parts of a run.
type share struct{ i, n int }

// of returns the share of the whole that is done when a share of this part is.
func (s share) of(part float64) float64 { return (float64(s.i) + part) / float64(s.n) }

// device does the steps on one GPU. A failure is recorded with the GPU; only the end of
// ctx is an error, and what was found until then is in out.
func (s *session) device(ctx context.Context, d *cudart.Device, out *doctor.Device, steps steps, plans plans, of share) error {
	gpu := fmt.Sprintf("GPU %d", d.Ordinal())
	verifyShare := 1.0
	if steps.bandwidth {
		verifyShare = 0.8
	}
	if steps.verify {
		p, began := plans.verify, time.Now()
		shown := p.Progress
		p.Progress = func(at verify.Progress) {
			if shown != nil {
				shown(at)
			}
			done := float64(at.BytesDone) / float64(max(at.BytesTotal, 1))
			var left time.Duration
			if done > 0.02 { // by the time so far; the first, small ones say nothing
				left = time.Duration(float64(time.Since(began)) * (1 - done) / done)
			}
			s.progress.Show(report.At{What: gpu + ", " + at.Case.String(), Share: of.of(verifyShare * done), Left: left})
		}
		r, err := verify.Run(ctx, d, p)
		if ctx.Err() == nil || r != nil && (r.Cases > 0 || r.FailureCount > 0) {
			out.Verify = r
		}
		if err != nil {
			return note(ctx, out, err)
		}
	}
	if steps.bandwidth {
		s.progress.Show(report.At{What: gpu + ", bandwidth", Share: of.of(verifyShare)})
		env := measure.Env{Devices: []*cudart.Device{d}}
		r, err := measure.Run(ctx, bench.Link(plans.bandwidth), env, nil)
		if r != nil && (len(r.Series) > 0 || ctx.Err() == nil) {
			out.Bandwidth = r
		}
		if err != nil {
			return note(ctx, out, err)
		}
		if s.result.Simulated { // it has the times of the simulator
			return nil
		}
		r, err = measure.Run(ctx, bench.Trials(of.i == 0), env, nil)
		if r != nil && (len(r.Series) > 0 || ctx.Err() == nil) {
			out.Trials = r
		}
		if err != nil {
			return note(ctx, out, err)
		}
	}
	return nil
}

// note records an error with the GPU, and returns the cause if it is that ctx ended.
func note(ctx context.Context, out *doctor.Device, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		if !errors.Is(err, cause) && !errors.Is(err, ctx.Err()) {
			out.Errors = append(out.Errors, err.Error())
		}
		return cause
	}
	out.Errors = append(out.Errors, err.Error())
	return nil
}
