package managed

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// The exported functions and methods, with values that nobody should pass: zero ones, nil, and
// sizes and offsets out of range. All are errors, and none panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Version: 13000}, Options{})
	good := g.alloc(4096)
	ctx, nothing := t.Context(), func(int) error { return nil }
	plan, err := g.a.NewPlan([]Step{{good.Whole().As(ReadOnly)}}, PlanOptions{Budget: mib * 2})
	require.NoError(t, err)
	type calls map[string]func() error
	ofAllocator := func(a *Allocator) calls {
		assert.Zero(t, a.Stats())
		assert.Nil(t, a.Notes())
		return calls{
			"Alloc":   func() error { _, err := a.Alloc(ctx, 1, AllocOptions{}); return err },
			"Move":    func() error { return a.Move(ctx, cudart.HostLocation(), good.Whole()) },
			"Reclaim": func() error { _, err := a.Reclaim(ctx, g.s, 1); return err },
			"NewPlan": func() error { _, err := a.NewPlan(nil, PlanOptions{Budget: 1}); return err },
			"Close":   a.Close,
		}
	}
	ofMemory := func(m *Memory, off, n int) calls {
		c := calls{
			"Prefetch":     func() error { return m.Range(off, n).Prefetch(ctx, g.s, cudart.HostLocation()) },
			"Discard":      func() error { return m.Range(off, n).Discard(ctx, g.s) },
			"Advise":       func() error { return m.Range(off, n).Advise(ctx, cudart.AdviseReadMostly, cudart.HostLocation()) },
			"Unadvise":     func() error { return m.Range(off, n).Advise(ctx, cudart.AdviseUnsetReadMostly, cudart.HostLocation()) },
			"MappedByHost": func() error { _, err := m.Range(off, n).MappedByHost(); return err },
			"Move":         func() error { return g.a.Move(ctx, cudart.HostLocation(), m.Range(off, n)) },
		}
		for mode := range InPlace + 1 {
			use := Use{m.Range(off, n), mode}
			c[fmt.Sprintf("NewPlan, mode %d", mode)] = func() error { _, err := g.a.NewPlan([]Step{{use}}, PlanOptions{Budget: 1 << 30}); return err }
		}
		if m != good {
			assert.Zero(t, m.Len())
			assert.Zero(t, m.Whole().Len)
			assert.Nil(t, m.Bytes())
			assert.Zero(t, m.Ptr())
			assert.False(t, m.OnHost())
			assert.Equal(t, "no managed memory", m.String())
			c["HostBytes"] = func() error { _, err := m.HostBytes(ctx); return err }
			c["Close"] = m.Close
		}
		return c
	}
	ofStream := func(s *cudart.Stream) calls {
		return calls{
			"Prefetch": func() error { return good.Whole().Prefetch(ctx, s, cudart.HostLocation()) },
			"Discard":  func() error { return good.Whole().Discard(ctx, s) },
			"Reclaim":  func() error { _, err := g.a.Reclaim(ctx, s, 1); return err },
			"Run":      func() error { return plan.Run(ctx, s, nothing) },
		}
	}
	ofPlan := func(p *Plan) calls {
		assert.Zero(t, p.Traffic())
		return calls{"Run": func() error { return p.Run(ctx, g.s, nothing) }}
	}
	for name, list := range map[string]calls{
		"nil Allocator": ofAllocator(nil), "zero Allocator": ofAllocator(new(Allocator)),
		"nil Memory": ofMemory(nil, 0, 1), "zero Memory": ofMemory(new(Memory), 0, 1), "nothing of no Memory": ofMemory(nil, 0, 0),
		"nothing": ofMemory(good, 0, 0), "less": ofMemory(good, 0, math.MinInt), "before": ofMemory(good, -1, 1), "far before": ofMemory(good, math.MinInt, math.MaxInt),
		"after": ofMemory(good, 4096, 1), "beyond": ofMemory(good, 4095, 2), "far beyond": ofMemory(good, math.MaxInt, math.MaxInt),
		"nil stream": ofStream(nil), "zero stream": ofStream(new(cudart.Stream)),
		"nil Plan": ofPlan(nil), "zero Plan": ofPlan(new(Plan)),
		"no context": {
			"HostBytes": func() error { _, err := good.HostBytes(noContext); return err },
			"Move":      func() error { return g.a.Move(noContext, cudart.HostLocation(), good.Whole()) },
			"Reclaim":   func() error { _, err := g.a.Reclaim(noContext, g.s, 1); return err },
			"Run":       func() error { return plan.Run(noContext, g.s, nothing) },
			"New":       func() error { _, err := New(noContext, g.dev, Options{}); return err },
			"Alloc":     func() error { _, err := g.a.Alloc(noContext, 1, AllocOptions{}); return err },
			"Prefetch":  func() error { return good.Whole().Prefetch(noContext, g.s, cudart.HostLocation()) },
			"Discard":   func() error { return good.Whole().Discard(noContext, g.s) },
			"Advise":    func() error { return good.Whole().Advise(noContext, cudart.AdviseReadMostly, cudart.HostLocation()) },
			"Unadvise": func() error {
				return good.Whole().Advise(noContext, cudart.AdviseUnsetReadMostly, cudart.HostLocation())
			},
			"Memory":    func() error { return good.CloseContext(noContext) },
			"Allocator": func() error { return g.a.CloseContext(noContext) },
		},
		"others": {
			"New":              func() error { _, err := New(ctx, nil, Options{}); return err },
			"New, zero device": func() error { _, err := New(ctx, new(cudart.Device), Options{}); return err },
			"New, options":     func() error { _, err := New(ctx, g.dev, Options{Reserve: math.MinInt}); return err },
			"Alloc":            func() error { _, err := g.a.Alloc(ctx, math.MinInt, AllocOptions{}); return err },
			"Alloc of all":     func() error { _, err := g.a.Alloc(ctx, math.MaxInt, AllocOptions{}); return err },
			"Reclaim":          func() error { _, err := g.a.Reclaim(ctx, g.s, math.MinInt); return err },
			"of all":           func() error { _, err := g.a.Reclaim(ctx, g.s, math.MaxInt); return err },
			"zero Range":       func() error { return g.a.Move(ctx, cudart.HostLocation(), Range{}) },
			"zero Use":         func() error { _, err := g.a.NewPlan([]Step{{Use{}}}, PlanOptions{Budget: 1}); return err },
			"zero PlanOptions": func() error { _, err := g.a.NewPlan(nil, PlanOptions{}); return err },
			"an unknown Mode":  func() error { _, err := g.a.NewPlan([]Step{{{good.Whole(), -1}}}, PlanOptions{Budget: 1}); return err },
			"zero Advice":      func() error { return good.Whole().Advise(ctx, 0, cudart.HostLocation()) },
			"zero Location":    func() error { return good.Whole().Prefetch(ctx, g.s, cudart.Location{}) },
			"Move nowhere":     func() error { return g.a.Move(ctx, cudart.Location{Kind: math.MaxInt32}, good.Whole()) },
			"Run of nothing":   func() error { return plan.Run(ctx, g.s, nil) },
			"advised nowhere": func() error {
				return good.Whole().Advise(ctx, cudart.AdvisePreferredLocation, cudart.Location{Kind: -1})
			},
			"by no device": func() error {
				return good.Whole().Advise(ctx, cudart.AdviseAccessedBy, cudart.Location{Kind: cudart.LocationDevice, ID: math.MaxInt32})
			},
			"Alloc of a closed Allocator": func() error {
				a, err := New(ctx, g.dev, Options{})
				require.NoError(t, err)
				require.NoError(t, a.Close())
				_, err = a.Alloc(ctx, 1, AllocOptions{})
				return err
			},
		},
	} {
		for call, f := range list {
			assert.NotPanics(t, func() { assert.ErrorContains(t, f(), "managed: ", "%s: %s", name, call) }, "%s: %s", name, call)
		}
	}
}
