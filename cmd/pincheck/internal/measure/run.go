package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// Progress is how far a run is.
type Progress struct {
	What        string // the case that runs
	Done, Total int    // cases
	Spent, Left time.Duration
}

// Estimate returns about how long an experiment takes, and what it needs at its peak.
// The error says that it cannot run: options that make no sense, or more memory than there
// is.
func Estimate(e Experiment, env Env) (time.Duration, Need, error) {
	p, err := newPlan(e, env)
	if err != nil {
		return 0, Need{}, err
	}
	return p.time, p.need, nil
}

// Run runs an experiment. The result is complete data whatever happens: when ctx
// ends it has what was finished, and the error is ctx's. What fails in a case is in the
// result's Errors, and the other cases run. An error of the plan is returned without a
// result.
func Run(ctx context.Context, e Experiment, env Env, progress func(Progress)) (*result.Bench, error) {
	p, err := newPlan(e, env)
	if err != nil {
		return nil, err
	}
	r := &run{plan: p, progress: progress, began: time.Now(), Bench: &result.Bench{
		Name: e.Name, Question: e.Question, Views: e.Views, Started: time.Now().UTC(),
		Answers: []string{}, Notes: []string{}, Errors: []string{}, Series: []result.Series{},
	}}
	for i := range p.groups {
		if err = r.group(ctx, &p.groups[i]); err != nil {
			break
		}
	}
	r.Complete = err == nil
	r.Seconds = time.Since(r.began).Seconds()
	if e.Explain != nil {
		r.Answers = append(r.Answers, e.Explain(env, r.Bench)...)
	}
	return r.Bench, err
}

// A plan is an experiment's with all defaults in their places.
type plan struct {
	Experiment
	env    Env
	groups []Group
	cases  int
	time   time.Duration
	need   Need
}

func newPlan(e Experiment, env Env) (*plan, error) {
	fail := func(err error) (*plan, error) { return nil, fmt.Errorf("measure: %s: %w", e.Name, err) }
	if env.Duration < 0 {
		return fail(fmt.Errorf("duration %v: must not be negative", env.Duration))
	}
	for _, n := range env.Sizes {
		if n <= 0 {
			return fail(fmt.Errorf("size %d: must be positive", n))
		}
	}
	p := &plan{Experiment: e, env: env}
	var err error
	if p.groups, err = e.Plan(env); err != nil {
		return fail(err)
	}
	var setup, budget time.Duration
	for i := range p.groups {
		g := &p.groups[i]
		setup += g.Setup
		p.need = p.need.or(g.Need)
		for j := range g.Cases {
			c := &g.Cases[j]
			c.MinSamples = cmp.Or(c.MinSamples, minimum)
			if env.Quick {
				c.Samples, c.Budget = cmp.Or(c.Samples, quickSamples), cmp.Or(c.Budget, quickBudget)
			}
			c.Samples, c.Budget = cmp.Or(c.Samples, maxSamples), cmp.Or(c.Budget, caseBudget)
			budget += c.Budget
			p.cases++
		}
	}
	if env.Duration > 0 && budget > 0 {
		scale := float64(max(env.Duration-setup, 0)) / float64(budget)
		budget = 0
		for _, g := range p.groups {
			for j := range g.Cases {
				c := &g.Cases[j]
				c.Budget = max(time.Duration(float64(c.Budget)*scale), minimumBudget)
				if scale > 1 {
					c.Samples = int(float64(c.Samples) * scale)
				}
				budget += c.Budget
			}
		}
	}
	p.time = setup + budget
	if err := p.fits(); err != nil {
		return fail(err)
	}
	return p, nil
}

func (n Need) or(m Need) Need {
	return Need{max(n.Pinned, m.Pinned), max(n.Pageable, m.Pageable), max(n.Device, m.Device), max(n.Disk, m.Disk)}
}

// hostShare is the share of the available host memory that an experiment may take: the
// machine has other work.
const hostShare = 0.8

// fits returns an error for a plan that takes more memory than there is.
func (p *plan) fits() error {
	if host := p.need.Pinned + p.need.Pageable; host > 0 {
		if available, ok := hostmem.Available(); ok && float64(host) > hostShare*float64(available) {
			return fmt.Errorf("it takes %s of host memory, and %s are available: name smaller sizes", units.Bytes(host), units.Bytes(available))
		}
	}
	if p.need.Device == 0 {
		return nil
	}
	for _, d := range p.env.Devices {
		if free, _, err := d.MemInfo(); err == nil && p.need.Device > free {
			return fmt.Errorf("it takes %s of %v, and %s are free: name smaller sizes", units.Bytes(p.need.Device), d, units.Bytes(free))
		}
	}
	return nil
}

// A run is one call of Run.
type run struct {
	*plan
	*result.Bench
	progress func(Progress)
	began    time.Time
	done     int // cases
}

// group runs the cases of a group. The error is that of a ctx that ended.
func (r *run) group(ctx context.Context, g *Group) error {
	if err := bounded.Ended(ctx); err != nil {
		return err
	}
	r.show(g.Name)
	err := g.Open(ctx)
	if err == nil {
		for i := range g.Cases {
			if err := bounded.Ended(ctx); err != nil {
				break
			}
			r.show(caseName(g, &g.Cases[i]))
			r.take(ctx, g, &g.Cases[i])
			r.done++
		}
		if g.Notes != nil {
			r.Notes = append(r.Notes, g.Notes()...)
		}
	} else {
		r.done += len(g.Cases)
		r.failed(ctx, g.Name, err, g.Cases...)
	}
	if err := g.Close(); err != nil {
		r.Errors = append(r.Errors, fmt.Sprintf("%s: release: %v", g.Name, err))
	}
	r.show("")
	return bounded.Ended(ctx)
}

func caseName(g *Group, c *Case) string {
	name := g.Name + ": " + c.Name
	for _, l := range c.Labels {
		name += " " + l.Value
	}
	return name
}

func (r *run) show(what string) {
	if r.progress == nil {
		return
	}
	spent := time.Since(r.began)
	left := max(r.time-spent, 0)
	if r.done > 0 && r.done < r.cases { // by what the cases took so far
		left = (left + spent*time.Duration(r.cases-r.done)/time.Duration(r.done)) / 2
	}
	r.progress(Progress{What: what, Done: r.done, Total: r.cases, Spent: spent, Left: left})
}

// failed records why a case or a group was not measured, with the cases that are missing. That
// ctx ended is no failure.
func (r *run) failed(ctx context.Context, name string, err error, missing ...Case) {
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, errors.ErrUnsupported):
		r.Notes = append(r.Notes, fmt.Sprintf("%s: not measured: %v", name, err))
		for i := range missing {
			s := &missing[i].Series
			r.Unmeasured = append(r.Unmeasured, result.Unmeasured{Name: s.Name, Labels: s.Labels, Reason: err.Error()})
		}
	default:
		r.Errors = append(r.Errors, fmt.Sprintf("%s: %v", name, err))
	}
}

// take measures a case, and adds those of its series that have a sample.
func (r *run) take(ctx context.Context, g *Group, c *Case) {
	s := c.Series
	also := make([]result.Series, len(c.Also))
	for i := range also {
		also[i] = c.Also[i].Series
	}
	for range c.WarmUp {
		if _, err := c.Sample(ctx); err != nil {
			r.failed(ctx, caseName(g, c), err, *c)
			return
		}
	}
	cpuTimeOf := cpuTime
	if c.CPU != nil {
		cpuTimeOf = c.CPU
	}
	began, cpu := time.Now(), cpuTimeOf()
	for len(s.Samples) < c.MinSamples || len(s.Samples) < c.Samples && time.Since(began) < c.Budget {
		v, err := c.Sample(ctx)
		if err != nil {
			if len(s.Samples) == 0 {
				r.failed(ctx, caseName(g, c), err, *c)
			} else {
				r.failed(ctx, caseName(g, c), err)
			}
			break
		}
		s.Samples = append(s.Samples, v)
		for i := range also {
			if v, ok := c.Also[i].Last(); ok {
				also[i].Samples = append(also[i].Samples, v)
			}
		}
	}
	if len(s.Samples) == 0 {
		return
	}
	if c.Bytes != nil {
		s.BytesPerSample = c.Bytes()
	}
	if gb := float64(len(s.Samples)) * float64(s.BytesPerSample) / 1e9; gb > 0 && cpuTime() >= 0 {
		perGB := (cpuTimeOf() - cpu).Seconds() / gb
		s.CPUSecondsPerGB = &perGB
	}
	if c.Node != nil {
		if node, ok := c.Node(); ok {
			s.NUMANode = &node
		}
	}
	if c.Verify != nil {
		if err := c.Verify(ctx); err != nil {
			r.failed(ctx, caseName(g, c)+": compared afterwards", err)
			if errors.Is(err, ErrWrongBytes) {
				s.Mismatch = err.Error()
			}
		} else {
			s.Verified = true
		}
	}
	r.add(s)
	for _, a := range also {
		if len(a.Samples) > 0 {
			a.Verified, a.NUMANode = s.Verified, s.NUMANode
			r.add(a)
		}
	}
}

// add completes a series, and adds it.
func (r *run) add(s result.Series) {
	s.Stats = result.Summarize(s.Samples)
	if r.env.Expect != nil {
		s.Expected = r.env.Expect(&s)
	}
	r.Series = append(r.Series, s)
}
