//go:build linux && !android && (amd64 || arm64)

package managed

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// soak reports whether sweeps run all of their cells, and not each value of each dimension
// once.
func soak() bool { return os.Getenv("PINNED_SOAK") != "" }

// Every call of every operation fails, one at a time, with one of several errors. The
// operation then says so in an error of this package, or does all the same, and in the end
// nothing is left allocated, counted or advised.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	type operation struct {
		name string
		do   func(t *testing.T, g *fixture, m *Memory) error
	}
	operations := []operation{
		{"new", func(t *testing.T, g *fixture, _ *Memory) error {
			a, err := New(t.Context(), g.dev, Options{Reserve: mib})
			if err == nil {
				err = a.Close()
			}
			return err
		}},
		{"alloc", func(t *testing.T, g *fixture, _ *Memory) error {
			m, err := g.a.Alloc(t.Context(), mib, AllocOptions{})
			if err != nil {
				return err
			}
			return closing(t, g, m.Close)
		}},
		{"alloc beyond the capacity", func(t *testing.T, g *fixture, _ *Memory) error {
			m, err := g.a.Alloc(t.Context(), 100*mib, AllocOptions{})
			if err != nil {
				return err
			}
			return errors.Join(m.Range(0, mib).Prefetch(t.Context(), g.s, g.dev.Location()), closing(t, g, m.Close))
		}},
		{"prefetch", func(t *testing.T, g *fixture, m *Memory) error {
			return m.Whole().Prefetch(t.Context(), g.s, g.dev.Location())
		}},
		{"move of two ranges", func(t *testing.T, g *fixture, m *Memory) error {
			return g.a.Move(t.Context(), g.dev.Location(), m.Range(0, 100), m.Range(mib, mib))
		}},
		{"move", func(t *testing.T, g *fixture, m *Memory) error {
			return g.a.Move(t.Context(), g.dev.Location(), m.Whole())
		}},
		{"discard", func(t *testing.T, g *fixture, m *Memory) error { return m.Range(0, mib).Discard(t.Context(), g.s) }},
		{"advise", func(t *testing.T, g *fixture, m *Memory) error {
			for _, a := range []advice{{what: cudart.AdviseReadMostly}, {cudart.AdvisePreferredLocation, cudart.HostLocation()}, {cudart.AdviseAccessedBy, g.dev.Location()}} {
				if err := m.Whole().Advise(t.Context(), a.what, a.at); err != nil {
					return err
				}
			}
			return nil
		}},
		{"reclaim", func(t *testing.T, g *fixture, m *Memory) error {
			if err := m.Whole().Prefetch(t.Context(), g.s, g.dev.Location()); err != nil {
				return err
			}
			_, err := g.a.Reclaim(t.Context(), g.s, 64*mib)
			return err
		}},
		{"plan", func(t *testing.T, g *fixture, m *Memory) error {
			var steps []Step
			for i := range 4 {
				steps = append(steps, Step{m.Range(i*2*mib, 2*mib).As(ReadOnly)}, Step{m.Range((3-i)*2*mib, mib).As(ReadWrite)})
			}
			p, err := g.a.NewPlan(steps, PlanOptions{Budget: 4 * mib, Chunk: 2 * mib, In: 1, Out: 1})
			if err != nil {
				return err
			}
			err = p.Run(t.Context(), g.s, func(int) error { return nil })
			return err
		}},
		{"plan in place", func(t *testing.T, g *fixture, m *Memory) error {
			steps := []Step{{m.Range(0, 2*mib).As(InPlace), m.Range(2*mib, 2*mib).As(ReadWrite)}, {m.Range(4*mib, 2*mib).As(InPlace)}}
			p, err := g.a.NewPlan(steps, PlanOptions{Budget: 4 * mib, Chunk: 2 * mib, In: 1, Out: 1})
			if err != nil {
				return err
			}
			err = p.Run(t.Context(), g.s, func(int) error { return nil })
			return err
		}},
	}
	cfg := small(64 * mib)
	for _, version := range []cudart.Version{11080, 13000} {
		cfg.Version = version
		for _, op := range operations {
			if op.name == "discard" && version < 13000 {
				continue
			}
			t.Run(version.String()+"/"+op.name, func(t *testing.T) {
				prepared := func(t *testing.T) (*fixture, *Memory) {
					g := newSimFixture(t, cfg, Options{Oversubscribe: true})
					m := g.alloc(8 * mib)
					require.True(t, g.sim.TouchManaged(uintptr(m.Ptr()), m.Len(), true))
					return g, m
				}
				g, m := prepared(t)
				calls := g.callsOf(func() { require.NoError(t, op.do(t, g, m)) })
				g.sync()
				met, failed := 0, 0
				codes := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrInvalidValue, cudart.ErrNotSupported}
				for c, code := range codes {
					for i, k := range calls {
						if !soak() && i%len(codes) != c {
							continue
						}
						ok := t.Run(code.Name(), func(t *testing.T) {
							g, m := prepared(t)
							before := g.a.Stats().Counts
							at := g.sim.TotalCalls() + k
							g.sim.FailCall(at, code)
							err := op.do(t, g, m)
							if g.sim.TotalCalls() >= at {
								met++
							}
							g.sim.ResetFaults()
							// The stream reports what its work failed with, if anything.
							_ = g.s.Synchronize(context.Background())
							if err != nil {
								failed++
								require.ErrorIs(t, err, code, "call %d", k)
								require.True(t, strings.HasPrefix(err.Error(), "managed: "), "%v", err)
							}
							after := g.a.Stats().Counts
							require.Equal(t, before.Allocated, after.Allocated, "call %d: %v", k, err)
							require.Equal(t, before.Allocs-before.Frees, after.Allocs-after.Frees)
							require.Empty(t, g.sim.Misuses())
							require.NoError(t, op.do(t, g, m), "again, without faults")
						})
						if !ok {
							return
						}
					}
				}
				t.Logf("%d calls, %d faults met, %d operations failed", len(calls), met, failed)
				assert.Positive(t, met)
				assert.Positive(t, failed)
			})
		}
	}
}

// callsOf numbers the calls that f makes, from 1 on, but of those that ask again and again
// only the first few.
func (g *fixture) callsOf(f func()) (numbers []int) {
	var mu sync.Mutex
	n, of := 0, make(map[string]int)
	g.sim.OnCall(func(fn string, _ int) {
		if fn == "cudaGetLastError" { // cannot fail
			return
		}
		mu.Lock()
		defer mu.Unlock()
		n++
		if of[fn]++; of[fn] <= 3 || !strings.HasSuffix(fn, "Query") {
			numbers = append(numbers, n)
		}
	})
	defer g.sim.OnCall(nil)
	f()
	mu.Lock()
	defer mu.Unlock()
	return numbers
}

// closing closes something, and if that fails once more without faults, which must work.
func closing(t *testing.T, g *fixture, close func() error) error {
	err := close()
	if err != nil {
		g.sim.ResetFaults()
		require.NoError(t, close(), "tried again")
	}
	return err
}
