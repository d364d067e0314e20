package loader

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

// Going on after any batch gives just what was left, in either mode.
func TestALoaderResumesAfterEachBatch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n, size = 47, 5
	for _, unordered := range []bool{false, true} {
		for stop := 1; stop < 10; stop++ {
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
			require.True(t, at == Position{Epoch: 1, Order: "47 samples in batches of 5, shuffled with seed 9"}, "%+v", at)
			for b, err := range second.Batches(t.Context()) {
				require.NoError(t, err)
				require.Equal(t, 1, b.Epoch(), "then comes the next one")
				break
			}
			require.NoError(t, second.Close())
		}
	}
}

func TestPositionsOfUnorderedBatches(t *testing.T) {
	t.Parallel()
	e := &epoch{l: &Loader{spec: spec{n: 8, o: Options{BatchSize: 1}, order: "8"}}, number: 2}
	for _, step := range []struct {
		batch int
		want  Position
	}{
		{3, Position{Epoch: 2, Done: "3", Order: "8"}},
		{1, Position{Epoch: 2, Done: "1,3", Order: "8"}},
		{6, Position{Epoch: 2, Done: "1,3,6", Order: "8"}},
		{0, Position{Epoch: 2, Batch: 2, Done: "3,6", Order: "8"}},
		{5, Position{Epoch: 2, Batch: 2, Done: "3,5-6", Order: "8"}},
		{4, Position{Epoch: 2, Batch: 2, Done: "3-6", Order: "8"}},
		{7, Position{Epoch: 2, Batch: 2, Done: "3-7", Order: "8"}},
		{2, Position{Epoch: 3, Order: "8"}},
	} {
		e.got = e.got.with(step.batch)
		require.True(t, step.want == e.position(), "%+v", e.position())
		if e.finished() {
			break
		}
		epoch, done, err := e.position().resolve("8", 8)
		require.NoError(t, err)
		require.Equal(t, 2, epoch)
		require.Equal(t, e.got, done)
	}
	set, err := parseBatches(3, "4,6-7")
	require.NoError(t, err)
	for batch, want := range map[int]int{0: 3, 2: 3, 3: 3, 4: 5, 5: 5, 6: 8, 7: 8, 8: 8, 9: 9} {
		require.Equal(t, want, set.next(batch), batch)
	}
}

// Any set of batches is the same as a map of them.
func TestSetsOfBatches(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var set batchSet
		n := 1 + r.IntN(30)
		has := make(map[int]bool)
		for _, batch := range r.Perm(n) {
			set, has[batch] = set.with(batch), true
			for from := range n {
				want := from
				for has[want] {
					want++
				}
				require.Equal(t, want, set.next(from))
			}
			same, err := parseBatches(set.next(0), set.String())
			require.NoError(t, err)
			require.Equal(t, set, same)
		}
		require.Equal(t, batchSet{{0, n}}, set)
	}
}

// Programs store positions: their JSON stays as it is.
func TestPositionsAsJSON(t *testing.T) {
	t.Parallel()
	p := Position{Epoch: 2, Batch: 3, Done: "5-6", Order: Options{BatchSize: 32, Shuffle: true, Seed: 1<<64 - 1, DropLast: true}.order(1000)}
	text, err := json.Marshal(p)
	require.NoError(t, err)
	const want = `{"epoch":2,"batch":3,"done":"5-6","order":"1000 samples in batches of 32, full ones only, shuffled with seed 18446744073709551615"}`
	require.Equal(t, want, string(text))
	var back Position
	require.NoError(t, json.Unmarshal([]byte(want), &back))
	require.Equal(t, p, back)

	text, err = json.Marshal(Position{Epoch: 1})
	require.NoError(t, err)
	require.Equal(t, `{"epoch":1,"batch":0}`, string(text))
	require.Equal(t, "1000 samples in batches of 32", Options{BatchSize: 32, Seed: 5}.order(1000), "the seed decides nothing")
}

// A position in another order would skip samples, or give some twice.
func TestPositionsOfAnotherOrderAreRefused(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	o := Options{BatchSize: 4, Shuffle: true, Seed: 1}
	l := newLoaderFor(t, dev, numbered(30, 8), o)
	var at Position
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if at = b.Position(); at.Batch == 2 {
			break
		}
	}
	for what, test := range map[string]struct {
		n  int
		of func(*Options)
	}{
		"BatchSize": {30, func(o *Options) { o.BatchSize = 5 }},
		"length":    {31, func(o *Options) {}},
		"seed":      {30, func(o *Options) { o.Seed = 2 }},
		"Shuffle":   {30, func(o *Options) { o.Shuffle = false }},
		"DropLast":  {30, func(o *Options) { o.DropLast = true }},
	} {
		o := o
		o.Start = at
		test.of(&o)
		_, err := New(t.Context(), dev, numbered(test.n, 8), o)
		require.ErrorContains(t, err, "loader: new: Options.Start is a position in 30 samples in batches of 4, shuffled with seed 1, and this loader has ", what)
	}
	o.Start = Position{Epoch: at.Epoch, Batch: at.Batch}
	_, err := New(t.Context(), dev, numbered(30, 8), o)
	require.ErrorContains(t, err, "loader: new: Options.Start is within an epoch and has no Order")
	o.Start = Position{Done: "3"}
	_, err = New(t.Context(), dev, numbered(30, 8), o)
	require.ErrorContains(t, err, "has no Order")

	// Not so the same order with other workers, unordered; and the begin of an
	// epoch is the same in all.
	o.Start, o.Unordered, o.Workers = at, true, 7
	newLoaderFor(t, dev, numbered(30, 8), o)
	o.Start = Position{Epoch: 7}
	l = newLoaderFor(t, dev, numbered(30, 8), o)
	require.Equal(t, 7, gaveEpoch(t, l))
}

// Without its last batch an epoch of fewer samples than one batch has none.
func TestDropLastOfLessThanABatch(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for n, want := range map[int][]int{60: nil, 99: nil, 100: {100}, 101: {100}, 250: {100, 100}} {
		l := newLoaderFor(t, dev, numbered(n, 8), Options{BatchSize: 100, DropLast: true})
		for range 2 {
			var sizes []int
			for _, indices := range epochOf(t, l, s, 8) {
				sizes = append(sizes, len(indices))
			}
			require.Equal(t, want, sizes, "%d samples", n)
		}
	}
	l := newLoaderFor(t, dev, numbered(60, 8), Options{BatchSize: math.MaxInt})
	require.Len(t, slices.Concat(epochOf(t, l, s, 8)...), 60)
}

// A batch that is complete does not wait for one before it.
func TestUnorderedDoesNotWait(t *testing.T) {
	t.Parallel()
	others := make(chan struct{})
	src := Func(20, []int{8}, func(ctx context.Context, i int, _ [][]byte) error {
		if i == 0 {
			select {
			case <-others:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	l := newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 2, Prefetch: 2, Unordered: true})
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	var numbers []int
	for b, err := range l.Batches(ctx) {
		require.NoError(t, err)
		if numbers = append(numbers, b.Number()); len(numbers) == 4 {
			close(others)
		}
	}
	require.Len(t, numbers, 5)
	require.Zero(t, numbers[4], "%v", numbers)
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
		{10, 0, 0, []int{5, 1, 0, 6, 4, 8, 7, 2, 9, 3}},
		{10, 0, 1, []int{3, 5, 9, 2, 6, 1, 8, 7, 0, 4}},
		{1000, 7, 3, []int{383, 480, 209, 370, 897, 107, 119, 86}},
		{4096, 7, 3, []int{383, 4071, 3762, 370, 3360, 3099, 3460, 3391}},
		{4097, 7, 3, []int{545, 1904, 3130, 617, 2105, 173, 3513, 707}},
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

// requireChiSquared requires that counts are as even as chance makes them: chi
// squared of so many degrees of freedom within five deviations.
func requireChiSquared(t *testing.T, counts []int, freedom float64, what string) {
	t.Helper()
	total := 0
	for _, n := range counts {
		total += n
	}
	mean := float64(total) / float64(len(counts))
	chi := 0.0
	for _, n := range counts {
		d := float64(n) - mean
		chi += d * d / mean
	}
	require.InDelta(t, freedom, chi, 5*math.Sqrt(2*freedom), "chi squared of %s, of %v on the average", what, mean)
}

// Every place is as likely as any other, for lists that are shuffled and for
// those that are computed.
func TestOrdersAreMixed(t *testing.T) {
	t.Parallel()
	for _, n := range []int{64, 4097} {
		const epochs, groups = 4000, 64
		counts := make([]int, groups*groups) // of positions and samples
		for epoch := range epochs {
			p := newPermutation(n, 5, epoch)
			for group := range groups {
				i := group * (n / groups)
				counts[group*groups+min(p.at(i)/(n/groups), groups-1)]++
			}
		}
		freedom := float64((groups - 1) * (groups - 1))
		if n > groups { // of each group one position is looked at
			freedom = groups * (groups - 1)
		}
		requireChiSquared(t, counts, freedom, "places")
	}
}

// Of five samples, which ones come first and second are as likely as any other
// two.
func TestPairsOfAFewSamplesAreEven(t *testing.T) {
	t.Parallel()
	const n, epochs = 5, 20_000
	for places := range n - 1 { // the first and second, the second and third, ...
		counts := make([]int, 0, n*(n-1))
		var pairs [n][n]int
		for epoch := range epochs {
			p := newPermutation(n, 11, epoch)
			pairs[p.at(places)][p.at(places+1)]++
		}
		for i := range n {
			for j := range n {
				if i != j {
					counts = append(counts, pairs[i][j])
				}
			}
		}
		requireChiSquared(t, counts, n*(n-1)-1, "pairs")
	}
	// And so are the 120 orders.
	orders := make(map[string]int)
	for epoch := range epochs {
		p := newPermutation(n, 12, epoch)
		order := make([]byte, n)
		for i := range order {
			order[i] = '0' + byte(p.at(i))
		}
		orders[string(order)]++
	}
	require.Len(t, orders, 120)
	requireChiSquared(t, slices.Collect(maps.Values(orders)), 119, "orders")
}

// Samples that were neighbours are no more often neighbours than by chance.
func TestNeighboursDoNotStay(t *testing.T) {
	t.Parallel()
	for _, n := range []int{64, 128, 1000} {
		const epochs = 20_000
		together := 0
		for epoch := range epochs {
			p := newPermutation(n, 3, epoch)
			for i := 1; i < n; i++ {
				if p.at(i) == p.at(i-1)+1 {
					together++
				}
			}
		}
		// Each of n-1 pairs follows on each other with a chance of 1/n.
		want := epochs * float64(n-1) / float64(n)
		require.InDelta(t, want, together, 5*math.Sqrt(want), "%d samples", n)
	}
}
