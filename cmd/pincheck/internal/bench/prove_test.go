package bench

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// flipped is pinned memory of which a byte comes back wrong.
type flipped struct {
	hostkind.Memory
	at int
}

func (f flipped) CopyFromDevice(ctx context.Context, s *cudart.Stream, src cudart.DevPtr, off, n int) error {
	if err := f.Memory.CopyFromDevice(ctx, s, src, off, n); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	if off <= f.at && f.at < off+n {
		f.Bytes()[f.at] ^= 1
	}
	return nil
}

func TestPinnedMemoryIsProvedByACopyThereAndBack(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	w := resources{dev: dev}
	defer func() { assert.NoError(t, w.close()) }()
	const n = piece + 77
	b, err := openRegistered(t.Context(), &w, n)
	require.NoError(t, err)
	require.NoError(t, prove(t.Context(), dev, b, n))
	for _, at := range []int{0, piece - 1, piece, n - 1} {
		require.ErrorIs(t, prove(t.Context(), dev, flipped{b, at}, n), measure.ErrMismatch, at)
	}
}

// What a call writes is compared: a call that writes nothing is found.
func TestCallsThatCopyNothingAreFound(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	r := &callFixture{resources: resources{dev: rt.Devices()[0]}}
	defer func() { assert.NoError(t, r.close()) }()
	require.NoError(t, r.open(t.Context()))
	compared := 0
	for _, c := range r.calls() {
		if c.writes == "" {
			continue
		}
		compared++
		require.NoError(t, r.prepare(t.Context(), c))
		require.ErrorIs(t, r.verify(t.Context(), c), measure.ErrMismatch, c.name)
		require.NoError(t, c.do())
		require.NoError(t, r.stream.Synchronize(t.Context()))
		require.NoError(t, r.verify(t.Context(), c), c.name)
	}
	assert.Equal(t, 5, compared)
}

// The CPU time a GB is of the copies that are timed: not of what a sample does before and after,
// nor of other copies. Not parallel: it is that of the process.
func TestCPUTimeIsOfTheCopiesThatAreTimed(t *testing.T) {
	if hostos.CPUTime() < 0 {
		t.Skip("the CPU time of a process is not known on this platform")
	}
	const n, burnt = 64 << 10, 50 * time.Millisecond
	t.Setenv("TMPDIR", t.TempDir())
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]

	file := &fileFixture{devices: rt.Devices(), n: n, dir: os.TempDir()}
	groups := map[string]struct {
		group   measure.Group
		of      func(measure.Case) bool
		untimed string // a call that each sample makes outside of what it times
	}{
		"files":   {file.group(), func(c measure.Case) bool { return c.Labels.Get(result.Method) == fileStaged }, "cudaMemset"},
		"overlap": {hiddenGroups(short(dev, n), dev, wall())[1], func(c measure.Case) bool { return c.Labels.Get(result.Memory) == inPinned }, "cuLaunchKernel"},
	}
	pins, err := planAlloc(measure.Env{Devices: rt.Devices(), Options: measure.Options{Sizes: []int{n}}})
	require.NoError(t, err)
	first := pins[slices.IndexFunc(pins, func(g measure.Group) bool { return g.Name == poolFirst })]
	groups["alloc"] = struct {
		group   measure.Group
		of      func(measure.Case) bool
		untimed string
	}{first, func(measure.Case) bool { return true }, "cudaHostUnregister"}

	for name, g := range groups {
		require.NoError(t, g.group.Open(t.Context()))
		c := g.group.Cases[slices.IndexFunc(g.group.Cases, g.of)]
		require.NotNil(t, c.CPU, name)
		for range 2 { // which prepares
			_, err := c.Sample(t.Context())
			require.NoError(t, err)
		}
		calls := 0
		sim.OnCall(func(fn string, _ int) {
			if fn != g.untimed {
				return
			}
			if calls++; calls == 1 {
				began := hostos.CPUTime()
				for now := began; now-began < burnt; now = hostos.CPUTime() {
				}
			}
		})
		before := c.CPU()
		_, err := c.Sample(t.Context())
		require.NoError(t, err)
		sim.OnCall(nil)
		assert.Positive(t, calls, name)
		assert.Less(t, c.CPU()-before, burnt, name)
		require.NoError(t, g.group.Close())
	}
}
