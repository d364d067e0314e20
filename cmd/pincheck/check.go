package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/internal/report"
	"github.com/gopinned/pinned/verify"
)

// steps are what a command does with each GPU.
type steps struct {
	verify, full, bandwidth bool
	progress                bool // shown while round trips are made
	judge                   bool
}

// plans are the plans of the steps.
type plans struct {
	verify    verify.Plan
	bandwidth measure.Plan
}

// check finds the GPUs, does the steps, writes the result and returns the verdict.
func (o *options) check(cmd *cobra.Command, sys system, name string, s steps) (err error) {
	format, err := report.ParseFormat(o.format)
	if err != nil {
		return usageError{err}
	}
	if err := o.validate(); err != nil {
		return err
	}
	ctx := cmd.Context()
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done after %v (--timeout)", o.timeout))
		defer cancel()
	}
	facts, err := o.examine(ctx, cmd, sys, s)
	if err != nil {
		return err
	}
	r := &report.Result{Command: name, Tool: tool(), Facts: facts}
	verdict := doctor.Healthy
	if s.judge || len(facts.Devices) == 0 {
		verdict, r.Findings = doctor.Check(facts)
		r.Verdict = verdict
	}
	out := cmd.OutOrStdout()
	if o.npd {
		return writeNPD(out, r)
	}
	if err := report.Write(out, r, format, report.StyleFor(out, sys.getenv)); err != nil {
		return err
	}
	return judged{verdict}
}

// validate checks the flags before anything is loaded.
func (o *options) validate() error {
	if o.timeout < 0 {
		return usagef("--timeout %v: must not be negative", o.timeout)
	}
	if n, err := strconv.Atoi(o.device); o.device != "all" && (err != nil || n < 0) {
		return usagef("--device %q: must be all, or a number from 0 on", o.device)
	}
	if o.library == "" {
		return nil
	}
	if o.sim {
		return usagef("--library and --sim exclude each other: the simulated GPU has its own library")
	}
	// The dynamic loader looks for a bare name; a path must exist.
	if strings.ContainsRune(o.library, os.PathSeparator) {
		if info, err := os.Stat(o.library); err != nil {
			return usagef("--library: %w", err)
		} else if info.IsDir() {
			return usagef("--library %s: is a directory, not a library", o.library)
		}
	}
	return nil
}

// examine collects the facts. Having no GPU is a fact, not an error.
func (o *options) examine(ctx context.Context, cmd *cobra.Command, sys system, s steps) (facts *doctor.Facts, err error) {
	library := cudart.Options{Library: o.library}
	plans := plans{verify: verify.Plan{Full: s.full}}
	readHost := func() *hostinfo.Host { return hostinfo.Read(sys.root, sys.environ) }
	if o.sim {
		sim, unsupported := newSimulation()
		if unsupported != nil {
			return nil, noGPUError{unsupported}
		}
		// After rt.Close below. What it still counts would be a leak of pincheck.
		defer closing(&err, sim.Close)
		library, plans = cudart.Options{Source: sim}, simulatedPlans(s)
		readHost = func() *hostinfo.Host { return simulatedHost(sys) }
	}
	if sys.adjust != nil {
		plans = sys.adjust(plans)
	}
	rt, err := sys.open(library)
	switch failed := (*cudart.OpenError)(nil); {
	case errors.As(err, &failed):
		// Having no GPU is a result, not an error of this run.
		return doctor.WithoutLibrary(failed, readHost()), nil
	case err != nil:
		return nil, noGPUError{err}
	}
	defer closing(&err, rt.Close)

	devices, err := o.choose(rt)
	if err != nil {
		return nil, err
	}
	facts = doctor.Gather(rt, devices, readHost())
	for i, d := range devices {
		out := &facts.Devices[i]
		if err := examineDevice(ctx, cmd, d, out, s, plans); err != nil {
			return nil, err
		}
		if s.bandwidth {
			out.Relink(readHost())
		}
	}
	return facts, nil
}

// closing adds the error of close to err.
func closing(err *error, close func() error) { *err = errors.Join(*err, close()) }

// choose returns the GPUs that --device names, or none if there are none.
func (o *options) choose(rt *cudart.Runtime) ([]*cudart.Device, error) {
	all := rt.Devices()
	if o.device == "all" || len(all) == 0 {
		return all, nil
	}
	n, err := strconv.Atoi(o.device)
	if err != nil {
		return nil, usagef("--device %q: %w", o.device, err)
	}
	if n >= len(all) {
		return nil, usagef("--device %d: there is no such GPU; this process sees %s", n, ordinals(len(all)))
	}
	return all[n : n+1], nil
}

func ordinals(n int) string {
	if n == 1 {
		return "only GPU 0"
	}
	return fmt.Sprintf("GPUs 0 to %d", n-1)
}

// examineDevice does the steps on one GPU. A failure is recorded with the GPU; only an
// interruption is an error.
func examineDevice(ctx context.Context, cmd *cobra.Command, d *cudart.Device, out *doctor.Device, s steps, plans plans) error {
	if s.verify {
		p := plans.verify
		if s.progress {
			stderr := cmd.ErrOrStderr()
			progress := report.NewProgress(stderr, report.IsTerminal(stderr), fmt.Sprintf("GPU %d", d.Ordinal()))
			defer progress.Close()
			p.Progress = progress.Show
		}
		var err error
		if out.Verify, err = verify.Run(ctx, d, p); err != nil {
			return note(ctx, cmd, out, err)
		}
	}
	if s.bandwidth {
		var err error
		if out.Bandwidth, err = measure.Bandwidth(ctx, d, plans.bandwidth); err != nil {
			return note(ctx, cmd, out, err)
		}
	}
	return nil
}

// note records an error with the GPU, and returns it if the user interrupted.
func note(ctx context.Context, cmd *cobra.Command, out *doctor.Device, err error) error {
	if cmd.Context().Err() != nil {
		return err
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	out.Errors = append(out.Errors, err.Error())
	return nil
}
