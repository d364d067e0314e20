package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A session is one run of a command. Its result can be written at any time.
//
//	state    entered by                   | change       | show
//	running                               | changes      | shows
//	sealed   runBounded, if the command   | does nothing | does nothing
//	         has not returned in time;    |              |
//	         end                          |              |
//
// mu guards the state, what result points to while a command runs, and the display of
// progress. What runs in several goroutines, GPU by GPU, uses change and show.
type session struct {
	*options
	cmd    *cobra.Command
	sys    system
	format report.Format
	result *report.Result
	// slowHealth is whether reading NVML took more than slowNVML. GPUs are measured, and NVML
	// read after each, one at a time.
	slowHealth bool

	mu       sync.Mutex
	sealed   bool
	runtime  *cudart.Runtime
	progress *progress // nil shows nothing
}

// change calls do to change the result, unless the result is sealed.
func (s *session) change(do func(r *report.Result)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sealed {
		do(s.result)
	}
}

// releaseGrace is the time that a command has after its context ended, to release what it
// holds. callGrace is how long calls may take that are under way then, and is less: a run that is
// ended ends within a second.
const (
	releaseGrace = 900 * time.Millisecond
	callGrace    = 600 * time.Millisecond
)

// runBounded runs do, and returns its error. If do is still inside a driver call when the grace
// period after ctx's end is over, runBounded seals the result, records the stuck calls, and
// returns ctx's error.
func (s *session) runBounded(ctx context.Context, do func(context.Context, *session) error) error {
	grace := cmp.Or(s.sys.releaseGrace, releaseGrace)
	returned, stuck := bounded.Do(ctx, bounded.Call[error]{Grace: grace, Run: func() (error, error) { return do(ctx, s), nil }})
	if stuck == nil {
		return returned
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sealed = true
	if s.runtime == nil {
		return stuck
	}
	if s.result.Facts == nil {
		s.result.Facts = &doctor.Facts{Devices: []doctor.Device{}}
	}
	for _, call := range s.runtime.Stuck(context.Background(), 0) {
		s.result.Probes = append(s.result.Probes, doctor.Probe{
			Name: "cuda", Call: call.String(), State: doctor.ProbeUnfinished, Seconds: time.Since(s.result.Started).Seconds(),
			Detail: fmt.Sprintf("had not returned %v after the end of the run", grace),
		})
	}
	return stuck
}

// produce runs a command. do fills the session's result until ctx ends. The result is always
// written, except after wrong usage. If evaluate is set, findings are searched for.
func (o *options) produce(cmd *cobra.Command, sys system, name string, evaluate bool, do func(context.Context, *session) error) error {
	o.tickets = evaluate
	s, err := o.fill(cmd, sys, name, do)
	if err != nil {
		return err
	}
	s.result.Conclude(evaluate, o.ignore...)
	if o.npd {
		return writeNPD(cmd.OutOrStdout(), s.result)
	}
	return s.write()
}

// withTimeout returns a context that --timeout ends.
func (o *options) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if o.timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done after %v (--timeout)", o.timeout))
}

// endedError is why a command ended that has no result to write.
type endedError struct {
	error
	interrupted bool
}

// until calls do, which writes nothing, until the command is interrupted or --timeout ends it: do may
// read a pipe, or compute for long, and knows no context.
func until[T any](o *options, cmd *cobra.Command, do func() (T, error)) (T, error) {
	ctx, cancel := o.withTimeout(cmd.Context())
	defer cancel()
	got, err := bounded.Do(ctx, bounded.Call[T]{Grace: bounded.NoGrace, Run: do})
	if !errors.Is(err, bounded.ErrStuck) {
		return got, err
	}
	interrupted := cmd.Context().Err() != nil
	if err = context.Cause(ctx); interrupted {
		err = errors.New("interrupted")
	}
	return got, endedError{fmt.Errorf("%s: %w, nothing is written", cmd.Name(), err), interrupted}
}

// fill runs a command until ctx ends, and returns its session with the result. The error
// is that of a wrong call.
func (o *options) fill(cmd *cobra.Command, sys system, name string, do func(context.Context, *session) error) (*session, error) {
	format, err := o.validate()
	if err != nil {
		return nil, err
	}
	r := &report.Result{Command: name, Tool: tool(), Started: time.Now().UTC()}
	if !o.noHostName && sys.hostname != nil {
		r.HostName, _ = sys.hostname() // a host without a name has none in its reports
	}
	ctx, cancel := o.withTimeout(cmd.Context())
	defer cancel()
	s := &session{options: o, cmd: cmd, sys: sys, format: format, result: r}
	if err = bounded.Ended(ctx); err == nil {
		err = s.runBounded(ctx, do)
	}
	s.end()
	usage, stopped := usageError{}, stoppedRun("")
	switch {
	case errors.As(err, &usage):
		return nil, err
	case errors.As(err, &stopped):
		r.Stopped = stopped.Error()
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
	return s, nil
}

// write writes the result, and returns its verdict as a verdictError.
func (s *session) write() error {
	if err := s.emit(s.cmd, s.sys, func(w io.Writer, style report.Style) error {
		return report.Write(w, s.result, s.format, style)
	}); err != nil {
		return err
	}
	return verdictError{s.result, s.failOn(), s.cmd.Context().Err() != nil}
}

// emit calls write for the standard output, or for the file of --output.
func (o *options) emit(cmd *cobra.Command, sys system, write func(io.Writer, report.Style) error) error {
	out := cmd.OutOrStdout()
	if o.output == "" {
		style := report.StyleFor(out, sys.getenv)
		style.Verbose = o.verbose
		return afterWriting(write(out, style))
	}
	var b bytes.Buffer
	err := write(&b, report.Style{Verbose: o.verbose})
	if err == nil {
		err = writeFile(o.output, b.Bytes())
	}
	if err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	return nil
}

// show displays the progress of the command.
func (s *session) show(at report.At) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.showLocked(at)
}

// showLocked is show with s.mu held.
func (s *session) showLocked(at report.At) {
	if s.quiet || s.sealed {
		return
	}
	if s.progress == nil {
		s.progress = newProgress(s.cmd.ErrOrStderr(), s.sys.getenv)
	}
	s.progress.show(at)
}

// hide removes the display of progress, before something else is written to standard error.
func (s *session) hide() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.close()
	s.progress = nil
}

// end seals the result, and removes the display of progress.
func (s *session) end() {
	s.mu.Lock()
	s.sealed = true
	s.mu.Unlock()
	s.hide()
}

// withDevices opens the library in this process, puts the facts into the result, and calls do with
// the chosen devices, if there are any. A missing GPU is a fact, not an error.
func (s *session) withDevices(ctx context.Context, do func(devices []*cudart.Device) error) error {
	library := cudart.Options{Library: s.library}
	if s.sim {
		sim, unsupported := probe.NewSimulation()
		if unsupported != nil {
			s.setFacts(&doctor.Facts{Host: s.readHost(), Devices: []doctor.Device{}})
			return unsupported
		}
		// After rt.Close below. What it still counts would be a leak of pincheck.
		defer s.closing(sim.Close)
		library = cudart.Options{Source: sim}
	}
	began := time.Now()
	rt, err := s.sys.open(ctx, library)
	if failed := (*cudart.OpenError)(nil); errors.As(err, &failed) {
		// Having no GPU is a result, not an error of this run. So is a call that had not
		// returned, which is why there are facts of a run that had no time for more.
		switch {
		case failed.Stuck != "":
			s.setFacts(probe.Local{}.NotOpened(ctx, failed, s.readHost(), time.Since(began)))
		case ctx.Err() == nil:
			s.setFacts(doctor.WithoutLibrary(failed, s.readHost()))
		}
		return bounded.Ended(ctx)
	}
	if err != nil {
		s.setFacts(&doctor.Facts{Host: s.readHost(), Devices: []doctor.Device{}})
		return err
	}
	defer s.closing(rt.Close)
	s.mu.Lock()
	s.runtime = rt
	s.mu.Unlock()
	facts := doctor.Gather(rt)
	facts.SetHost(s.readHost())
	if err = s.devices.choose(facts); err != nil {
		return err
	}
	var devices []*cudart.Device
	for i := range facts.Devices {
		dev, err := rt.Device(facts.Devices[i].Ordinal)
		if err != nil {
			return err
		}
		devices = append(devices, dev)
	}
	s.setFacts(facts)
	for i, dev := range devices { // this may hang
		read := facts.Devices[i]
		read.ReadMemory(dev)
		s.change(func(*report.Result) { facts.Devices[i] = read })
	}
	if len(devices) == 0 {
		return nil
	}
	return do(devices)
}

// setFacts puts facts into the result, with the expectations of the user's flags.
func (s *session) setFacts(f *doctor.Facts) {
	f.ExpectedGPUs, f.ExpectedRate = s.expectGPUs, s.expectRate
	s.change(func(r *report.Result) { r.Facts = f })
}

// checkExpectation refuses an expectation of the user that no GPU can meet, and says of which GPUs that is
// not known.
func (s *session) checkExpectation(f *doctor.Facts) error {
	if s.expectRate == 0 || len(f.Devices) == 0 {
		return nil
	}
	refused, unknown := f.Refused(s.expectRate)
	if len(refused) > 0 {
		return usagef("--expect-bandwidth %g GB/s: %s", s.expectRate, strings.Join(refused, "; "))
	}
	if len(unknown) > 0 && !s.quiet {
		var gpus []string
		for _, i := range unknown {
			gpus = append(gpus, fmt.Sprintf("GPU %d", i))
		}
		fmt.Fprintf(s.cmd.ErrOrStderr(), "--expect-bandwidth %g GB/s: what the link carries is not known of %s\n", s.expectRate, strings.Join(gpus, ", "))
	}
	return nil
}

// readHost reads the host. The simulated GPU has a link of its own.
func (s *session) readHost() *hostinfo.Host {
	h := hostinfo.Read(s.sys.root, s.sys.environ)
	if s.sim {
		h = probe.SimulatedHost(h)
	}
	return h
}

// closing calls close, and adds its error to the result.
func (s *session) closing(close func() error) {
	if err := close(); err != nil {
		s.change(func(r *report.Result) { r.Errors = append(r.Errors, err.Error()) })
	}
}

// prober returns the examiner of this machine. It uses child processes, except in tests.
func (s *session) prober() probe.Prober {
	local := probe.Local{ReadHost: s.readHost, Adjust: s.sys.adjust, OpenLibrary: s.sys.open, Grace: cmp.Or(s.sys.callGrace, callGrace), Tick: s.sys.tick}
	return probe.Prober{Local: local, Isolated: s.sys.isolated}
}

// check examines the host, and does the steps with each GPU.
func (s *session) check(ctx context.Context, steps probe.Steps) error {
	p := s.prober()
	request := probe.Request{Library: s.library, Simulate: s.sim, Steps: steps}
	opened, err := p.Open(ctx, request)
	facts := opened.Facts
	if facts == nil && ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	if facts == nil {
		facts = &doctor.Facts{Devices: []doctor.Device{}}
	}
	facts.SetHost(s.readHost())
	s.setFacts(facts)
	s.change(func(r *report.Result) { r.Errors = append(r.Errors, opened.Errors...) })
	if err != nil {
		return err
	}
	// The list changes in place: the facts are in the result already.
	if err = s.devices.choose(facts); err != nil {
		return err
	}
	if err = s.checkExpectation(facts); err != nil {
		return err
	}
	s.health(ctx, p, facts, false)
	if err := bounded.Ended(ctx); err != nil || len(facts.Devices) == 0 {
		return err
	}
	if facts.Library != nil && !s.sim {
		request.Library = facts.Library.Path // the one that was described
	}
	if !s.sim && steps.Bandwidth {
		root := s.sys.processes
		if root == nil {
			root = s.sys.root
		}
		processes := doctor.Processes(root)
		shared := s.sys.sharedMemory()
		s.change(func(*report.Result) { facts.Processes, facts.Shared = processes, shared })
	}
	if steps.Verify || steps.Bandwidth {
		s.show(report.At{})
	}
	return s.examine(ctx, p, request)
}

// slowNVML is the longest time of a reading of NVML at which it is read again after each GPU.
const slowNVML = 5 * time.Second

// health reads the management library. With underLoad it updates only clocks and counters.
func (s *session) health(ctx context.Context, p examiner, facts *doctor.Facts, underLoad bool) {
	if !s.sys.isolated || s.sim || underLoad && (facts.NVML == nil || s.slowHealth) || ctx.Err() != nil {
		return // in this process it may hang
	}
	hangs := false
	s.change(func(*report.Result) {
		hangs = slices.ContainsFunc(facts.Probes, func(p doctor.Probe) bool { return p.Stage == doctor.StageNVML })
	})
	if hangs {
		return // it would again, for each GPU
	}
	reply, err := p.NVML(ctx, probe.Request{})
	s.slowHealth = s.slowHealth || reply.Probe.Seconds > slowNVML.Seconds()
	s.change(func(r *report.Result) {
		switch {
		case err != nil:
			r.Errors = append(r.Errors, err.Error())
		case !reply.Probe.State.Ended():
			facts.Probes = append(facts.Probes, reply.Probe)
		}
		switch {
		case reply.Report != nil && underLoad:
			facts.SetClocks(reply.Report)
		case reply.Report != nil:
			facts.SetHealth(reply.Report)
		}
	})
}
