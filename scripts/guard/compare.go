package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	maxPairs = 60 // of a row in one round
	// rounds of new processes that a row that looks worse is measured in.
	rounds = 3
	// firstRound is the part of the time that the first round has.
	firstRound = 0.75
)

// A comparison measures two builds.
type comparison struct {
	start func(context.Context, build, variant) (side, error)
	// load makes the host busy until stop is called.
	load func() (stop func() error, err error)
	// c runs a program in C, once. It has no lines if the program is not there.
	c   func(ctx context.Context, program string) ([]line, error)
	now func() time.Time
	log io.Writer

	rows   *regexp.Regexp
	quick  bool // the rows that are quick, and no variants
	pairs  int  // the least of a row in each round
	budget time.Duration
}

// A comparisonResult is what was measured, before it is put into words.
type comparisonResult struct {
	began        time.Time
	took         time.Duration
	hellos       [2]*hello
	measurements []*measurement
	failures     []error // of processes, beside those of rows
}

// run measures all rows, and those that look worse again in new processes.
func (c *comparison) run(ctx context.Context) (*comparisonResult, error) {
	result := &comparisonResult{began: c.now()}
	end := result.began.Add(time.Duration(firstRound * float64(c.budget)))
	var plans [][]*measurement // by variant
	rest := 0                  // rows to come
	for i, v := range variants {
		if plans != nil && len(plans[i]) == 0 {
			continue
		}
		err := c.with(ctx, v, func(p *pair) {
			if plans == nil {
				result.hellos = [2]*hello{p.sides[oldBuild].hello(), p.sides[newBuild].hello()}
				for _, v := range variants {
					plans = append(plans, c.plan(v, result.hellos))
					rest += len(plans[len(plans)-1])
				}
			}
			for _, m := range plans[i] {
				c.measure(ctx, p, m, c.pairs, 2*end.Sub(c.now())/time.Duration(rest))
				rest--
			}
		})
		if plans == nil {
			return nil, err
		}
		result.add(plans[i], err)
	}
	if len(result.measurements) == 0 {
		return nil, errors.New("no row matches")
	}
	for range rounds - 1 {
		c.again(ctx, result, result.began.Add(c.budget))
	}
	result.took = c.now().Sub(result.began)
	return result, context.Cause(ctx)
}

// add adds rows that were measured by processes that ended with an error, or could not be started.
func (r *comparisonResult) add(list []*measurement, err error) {
	for _, m := range list {
		if m.pairs() == 0 && m.err == nil {
			m.err = err
		}
	}
	r.measurements = append(r.measurements, list...)
	if err != nil {
		r.failures = append(r.failures, err)
	}
}

// again measures suspicious rows in new processes, and as many as time allows of those that are unclear.
func (c *comparison) again(ctx context.Context, result *comparisonResult, end time.Time) {
	for _, v := range variants {
		var suspects, list []*measurement
		for _, m := range result.measurements {
			switch {
			case m.variant != v:
			case m.suspicious():
				suspects = append(suspects, m)
			case m.is(unclear) && c.now().Before(end):
				list = append(list, m)
			}
		}
		list = append(suspects, list...)
		if len(list) == 0 || ctx.Err() != nil {
			continue
		}
		err := c.with(ctx, v, func(p *pair) {
			for i, m := range list {
				allowed := end.Sub(c.now()) / time.Duration(len(list)-i)
				if allowed > 0 || i < len(suspects) {
					c.measure(ctx, p, m, min(max(c.pairs, m.pairs()), 2*c.pairs), allowed)
				}
			}
		})
		result.add(nil, err)
	}
}

// with starts both builds under a variant, calls do, and ends them.
func (c *comparison) with(ctx context.Context, v variant, do func(*pair)) (err error) {
	p := &pair{start: c.start, variant: v}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.open(ctx); err != nil {
		return err
	}
	if v.load {
		stop, err := c.load()
		if err != nil {
			return fmt.Errorf("make the host busy: %w", err)
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	do(p)
	return nil
}

// plan returns the rows that are to be measured under a variant.
func (c *comparison) plan(v variant, hellos [2]*hello) []*measurement {
	has := map[string]bool{}
	for _, r := range hellos[oldBuild].Rows {
		has[r.Name] = true
	}
	var list []*measurement
	planned := map[string]*measurement{}
	for _, r := range hellos[newBuild].Rows {
		m := &measurement{rowInfo: r, variant: v, onlyNew: !has[r.Name]}
		if r.Of == "" && !r.TableOnly && v.has(r) && c.rows.MatchString(m.fullName()) && (!c.quick || r.Quick && v.prefix == "") {
			list, planned[r.Name] = append(list, m), m
		}
	}
	for _, r := range hellos[newBuild].Rows {
		if m := planned[r.Of]; m != nil && v.prefix == "" {
			m.references = append(m.references, &measurement{rowInfo: r, onlyNew: true})
		}
	}
	return list
}

// measure adds a round of a row: a least number of pairs, and then more until the figures are decided or
// the time that is allowed is over.
func (c *comparison) measure(ctx context.Context, p *pair, m *measurement, minimum int, allowed time.Duration) {
	began, before := c.now(), m.pairs()
	err := p.measure(ctx, m, func(pairs int) bool {
		return pairs >= minimum && (m.every(estimate.decided) || pairs >= maxPairs || c.now().Sub(began) >= allowed)
	})
	m.err = errors.Join(m.err, err)
	if err == nil && m.variant.prefix == "" && m.inC == nil {
		c.runC(ctx, m)
	}
	text := ""
	for _, s := range m.figures {
		if m.onlyNew {
			text += fmt.Sprintf("%s %.4g %s  ", s.name, median(s.values[newBuild]), s.unit)
			continue
		}
		e, v := s.evaluate()
		text += fmt.Sprintf("%s %.3f %s  ", s.name, e.median, v)
	}
	if err != nil {
		text = err.Error()
	}
	fmt.Fprintf(c.log, "%s: %d pairs in %.1f s: %s\n", m.fullName(), m.pairs()-before, c.now().Sub(began).Seconds(), strings.TrimSpace(text))
}

// runC takes the figures of a row's program in C.
func (c *comparison) runC(ctx context.Context, m *measurement) {
	m.inC = map[string]beside{}
	for _, s := range m.figures {
		of := s.name
		if of == "cpu" {
			of = ""
		}
		names := m.C[of]
		if names == "" {
			continue
		}
		program, prefix, _ := strings.Cut(names, " ")
		lines, err := c.c(ctx, program)
		if err != nil {
			m.withoutC = err.Error()
			return
		}
		own := m.figures[slices.IndexFunc(m.figures, func(s *series) bool { return s.name == of })]
		if name, v, ok := fastest(lines, prefix, own.unit, s.unit); ok {
			m.inC[s.name] = beside{Name: "C " + name, Value: v}
		} else if s == own {
			m.withoutC = fmt.Sprintf("%s printed no %s in %s", program, prefix, s.unit)
		}
	}
}
