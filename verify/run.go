package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/pattern"
	"github.com/gopinned/pinned/internal/units"
)

// pathFailures in a row end a path.
const pathFailures = 3

// Run does the plan's round trips on dev, and reports mismatches, failures and skipped cases.
// These are no errors of Run: [Report.Err] returns them. Run returns an error if an argument
// is nil or zero, or the plan is invalid; and, with the report so far, when ctx ends: it
// answers errors.Is for ctx's error and its cause.
//
// Everything is released before Run returns, also when Plan.Progress panics. A
// failure in the report names memory that could not be released.
func Run(ctx context.Context, dev *cudart.Device, plan Plan) (*Report, error) {
	r, err := newRunner(ctx, dev, plan)
	if err != nil {
		return nil, fmt.Errorf("verify: run: %w", err)
	}
	return r.report, r.run(ctx)
}

var (
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil")
)

func newRunner(ctx context.Context, dev *cudart.Device, plan Plan) (*runner, error) {
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil || dev.Runtime() == nil:
		return nil, errNilDevice
	}
	chosen := len(plan.Paths) > 0
	plan, err := plan.normal()
	if err != nil {
		return nil, err
	}
	if p := plan.Peer; p != nil && (p == dev || p.Runtime() != dev.Runtime()) {
		return nil, fmt.Errorf("Plan.Peer is %v: must be another device of the Runtime of %v", p, dev)
	}
	if !chosen {
		plan.Paths = slices.DeleteFunc(plan.Paths, func(p Path) bool { return p.info().peer && plan.Peer == nil })
	}
	r := defaultRunner(dev)
	r.plan, r.report = plan, &Report{Full: plan.Full}
	return r, nil
}

func defaultRunner(dev *cudart.Device) *runner {
	return &runner{dev: dev, grace: drainTimeout, load: loadKernels, hostFree: hostmem.Available}
}

// A runner does the cases of all paths.
type runner struct {
	dev      *cudart.Device
	plan     Plan
	report   *Report
	progress Progress
	began    time.Time
	grace    time.Duration // for copies that do not end
	hostFree func() (int, bool)
	load     func(context.Context, *cudart.Device) (gpu, error)
	tamper   func(Case, []byte) // of tests, see trip
	found    func(Case, string, gpukernels.Found) gpukernels.Found
}

func (r *runner) run(ctx context.Context) error {
	r.began = time.Now()
	err := r.paths(ctx)
	r.report.took(time.Since(r.began))
	return err
}

func (r *runner) paths(ctx context.Context) error {
	cases := make([][]Case, len(r.plan.Paths))
	for i, path := range r.plan.Paths {
		cases[i] = r.plan.cases(path)
		r.report.CasesPlanned += len(cases[i])
		r.progress.BytesTotal += totalBytes(cases[i])
	}
	r.progress.CasesTotal = r.report.CasesPlanned
	r.showProgress()
	for i, path := range r.plan.Paths {
		p := &pathRun{runner: r, PathReport: PathReport{Path: path, CasesPlanned: len(cases[i])}, start: time.Now()}
		p.run(ctx, cases[i])
		p.Duration = time.Since(p.start)
		r.add(p.PathReport)
		if ctx.Err() != nil {
			return canceled(ctx)
		}
	}
	if r.plan.NoStale {
		return nil
	}
	stale, err := StaleRead(ctx, r.dev)
	switch {
	case ctx.Err() != nil:
		return canceled(ctx)
	case err != nil:
		r.fail(Case{Path: pathPinned}, err)
		r.report.FailureCount++
	default:
		r.report.Stale = &stale
	}
	return nil
}

func (r *runner) add(p PathReport) {
	r.report.Paths = append(r.report.Paths, p)
	r.report.Cases += p.Cases
	r.report.VerifiedBytes += p.VerifiedBytes
	r.report.MismatchCount += p.MismatchCount
	r.report.FailureCount += p.FailureCount
	r.report.SkippedCases += p.SkippedCases
}

// fail adds a failure to the report, up to MaxDetails of them.
func (r *runner) fail(c Case, err error) {
	if len(r.report.Failures) < r.plan.MaxDetails {
		r.report.Failures = append(r.report.Failures, Failure{Case: c, Error: err.Error(), Err: err})
	}
}

// showProgress calls Plan.Progress with the report so far, including the path in progress,
// because a later call may not return.
func (r *runner) showProgress(running ...PathReport) {
	if r.plan.Progress == nil {
		return
	}
	now := *r.report
	now.Paths = slices.Clone(now.Paths)
	for _, p := range running {
		(&runner{report: &now}).add(p)
	}
	now.took(time.Since(r.began))
	at := r.progress
	at.Report = &now
	r.plan.Progress(at)
}

func canceled(ctx context.Context) error {
	return fmt.Errorf("verify: run: %w", bounded.Ended(ctx))
}

// A pathRun does the cases of one path.
type pathRun struct {
	*runner
	PathReport
	start time.Time
}

// show calls Plan.Progress with the report so far.
func (p *pathRun) show() {
	running := p.PathReport
	running.Duration = time.Since(p.start)
	p.showProgress(running)
}

// run does the cases that memory allows, until ctx ends or the path fails too often.
func (p *pathRun) run(ctx context.Context, cases []Case) {
	if reason := p.unsupported(); reason != "" {
		p.skip(cases, reason)
		return
	}
	t, cases := p.allocate(ctx, p.affordable(cases))
	if t == nil {
		return
	}
	defer func() { // Progress may panic
		if err := t.release(ctx); err != nil {
			p.failed(Case{Path: p.Path}, err)
		}
	}()
	p.trips(ctx, t, cases)
}

// unsupported returns why the device cannot do the path, "" when it can.
func (p *pathRun) unsupported() string {
	info := p.Path.info()
	switch {
	case info.peer && p.plan.Peer == nil:
		return fmt.Sprintf("needs another device beside %v: Plan.Peer is nil", p.dev)
	case info.attr == 0:
		return ""
	}
	// With a library that is too old for the attribute, the call itself shows it.
	if v, err := p.dev.Attribute(info.attr); err == nil && v == 0 {
		return fmt.Sprintf("%s is not supported by %v: attribute %d is 0", info.lacks, p.dev, info.attr)
	}
	return ""
}

// affordable skips the cases that would take too much of the free memory.
func (p *pathRun) affordable(cases []Case) []Case {
	const maxManaged = 256 * mib
	free, _, err := p.dev.MemInfo()
	if err != nil {
		return cases // the next call fails as well, and is reported
	}
	info := p.Path.info()
	if info.peer {
		if there, _, err := p.plan.Peer.MemInfo(); err == nil {
			free = min(free, there)
		}
	}
	host, measured := p.hostFree()
	buffers := 1 // on the device
	if info.hop {
		buffers = 2
	}
	return p.keep(cases, func(c Case) string {
		n := c.SizeBytes
		switch {
		case info.managed && n > maxManaged:
			return fmt.Sprintf("managed memory is verified up to %s", units.ExactBytes(maxManaged))
		case info.managed && n > free/4/3:
			return fmt.Sprintf("managed memory takes at most a quarter of the %d bytes free on the device", free)
		case n > free/2/buffers:
			return fmt.Sprintf("takes at most half of the %d bytes free on the device", free)
		case measured && info.hostCopies > 0 && n > host/2/info.hostCopies:
			return fmt.Sprintf("takes at most half of the %d bytes free on the host", host)
		}
		return ""
	})
}

// keep returns the cases for which reason returns nothing, and skips the others.
func (p *pathRun) keep(cases []Case, reason func(Case) string) []Case {
	var accepted []Case
	var reasons []string // in the order of the cases
	skipped := make(map[string][]Case)
	for _, c := range cases {
		why := reason(c)
		if why == "" {
			accepted = append(accepted, c)
			continue
		}
		if skipped[why] == nil {
			reasons = append(reasons, why)
		}
		skipped[why] = append(skipped[why], c)
	}
	for _, why := range reasons {
		p.skip(skipped[why], why)
	}
	return accepted
}

// allocate allocates memory for the largest case, or for a smaller one if there is no more.
// It returns nil if there is no case to run.
func (p *pathRun) allocate(ctx context.Context, cases []Case) (*trip, []Case) {
	for len(cases) > 0 && ctx.Err() == nil {
		size, offset, streams := 0, 0, 1
		for _, c := range cases {
			size = max(size, c.SizeBytes)
			offset = max(offset, c.Source, c.Device, c.Return)
			streams = max(streams, c.Streams)
		}
		t, err := p.newTrip(ctx, p.Path, size+offset, streams)
		switch {
		case err == nil:
			return t, cases
		case ctx.Err() != nil:
			return nil, nil
		case errors.Is(err, errors.ErrUnsupported), errors.Is(err, cudart.ErrNotSupported):
			p.skip(cases, err.Error())
			return nil, nil
		case errors.Is(err, hostmem.ErrLimit) && size <= mib:
			p.skip(cases, err.Error())
			return nil, nil
		case (errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, hostmem.ErrLimit)) && size > mib:
			cases = p.keep(cases, func(c Case) string {
				if c.SizeBytes > size/2 {
					return fmt.Sprintf("no memory for %s: %v", units.ExactBytes(size), err)
				}
				return ""
			})
		default:
			p.failed(Case{Path: p.Path}, err)
			p.skip(cases, "memory or streams could not be allocated")
			return nil, nil
		}
	}
	return nil, nil
}

// trips runs the cases until ctx ends or the path fails too often.
func (p *pathRun) trips(ctx context.Context, t *trip, cases []Case) {
	failures := 0
	for i, c := range cases {
		if ctx.Err() != nil {
			return
		}
		want := c.Pattern.content(pattern.Mix(p.plan.Seed + uint64(i)))
		mismatches, err := t.run(ctx, c, want)
		if err != nil && ctx.Err() != nil {
			return
		}
		if err != nil {
			p.failed(c, err)
			if failures++; failures == pathFailures || errors.Is(err, errBusy) {
				p.done(c)
				p.skip(cases[i+1:], fmt.Sprintf("the path was ended after %d failures in a row", failures))
				return
			}
		} else {
			failures = 0
			p.Cases++
			p.VerifiedBytes += c.SizeBytes
			p.LargestBytes = max(p.LargestBytes, c.SizeBytes)
		}
		if len(mismatches) > 0 {
			p.MismatchCount++
		}
		for _, m := range mismatches[:min(len(mismatches), p.plan.MaxDetails-len(p.report.Mismatches))] {
			m.Case = c
			p.report.Mismatches = append(p.report.Mismatches, m)
		}
		p.done(c)
	}
}

func (p *pathRun) failed(c Case, err error) {
	p.FailureCount++
	p.fail(c, err)
}

func (p *pathRun) done(c Case) {
	p.progress.CasesDone++
	p.progress.BytesDone += c.SizeBytes
	p.progress.Case = c
	p.show()
}

func (p *pathRun) skip(cases []Case, reason string) {
	if len(cases) == 0 {
		return
	}
	p.SkippedCases += len(cases)
	p.report.Skipped = append(p.report.Skipped, Skip{Path: p.Path, Cases: len(cases), Reason: reason})
	p.progress.CasesTotal -= len(cases)
	p.progress.BytesTotal -= totalBytes(cases)
	p.show()
}

func totalBytes(cases []Case) int {
	n := 0
	for _, c := range cases {
		n += c.SizeBytes
	}
	return n
}
