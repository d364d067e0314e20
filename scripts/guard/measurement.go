package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// A build is one of the two that are compared.
type build int

const (
	oldBuild build = iota
	newBuild
)

func (b build) String() string { return [...]string{"old", "new"}[b] }

// A variant is a condition under which rows are measured.
type variant struct {
	prefix string // of the rows' names
	cpus   int    // for each of both processes, 0 for all
	load   bool   // a process copies memory on half of the cores
}

var variants = []variant{{}, {prefix: "two-cores/", cpus: 2}, {prefix: "busy/", load: true}}

// has reports whether a row is measured under the variant.
func (v variant) has(r rowInfo) bool {
	switch {
	case v.cpus > 0:
		return r.TwoCores
	case v.load:
		return r.Busy
	}
	return true
}

// A series has all samples of one figure. Those of both builds with the same index are a pair.
type series struct {
	name, unit string
	values     [2][]float64
	rounds     []int // the index at which each round began
}

// ratios returns how many times the old cost each pair has, by round.
func (s *series) ratios() [][]float64 {
	all := make([][]float64, len(s.rounds))
	for i := range all {
		end := min(len(s.values[oldBuild]), len(s.values[newBuild]))
		if i+1 < len(s.rounds) {
			end = min(end, s.rounds[i+1])
		}
		for k := s.rounds[i]; k < end; k++ {
			ratio := s.values[newBuild][k] / s.values[oldBuild][k]
			if isRate(s.unit) {
				ratio = 1 / ratio
			}
			all[i] = append(all[i], ratio)
		}
	}
	return all
}

func (s *series) evaluate() (estimate, verdict) { return evaluate(s.ratios()) }

// A measurement is what is known of a row under a variant.
type measurement struct {
	rowInfo
	variant variant
	onlyNew bool // the old build lacks the row, or it is a reference
	// references are what CUDA alone takes, and inC what C does for a figure.
	references []*measurement
	inC        map[string]beside
	withoutC   string // why there is none although the row names a program

	figures []*series
	details map[string]any // of the new build's last sample
	err     error          // why it could not be measured
}

func (m *measurement) fullName() string { return m.variant.prefix + m.Name }

// beginRound marks where the samples of other processes begin.
func (m *measurement) beginRound() {
	for _, s := range m.figures {
		s.rounds = append(s.rounds, len(s.values[newBuild]))
	}
}

// add adds one sample of a build.
func (m *measurement) add(b build, s *sample) error {
	if s == nil {
		return errors.New("no sample")
	}
	first := len(m.figures) == 0
	for i, f := range s.Figures {
		if math.IsNaN(f.Value) || math.IsInf(f.Value, 0) || f.Value < 0 || f.Value == 0 && f.Unit != contextsUnit {
			return fmt.Errorf("figure %q is %v %s", f.Name, f.Value, f.Unit)
		}
		if first {
			m.figures = append(m.figures, &series{name: f.Name, unit: f.Unit, rounds: []int{0}})
		}
		if i >= len(m.figures) || m.figures[i].name != f.Name || m.figures[i].unit != f.Unit {
			return fmt.Errorf("figure %q in %s: the other build has another one in its place", f.Name, f.Unit)
		}
		m.figures[i].values[b] = append(m.figures[i].values[b], f.Value)
	}
	if len(s.Figures) != len(m.figures) {
		return fmt.Errorf("%d figures, not %d", len(s.Figures), len(m.figures))
	}
	if b == newBuild {
		m.details = s.Details
	}
	return nil
}

// pairs returns how many pairs there are.
func (m *measurement) pairs() int {
	if len(m.figures) == 0 {
		return 0
	}
	return len(m.figures[0].values[newBuild])
}

// is reports whether a figure has the verdict.
func (m *measurement) is(v verdict) bool {
	return !m.onlyNew && m.err == nil && slices.ContainsFunc(m.figures, func(s *series) bool {
		_, have := s.evaluate()
		return have == v
	})
}

// every reports whether all figures have a property, which those of a row that the old build lacks have.
func (m *measurement) every(property func(estimate) bool) bool {
	return m.onlyNew || !slices.ContainsFunc(m.figures, func(s *series) bool {
		e, _ := s.evaluate()
		return !property(e)
	})
}

// suspicious reports whether a figure is.
func (m *measurement) suspicious() bool {
	return m.err == nil && !m.every(func(e estimate) bool { return !e.suspicious() })
}
