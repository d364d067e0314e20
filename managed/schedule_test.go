package managed

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// overwritten reports whether the first step from one on that uses a chunk overwrites all
// of it, byte by byte, and reads nothing there.
func overwritten(t *testing.T, s schedule, steps []Step, uses [][]access, id, from int) bool {
	t.Helper()
	c := s.chunks[id]
	for i := from; i < len(steps); i++ {
		if !slices.ContainsFunc(uses[i], func(u access) bool { return u.chunk == id }) {
			continue
		}
		for _, u := range steps[i] {
			if u.Range.Memory != c.Memory || u.Range.Off >= c.Off+c.Len || u.Range.Off+u.Range.Len <= c.Off {
				continue
			}
			if u.Mode != Overwrite || u.Range.Off > c.Off || u.Range.Off+u.Range.Len < c.Off+c.Len {
				return false
			}
		}
		return true
	}
	return false
}

// replay plays a schedule: all that a step accesses is on the device when it runs, never more
// than the budget is there, nothing leaves before its last use, nothing stays, and what is
// used in place never moves.
func replay(t *testing.T, s schedule, steps []Step, o PlanOptions) {
	t.Helper()
	held, accessed, err := findInPlace(steps)
	require.NoError(t, err)
	var check schedule
	uses := check.cut(steps, o.Chunk, held)
	require.Equal(t, check.chunks, s.chunks)
	for _, r := range held {
		for _, c := range s.chunks {
			require.True(t, c.Memory != r.Memory || c.Off+c.Len <= r.Off || r.Off+r.Len <= c.Off, "%v and %v", c, r)
		}
	}
	resident := make(map[int]bool)
	dirty := make(map[int]bool)
	used, peak, evicts, k := 0, 0, 0, 0
	traffic := Traffic{InPlace: accessed}
	leave := func(upTo, before int) {
		for ; evicts < upTo; evicts++ {
			e := s.evicts[evicts]
			require.True(t, resident[e.chunk], "evict %d", evicts)
			require.Less(t, e.step, before, "evict %d waits for a step that waits for it", evicts)
			require.Equal(t, !dirty[e.chunk], e.drop, "evict %d", evicts)
			switch {
			case e.drop:
				require.False(t, e.discard)
				traffic.Dropped += s.chunks[e.chunk].Len
			case e.discard:
				require.True(t, overwritten(t, s, steps, uses, e.chunk, before), "evict %d", evicts)
				traffic.Spared += s.chunks[e.chunk].Len
			default:
				traffic.Out += s.chunks[e.chunk].Len
			}
			delete(resident, e.chunk)
			delete(dirty, e.chunk)
			used -= s.chunks[e.chunk].Len
		}
	}
	copies := make(map[int]bool)
	for i := range uses {
		for ; k < len(s.fetches) && s.fetches[k].step == i; k++ {
			f := s.fetches[k]
			leave(f.after, i)
			require.False(t, resident[f.chunk])
			resident[f.chunk] = true
			copies[f.chunk] = f.copy
			used += s.chunks[f.chunk].Len
			peak = max(peak, used)
			if f.discard {
				require.True(t, overwritten(t, s, steps, uses, f.chunk, i), "step %d", i)
				traffic.Spared += s.chunks[f.chunk].Len
			} else {
				traffic.In += s.chunks[f.chunk].Len
			}
		}
		for _, u := range uses[i] {
			require.True(t, resident[u.chunk], "step %d", i)
			require.False(t, u.write && copies[u.chunk], "step %d writes a copy", i)
			dirty[u.chunk] = dirty[u.chunk] || u.write
		}
	}
	require.Len(t, s.fetches, k)
	leave(len(s.evicts), len(uses))
	assert.Empty(t, resident)
	assert.LessOrEqual(t, peak, o.Budget)
	assert.Equal(t, s.traffic, traffic)
}

func TestScheduleOfRandomSteps(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	memories := []*Memory{g.alloc(64 * mib), g.alloc(17*mib + 5), g.alloc(3000)}
	mixed := g.alloc(20 * mib)
	for round := range 200 {
		r := rand.New(rand.NewPCG(uint64(round), 1))
		var steps []Step
		for range 1 + r.IntN(40) {
			var step Step
			for range r.IntN(4) {
				m := memories[r.IntN(len(memories))]
				off := r.IntN(m.Len())
				step = append(step, Use{m.Range(off, 1+r.IntN(min(m.Len()-off, 6*mib))), Mode(r.IntN(3))})
			}
			if n := r.IntN(mib); r.IntN(2) == 0 { // of each MiB the first 300 KiB stay on the host
				off := n + mib*r.IntN(19)
				if n < 300*kib {
					step = append(step, mixed.Range(off, min(1+r.IntN(100*kib), 300*kib-n)).As(InPlace))
				} else {
					step = append(step, Use{mixed.Range(off, min(1+r.IntN(mib), mib-n)), Mode(r.IntN(3))})
				}
			}
			steps = append(steps, step)
		}
		o := PlanOptions{Budget: (44 + r.IntN(40)) * mib, Chunk: 2 * mib * (1 + r.IntN(2)), In: 1 + r.IntN(3), Out: 1}
		p, err := g.a.NewPlan(steps, o)
		require.NoError(t, err, "round %d", round)
		replay(t, p.schedule, steps, p.o)
	}
}

// sequential steps through memory, one chunk each, so many times.
func sequential(r Range, chunk, passes int, mode Mode) []Step {
	var steps []Step
	for range passes {
		for off := 0; off < r.Len; off += chunk {
			steps = append(steps, Step{r.Memory.Range(r.Off+off, min(chunk, r.Len-off)).As(mode)})
		}
	}
	return steps
}

// aligned allocates memory with n bytes at a multiple of 2 MiB, as that of a real GPU is,
// so that they are whole chunks.
func (g *fixture) aligned(n int) Range {
	m := g.alloc(n + blockSize)
	return m.Range(-int(m.Ptr())&(blockSize-1), n)
}

// In a sequential pass room is made by what was used long ago: the move ahead of a step
// never waits for the step before it.
func TestScheduleMovesAheadOfSequentialWork(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.aligned(64 * mib)
	for _, passes := range []int{1, 3} {
		p, err := g.a.NewPlan(sequential(m, 2*mib, passes, ReadOnly), PlanOptions{Budget: 16 * mib, Chunk: 2 * mib, In: 2})
		require.NoError(t, err)
		for _, f := range p.fetches {
			for _, e := range p.evicts[:f.after] {
				require.LessOrEqual(t, e.step, f.step-4)
			}
		}
	}
}

// Work that goes over the same memory again finds a part of it on the device, which least
// recently used would not give.
func TestScheduleLeavesAPartOnTheDeviceForTheNextPass(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.aligned(64 * mib)
	p, err := g.a.NewPlan(sequential(m, 2*mib, 4, ReadOnly), PlanOptions{Budget: 48 * mib, Chunk: 2 * mib, In: 2})
	require.NoError(t, err)
	assert.Equal(t, p.traffic.In, p.traffic.Dropped)
	assert.Zero(t, p.traffic.Out)
	assert.Less(t, p.traffic.In, 4*64*mib*6/10, "with LRU it is all of it")
	assert.GreaterOrEqual(t, p.traffic.In, 64*mib+3*16*mib, "no schedule needs less")
}

// Steps go over one panel after another, and all of them over the same other memory, with room
// for three quarters of the next panel: these come while the steps of the panel before run. The
// other memory stays, though each of its parts is needed later than the next panel.
func TestScheduleFetchesTheNextPanelWhileThisOneIsUsed(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	const panels, parts, passes, panel = 6, 4, 3, 8 * mib
	x, edges, sum := g.aligned(panels*panel), g.aligned(parts*2*mib), g.aligned(4*mib)
	var steps []Step
	for range passes {
		for p := range panels {
			for i := range parts {
				steps = append(steps, Step{x.Memory.Range(x.Off+p*panel, panel).As(ReadOnly), edges.Memory.Range(edges.Off+i*2*mib, 2*mib).As(ReadOnly), sum.As(ReadWrite)})
			}
		}
	}
	p, err := g.a.NewPlan(steps, PlanOptions{Budget: panel + edges.Len + sum.Len + 3*panel/4, Chunk: 2 * mib, In: 2})
	require.NoError(t, err)
	replay(t, p.schedule, steps, p.o)
	early := make(map[int]int) // by step: bytes of its panel that come when the panel before is first used, or sooner
	for _, f := range p.fetches {
		c := p.chunks[f.chunk]
		if c.Memory != x.Memory {
			assert.Zero(t, f.step/parts, "the rest comes once")
			continue
		}
		last := -1
		for _, e := range p.evicts[:f.after] {
			last = max(last, e.step)
		}
		if last < f.step-parts {
			early[f.step] += c.Len
		}
		assert.Less(t, last, f.step)
	}
	assert.LessOrEqual(t, p.traffic.In, passes*x.Len+edges.Len+sum.Len)
	for step, n := range early {
		assert.GreaterOrEqual(t, n, panel/2, "step %d", step)
	}
	assert.GreaterOrEqual(t, len(early), passes*(panels-1))
}

func TestScheduleCutsOnAGridOfAddresses(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(9 * mib)
	p, err := g.a.NewPlan([]Step{{m.Range(mib, 100).As(ReadOnly)}, {m.Range(mib+50, 6*mib).As(ReadWrite)}, {m.Range(7*mib, mib).As(ReadOnly)}},
		PlanOptions{Budget: 64 * mib, Chunk: 2 * mib})
	require.NoError(t, err)
	covered := 0
	for i, c := range p.chunks {
		covered += c.Len
		first, last := (int(c.ptr()))/(2*mib), (int(c.ptr())+c.Len-1)/(2*mib)
		assert.Equal(t, first, last, "chunk %d lies in one cell", i)
	}
	assert.Equal(t, 7*mib, covered, "what no step uses is not moved")
}

func TestPlanRefusesInvalidSteps(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(8 * mib)
	other, err := New(t.Context(), g.dev, Options{})
	require.NoError(t, err)
	theirs, err := other.Alloc(t.Context(), 1, AllocOptions{})
	require.NoError(t, err)
	good := []Step{{m.Whole().As(ReadOnly)}}
	ok := PlanOptions{Budget: 8 * mib}
	for _, tt := range []struct {
		steps []Step
		o     PlanOptions
		want  string
	}{
		{good, PlanOptions{}, "PlanOptions.Budget of 0"},
		{good, PlanOptions{Budget: 1, Chunk: mib}, "PlanOptions.Chunk of 1048576"},
		{good, PlanOptions{Budget: 1, Chunk: -2 * mib}, "PlanOptions.Chunk of -2097152"},
		{good, PlanOptions{Budget: math.MinInt}, "PlanOptions.Budget of -9223372036854775808: must be positive"},
		{good, PlanOptions{Budget: 1, Chunk: math.MaxInt}, "PlanOptions.Chunk of 9223372036854775807: must be a multiple of 2 MiB"},
		{good, PlanOptions{Budget: 1, Chunk: math.MinInt}, "PlanOptions.Chunk of -9223372036854775808"},
		{good, PlanOptions{Budget: 1, In: -1}, "PlanOptions.In of -1: must be from 0 to 64"},
		{good, PlanOptions{Budget: 1, In: math.MaxInt}, "PlanOptions.In of 9223372036854775807"},
		{good, PlanOptions{Budget: 1, Out: math.MaxInt}, "PlanOptions.Out of 9223372036854775807"},
		{[]Step{{m.Range(math.MaxInt, 1).As(ReadOnly)}}, ok, "1 bytes at offset 9223372036854775807 are not all within it"},
		{[]Step{{m.Range(1, math.MaxInt).As(ReadOnly)}}, ok, "9223372036854775807 bytes at offset 1 are not all within it"},
		{[]Step{{m.Range(-1, 2).As(ReadOnly)}}, ok, "2 bytes at offset -1 are not all within it"},
		{[]Step{{m.Range(0, 0).As(ReadOnly)}}, ok, "0 bytes at offset 0 are not all within it, or none"},
		{good, PlanOptions{Budget: 1, In: 65}, "PlanOptions.In of 65"},
		{good, PlanOptions{Budget: 1, Out: -1}, "PlanOptions.Out of -1"},
		{[]Step{{}, {m.Range(0, 8*mib+1).As(ReadOnly)}}, ok, "step 1: 8388609 bytes at offset 0 are not all within it"},
		{[]Step{{Range{}.As(ReadOnly)}}, ok, "the memory is nil"},
		{[]Step{{theirs.Whole().As(ReadOnly)}}, ok, "is of another allocator"},
		{[]Step{{Use{m.Whole(), 4}}}, ok, "the mode 4 is unknown"},
		{[]Step{{m.Range(0, 100).As(InPlace)}, {m.Range(90, 100).As(ReadOnly)}}, ok, "step 1 moves 100 bytes at offset 90 of"},
		{[]Step{{m.Range(mib, 100).As(InPlace), m.Whole().As(ReadWrite)}}, ok, "a step uses 100 bytes at offset 1048576 of the same memory in place"},
		{good, PlanOptions{Budget: 8*mib - 1}, "step 0 accesses 8 MiB in chunks of"},
	} {
		_, err := g.a.NewPlan(tt.steps, tt.o)
		require.ErrorContains(t, err, tt.want)
		require.ErrorContains(t, err, "managed: new plan for device 0")
	}
	_, err = g.a.NewPlan(good, PlanOptions{Budget: 8*mib - 1})
	require.ErrorIs(t, err, ErrOversubscribed)
	require.NoError(t, theirs.Close())
	require.NoError(t, other.Close())
	e := newSimFixture(t, exclusive(), Options{})
	_, err = e.a.NewPlan(nil, ok)
	require.ErrorIs(t, err, ErrNotConcurrent)
}

// What is overwritten is moved nowhere before, where CUDA can discard it.
func TestScheduleDoesNotMoveOverwrittenChunks(t *testing.T) {
	t.Parallel()
	for version, spared := range map[cudart.Version]bool{12080: false, 13000: true} {
		g := newSimFixture(t, cudasim.Config{Version: version}, Options{})
		m := g.aligned(16 * mib)
		p, err := g.a.NewPlan(sequential(m, 2*mib, 3, Overwrite), PlanOptions{Budget: 8 * mib, Chunk: 16 * mib / 8})
		require.NoError(t, err)
		if !spared {
			assert.Zero(t, p.traffic.Spared)
			assert.Equal(t, p.traffic.In, p.traffic.Out)
			continue
		}
		assert.Zero(t, p.traffic.In)
		assert.Equal(t, 16*mib, p.traffic.Out, "of the last pass")
		require.NoError(t, p.Run(t.Context(), g.s, func(i int) error {
			return g.s.Memset(m.ptr()+cudart.DevPtr(i%8*2*mib), byte(i), 2*mib)
		}))
		for i := range 8 {
			assert.Equal(t, byte(16+i), m.Memory.Bytes()[m.Off+i*2*mib])
			assert.Equal(t, byte(16+i), m.Memory.Bytes()[m.Off+(i+1)*2*mib-1])
		}
		assert.Positive(t, g.sim.Calls("cudaMemDiscardBatchAsync"))
	}
}

// searchEvict returns what nextEvict should return, by a search among all resident chunks.
func searchEvict(p *planner) (victim, last int, best bool) {
	victim, other := -1, 0
	for id, c := range p.resident {
		now, next := false, math.MaxInt
		for _, t := range slices.Backward(p.future[id]) {
			if t.step >= p.step {
				now, next = t.step == p.step, t.step
			}
		}
		switch {
		case now:
		case len(p.future[id]) > 0 && p.future[id][0].step < p.step:
			other = max(other, next)
		case victim < 0 || cmp.Or(cmp.Compare(next, last), cmp.Compare(p.resident[victim].last, c.last), cmp.Compare(victim, id)) > 0:
			victim, last = id, next
		}
	}
	return victim, last, victim >= 0 && last >= other
}

// What leaves is found without a search among all that is on the device, and is the same.
func TestTheEvictedChunkHasTheLatestNextUse(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{}, Options{})
	m := g.alloc(64 * mib)
	found, better := 0, 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		steps := make([]Step, 60)
		for i := range steps {
			for range r.IntN(4) {
				steps[i] = append(steps[i], Use{m.Range(r.IntN(30)*2*mib, (1+r.IntN(2))*2*mib), Mode(r.IntN(3))})
			}
		}
		p, err := newPlanner(steps, PlanOptions{Budget: (12 + r.IntN(40)) * mib, Chunk: 2 * mib, In: 1, Out: 1}, nil, true)
		if err != nil {
			require.ErrorIs(t, err, ErrOversubscribed)
			continue
		}
		for i := range steps {
			p.fetchAhead(i)
			victim, last, best := p.nextEvict()
			want, wantLast, wantBest := searchEvict(p)
			require.Equal(t, []any{want, wantLast, wantBest}, []any{victim, last, best}, "seed %d, step %d", seed, i)
			if victim >= 0 {
				found++
				if !best {
					better++
				}
			}
			p.runStep(i)
		}
	}
	assert.Greater(t, found, 1000)
	assert.Greater(t, better, 100)
}

// A plan of many steps over many chunks takes no time for each chunk on the device at each
// step: that would be minutes here.
func TestAScheduleOfManySteps(t *testing.T) {
	t.Parallel()
	const chunks, passes, room = 12_000, 4, 8000
	m := &Memory{p: unsafe.Pointer(new(byte)), n: chunks * 2 * mib}
	s, err := newSchedule(sequential(m.Whole(), 2*mib, passes, ReadWrite), PlanOptions{Budget: room * 2 * mib, Chunk: 2 * mib, In: 2, Out: 4}, nil, true)
	require.NoError(t, err)
	assert.Len(t, s.evicts, len(s.fetches))
	assert.Less(t, s.traffic.In, passes*m.n*3/5, "most stays from pass to pass")
}
