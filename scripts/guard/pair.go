package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// A pair is both builds, as processes under a variant.
type pair struct {
	start   func(context.Context, build, variant) (side, error)
	variant variant
	sides   [2]side
}

func (p *pair) open(ctx context.Context) (err error) {
	for b := range p.sides {
		if p.sides[b], err = p.start(ctx, build(b), p.variant); err != nil {
			return err
		}
	}
	return nil
}

func (p *pair) close() error {
	var all []error
	for b, s := range p.sides {
		if s == nil {
			continue
		}
		if err := s.close(); err != nil {
			all = append(all, fmt.Errorf("end of the %v build: %w", build(b), err))
		}
	}
	return errors.Join(all...)
}

// A part is a row or a reference that a build measures.
type part struct {
	*measurement
	build build
}

// parts are the builds of a row, and its references, which the new build measures.
func partsOf(m *measurement) (builds, references []part) {
	builds = []part{{m, newBuild}}
	if !m.onlyNew {
		builds = append(builds, part{m, oldBuild})
	}
	for _, r := range m.references {
		references = append(references, part{r, newBuild})
	}
	return builds, references
}

// do has a part prepared, sampled or closed. A row about first calls is measured in a process of its own,
// so that there is nothing to prepare; warm then verifies the bytes. A build whose process failed is
// started again.
func (p *pair) do(ctx context.Context, of part, command string) (*sample, error) {
	if of.Once {
		switch command {
		case "warm":
			command = "once -verify"
		case "sample":
			command = "once"
		default:
			return nil, nil
		}
	} else if command == "warm" {
		command = "sample"
	}
	s, err := p.sides[of.build].request(ctx, command+" "+of.Name)
	if err == nil {
		return s, nil
	}
	err = fmt.Errorf("%v build: %w", of.build, err)
	var failed replyError
	if !errors.As(err, &failed) && ctx.Err() == nil {
		err = errors.Join(err, p.restart(ctx, of.build))
	}
	return nil, err
}

// restart replaces a process that does not answer any more.
func (p *pair) restart(ctx context.Context, b build) error {
	_ = p.sides[b].close()
	s, err := p.start(ctx, b, p.variant)
	if err != nil {
		p.sides[b] = goneSide{p.sides[b].hello(), err}
		return fmt.Errorf("start it again: %w", err)
	}
	p.sides[b] = s
	return nil
}

// A goneSide stands for a build that cannot be started any more.
type goneSide struct {
	said *hello
	err  error
}

func (g goneSide) hello() *hello { return g.said }
func (g goneSide) request(context.Context, string) (*sample, error) {
	return nil, replyError{text: g.err.Error()}
}
func (g goneSide) close() error { return nil }

// measure adds samples of a row until enough reports that there are enough pairs, which it is asked after each.
func (p *pair) measure(ctx context.Context, m *measurement, enough func(pairs int) bool) (err error) {
	builds, references := partsOf(m)
	all := slices.Concat(builds, references)
	for i, of := range all {
		_, err := p.do(ctx, of, "prepare")
		if err != nil {
			return errors.Join(err, p.closeAll(ctx, all[:i]))
		}
	}
	defer func() { err = errors.Join(err, p.closeAll(ctx, all)) }()
	for _, of := range all {
		if _, err := p.do(ctx, of, "warm"); err != nil {
			return err
		}
	}
	m.beginRound()
	for pairs := 0; !enough(pairs); pairs++ {
		turn := slices.Clone(builds)
		if pairs%2 == 1 {
			slices.Reverse(turn)
		}
		if pairs%3 == 0 {
			turn = append(turn, references...)
		}
		for _, of := range turn {
			s, err := p.do(ctx, of, "sample")
			if err == nil {
				err = of.add(of.build, s)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *pair) closeAll(ctx context.Context, parts []part) error {
	var all []error
	for _, of := range parts {
		if _, err := p.do(ctx, of, "close"); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}
