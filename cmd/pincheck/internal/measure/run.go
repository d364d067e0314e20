package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/units"
)

// Progress describes how much of a run is done.
type Progress struct {
	What        string // the running case
	Done, Total int    // cases
	Spent, Left time.Duration
}

// Estimate returns the estimated time of an experiment and its peak use of memory. It returns
// an error for invalid options, and for a plan that needs more memory than is available.
func Estimate(e Experiment, env Env) (time.Duration, Footprint, error) {
	p, err := newPlan(e, env)
	if err != nil {
		return 0, Footprint{}, err
	}
	return p.time, p.footprint, nil
}

// Run runs an experiment. When ctx ends, it returns the finished series and ctx's error. A case
// that fails adds its error to the result's Errors, and the other cases run. Run returns no
// result for an error of [Estimate].
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
	if e.Derive != nil {
		for _, s := range e.Derive(r.Bench) {
			r.add(s)
		}
	}
	if e.Explain != nil {
		answers, figures := e.Explain(env, r.Bench)
		r.Answers, r.Figures = append(r.Answers, answers...), figures
	}
	return r.Bench, err
}

// A plan is an experiment with the defaults filled in.
type plan struct {
	Experiment
	env       Env
	groups    []Group
	cases     int
	time      time.Duration
	footprint Footprint
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
		p.footprint = p.footprint.or(g.Footprint)
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
				minTime := c.minTime()
				c.Budget = max(time.Duration(float64(c.Budget)*scale), minimumBudget)
				if scale > 1 {
					c.Samples = int(float64(c.Samples) * scale)
				}
				budget += max(c.Budget, minTime)
			}
		}
	}
	p.time = setup + budget
	if err := p.fits(); err != nil {
		return fail(err)
	}
	return p, nil
}

// minTime estimates the duration of a case whose budget is 0: it has a warm-up and the fewest
// samples, and is compared.
func (c *Case) minTime() time.Duration {
	const rate = 5.0 // GB/s
	return min(c.Budget, time.Duration(float64((c.WarmUp+c.MinSamples)*c.BytesPerSample)/rate))
}

func (n Footprint) or(m Footprint) Footprint {
	return Footprint{max(n.Pinned, m.Pinned), max(n.Pageable, m.Pageable), max(n.Device, m.Device), max(n.Disk, m.Disk)}
}

// hostShare is the share of the available host memory that an experiment may use, because
// other programs run on the machine.
const hostShare = 0.8

// fits returns an error for a plan that needs more memory than is available.
func (p *plan) fits() error {
	if host := p.footprint.Pinned + p.footprint.Pageable; host > 0 {
		if available, ok := hostmem.Available(); ok && float64(host) > hostShare*float64(available) {
			return fmt.Errorf("it takes %s of host memory, and %s are available: name smaller sizes", units.Bytes(host), units.Bytes(available))
		}
	}
	if p.footprint.Device == 0 {
		return nil
	}
	for _, d := range p.env.Devices {
		if free, _, err := d.MemInfo(); err == nil && p.footprint.Device > free {
			return fmt.Errorf("it takes %s of %v, and %s are free: name smaller sizes", units.Bytes(p.footprint.Device), d, units.Bytes(free))
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

// group runs the cases of a group. It returns only ctx's error; others go into the result.
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
			r.show(fmt.Sprintf("%s, %d of %d", caseName(g, &g.Cases[i]), r.done+1, r.cases))
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

// caseName names a case in words: its group, what is measured, and the conditions that the group does not name.
func caseName(g *Group, c *Case) string {
	name := result.Words(g.Name) + ": " + result.Words(c.Name)
	for _, l := range c.Labels {
		text := l.Text()
		if text == l.Value && strings.Trim(text, "0123456789.") == "" {
			text = result.Words(l.Key) + " " + text // a number needs a name
		}
		if l.Key != result.Device && !strings.Contains(g.Name, text) {
			name += ", " + text
		}
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
	r.progress(Progress{What: result.Words(what), Done: r.done, Total: r.cases, Spent: spent, Left: left})
}

// failed records why a case or a group was not measured, and the missing cases. It records
// nothing if ctx has ended.
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

// take measures a case, and adds each of its series that has a sample.
func (r *run) take(ctx context.Context, g *Group, c *Case) {
	for range c.WarmUp {
		if _, err := c.Sample(ctx); err != nil {
			r.failed(ctx, caseName(g, c), err, *c)
			return
		}
	}
	cpuTimeOf := hostos.CPUTime
	if c.CPU != nil {
		cpuTimeOf = c.CPU
	}
	cpu := cpuTimeOf()
	s, also := r.sample(ctx, g, c)
	if len(s.Samples) == 0 {
		return
	}
	if c.Bytes != nil {
		s.BytesPerSample = c.Bytes()
	}
	if gb := float64(len(s.Samples)) * float64(s.BytesPerSample) / 1e9; gb > 0 && hostos.CPUTime() >= 0 {
		perGB := (cpuTimeOf() - cpu).Seconds() / gb
		s.CPUSecondsPerGB = &perGB
	}
	if c.Node != nil {
		if node, ok := c.Node(); ok {
			s.NUMANode = &node
		}
	}
	r.verify(ctx, g, c, &s)
	r.add(s)
	for _, a := range also {
		if len(a.Samples) > 0 {
			a.Verified, a.NUMANode = s.Verified, s.NUMANode
			r.add(a)
		}
	}
}

// sample takes the samples of a case's series, and of those that come with it.
func (r *run) sample(ctx context.Context, g *Group, c *Case) (s result.Series, also []result.Series) {
	s = c.Series
	for i := range c.Also {
		also = append(also, c.Also[i].Series)
	}
	for began := time.Now(); len(s.Samples) < c.MinSamples || len(s.Samples) < c.Samples && time.Since(began) < c.Budget; {
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
	return s, also
}

// verify compares the bytes that a case has copied, if it can.
func (r *run) verify(ctx context.Context, g *Group, c *Case, s *result.Series) {
	if c.Verify == nil {
		return
	}
	err := c.Verify(ctx)
	s.Verified = err == nil
	if err == nil {
		return
	}
	r.failed(ctx, caseName(g, c)+": compared afterwards", err)
	if errors.Is(err, ErrMismatch) {
		s.Mismatch = err.Error()
	}
}

// add adds a series with its statistics and its expected value.
func (r *run) add(s result.Series) {
	s.Stats = result.Summarize(s.Samples)
	if r.env.Expect != nil {
		s.Expected = r.env.Expect(&s)
	}
	r.Series = append(r.Series, s)
}
