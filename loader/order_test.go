package loader

import (
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

// Going on after any batch gives just what was left, in either mode.
func TestGoingOnAfterEachBatch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n, size = 47, 5
	for _, unordered := range []bool{false, true} {
		for stop := 1; stop <= 10; stop++ {
			o := Options{BatchSize: size, Workers: 6, Shuffle: true, Seed: 9, Unordered: unordered}
			first, err := New(t.Context(), dev, numbered(n, 4), o)
			require.NoError(t, err)
			var seen []int
			var at Position
			given := 0
			for b, err := range first.Batches(t.Context()) {
				require.NoError(t, err)
				seen = append(seen, b.Indices()...)
				at = b.Position()
				if given++; given == stop {
					break
				}
			}
			require.NoError(t, first.Close())

			text, err := json.Marshal(at)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &o.Start))
			second, err := New(t.Context(), dev, numbered(n, 4), o)
			require.NoError(t, err)
			for b, err := range second.Batches(t.Context()) {
				require.NoError(t, err)
				require.Zero(t, b.Epoch())
				seen = append(seen, b.Indices()...)
				at = b.Position()
			}
			slices.Sort(seen)
			require.Len(t, seen, n, "unordered %t, went on after %d: %s", unordered, stop, text)
			require.Len(t, slices.Compact(seen), n)
			require.Equal(t, Position{Batch: 10}, at)
			for b, err := range second.Batches(t.Context()) {
				require.NoError(t, err)
				require.Equal(t, 1, b.Epoch(), "then comes the next one")
				break
			}
			require.NoError(t, second.Close())
		}
	}
}

func TestPositions(t *testing.T) {
	t.Parallel()
	p := Position{Epoch: 2}
	for _, step := range []struct {
		batch int
		want  Position
	}{
		{3, Position{2, 0, []int{3}}},
		{1, Position{2, 0, []int{1, 3}}},
		{0, Position{2, 2, []int{3}}},
		{5, Position{2, 2, []int{3, 5}}},
		{2, Position{2, 4, []int{5}}},
		{4, Position{2, 6, nil}},
	} {
		p = p.after(step.batch)
		require.Equal(t, step.want.Batch, p.Batch)
		require.Equal(t, len(step.want.Done), len(p.Done))
		for i := range p.Done {
			require.Equal(t, step.want.Done[i], p.Done[i])
		}
	}
	for batch, want := range map[int]bool{0: true, 2: true, 3: false, 4: true, 5: false, 6: true} {
		require.Equal(t, want, Position{Batch: 3, Done: []int{4, 6}}.has(batch), batch)
	}
	tidy := Position{Epoch: 1, Batch: 2, Done: []int{5, 2, 3, 1, 5}}.tidy()
	require.Equal(t, 4, tidy.Batch)
	require.Equal(t, []int{5}, tidy.Done)
}

func TestTheSameSeedGivesTheSameOrder(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	order := func(seed uint64, workers int) (all []int) {
		l := newLoaderFor(t, dev, numbered(100, 3), Options{BatchSize: 7, Shuffle: true, Seed: seed, Workers: workers})
		for range 2 {
			all = append(all, slices.Concat(epochOf(t, l, s, 3)...)...)
		}
		return all
	}
	assert.Equal(t, order(1, 1), order(1, 30))
	assert.NotEqual(t, order(1, 1), order(2, 1))
}

// The orders of all machines and versions: programs resume in the middle.
func TestOrdersStayAsTheyAre(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		n     int
		seed  uint64
		epoch int
		want  []int
	}{
		{10, 0, 0, []int{4, 8, 6, 0, 9, 2, 3, 7, 5, 1}},
		{10, 0, 1, []int{4, 2, 0, 8, 7, 1, 3, 6, 9, 5}},
		{1000, 7, 3, []int{630, 592, 137, 445, 946, 575, 382, 633}},
		{1 << 40, 7, 3, []int{431930620226, 465310514700, 123048755906, 880619578978}},
	} {
		p := newPermutation(c.n, c.seed, c.epoch)
		var got []int
		for i := range c.want {
			got = append(got, p.at(i))
		}
		assert.Equal(t, c.want, got, "%+v", c)
	}
}

// Neighbours do not stay together, and every place is as likely as any other.
func TestOrdersAreMixed(t *testing.T) {
	t.Parallel()
	const n, epochs = 64, 4000
	var at [n][n]int
	together := 0
	for e := range epochs {
		p := newPermutation(n, 5, e)
		last := -2
		for i := range n {
			to := p.at(i)
			at[i][to]++
			if to == last+1 {
				together++
			}
			last = to
		}
	}
	chi := 0.0
	const mean = float64(epochs) / n
	for i := range n {
		for j := range n {
			d := float64(at[i][j]) - mean
			chi += d * d / mean
		}
	}
	// 63 x 63 degrees of freedom: the mean is 3969, the deviation 89.
	assert.InDelta(t, 63*63, chi, 5*89, "chi squared")
	// Of 63 pairs one in 64 follows on the other.
	assert.InDelta(t, epochs*63.0/64, together, 5*math.Sqrt(epochs), "neighbours that stayed so")
}
