package verify

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestPresetPlansCoverWhatTheyPromise(t *testing.T) {
	t.Parallel()
	for _, full := range []bool{false, true} {
		plan, err := Plan{Full: full}.normal()
		require.NoError(t, err)
		assert.Equal(t, Paths(), plan.Paths)
		total := 0
		for _, path := range plan.Paths {
			cases := plan.cases(path)
			total += len(cases)
			type pair struct {
				Pattern
				Offset
			}
			pairs := make(map[pair]int)
			sizes := make(map[int]int)
			streams := make(map[int]int)
			for _, c := range cases {
				require.Equal(t, path, c.Path)
				pairs[pair{c.Pattern, c.Offset}]++
				sizes[c.SizeBytes]++
				streams[c.Streams]++
				require.LessOrEqual(t, c.Streams, c.SizeBytes)
			}
			assert.Len(t, pairs, len(patterns())*len(allOffsets), "%s full=%v: every pattern with every offset", path, full)
			for _, n := range []int{1, 7, 63, 64, 65, 4095, 4096, 4097, 65535, 65537, 2*mib - 1, 2*mib + 1} {
				assert.Positive(t, sizes[n], "%s full=%v: size %d", path, full, n)
			}
			switch {
			case path == pathPageable:
				assert.Equal(t, map[int]int{0: len(cases)}, streams)
			case path == pathDeviceMemory:
				assert.Equal(t, map[int]int{1: len(cases)}, streams)
			case path.info().copier:
				assert.Equal(t, map[int]int{0: len(cases) / 2, 1: len(cases) / 2}, streams)
			default:
				assert.Positive(t, streams[1])
				assert.Positive(t, streams[4])
				assert.Len(t, streams, 2)
			}
			if full && path == pathPinned {
				assert.Positive(t, sizes[4*gib+4097])
			}
		}
		t.Logf("full=%v: %d cases", full, total)
	}
}

func TestLargeCasesShowPlaces(t *testing.T) {
	t.Parallel()
	plan, err := Plan{Full: true}.normal()
	require.NoError(t, err)
	for _, c := range plan.cases(pathPinned) {
		if c.SizeBytes >= largeBytes {
			assert.True(t, c.Pattern.positional(), "%v", c)
		}
	}
	plan.Patterns = []Pattern{patternZeros}
	assert.NotEmpty(t, plan.cases(pathPinned), "a plan of zeros alone keeps its large sizes")
}

func TestCasesOfACustomPlan(t *testing.T) {
	t.Parallel()
	plan, err := Plan{
		Paths: []Path{pathPinned}, Sizes: []int{9, 3, 3, 5000}, Streams: []int{2}, MaxBytes: 4096,
		Patterns: []Pattern{patternCounter, patternRandom}, Offsets: []Offset{{}, {1, 2, 3}}, Variants: 100,
	}.normal()
	require.NoError(t, err)
	cases := plan.cases(pathPinned)
	var want []Case
	for _, size := range []int{3, 9} {
		for _, p := range []struct {
			Pattern
			Offset
		}{{patternCounter, Offset{}}, {patternRandom, Offset{1, 2, 3}}, {patternCounter, Offset{1, 2, 3}}, {patternRandom, Offset{}}} {
			want = append(want, Case{pathPinned, p.Pattern, size, p.Offset, 2})
		}
	}
	assert.Equal(t, want, cases)
}

func TestInvalidPlansAreErrors(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	for name, plan := range map[string]Plan{
		`Plan.Paths has unknown path "cloud"`:             {Paths: []Path{"cloud"}},
		`Plan.Patterns has unknown pattern "noise"`:       {Patterns: []Pattern{"noise"}},
		"Plan.Sizes has 0: must be positive":              {Sizes: []int{5, 0}},
		"Plan.Streams has 0: must be 1 to 64":             {Streams: []int{0}},
		"Plan.Streams has 65":                             {Streams: []int{65}},
		"Device:-1 Return:0}: must be 0 to 1048576 bytes": {Offsets: []Offset{{0, -1, 0}}},
		"Return:1048577":                                  {Offsets: []Offset{{0, 0, mib + 1}}},
		fmt.Sprintf("Source:%d", math.MaxInt):             {Offsets: []Offset{{math.MaxInt, 0, 0}}},
		fmt.Sprintf("Plan.Sizes has %d", math.MinInt):     {Sizes: []int{math.MinInt}},
		"Plan.Variants of -1":                             {Variants: -1},
		"MaxBytes of -1":                                  {MaxBytes: -1},
		"MaxDetails of -1: must not be negative":          {MaxDetails: -1},
	} {
		_, err := plan.normal()
		require.ErrorContains(t, err, name)
		r, err := Run(t.Context(), dev, plan)
		require.ErrorContains(t, err, "verify: run: Plan.")
		require.ErrorContains(t, err, name)
		assert.Nil(t, r)
	}
}

func TestPartsOfDownloads(t *testing.T) {
	t.Parallel()
	for k := 1; k <= 8; k++ {
		for n := k; n < 200; n++ {
			assert.Zero(t, returnPart(n, 0, k))
			assert.Equal(t, n, returnPart(n, k, k))
			var starts []int
			for i := range k + 1 {
				starts = append(starts, returnPart(n, i, k))
			}
			assert.True(t, slices.IsSorted(starts), "%d bytes in %d parts: %v", n, k, starts)
		}
	}
	assert.Equal(t, []int{0, 100, 300, 500, 800}, []int{returnPart(800, 0, 4), returnPart(800, 1, 4), returnPart(800, 2, 4), returnPart(800, 3, 4), returnPart(800, 4, 4)})
}

func TestOverrunReportsSideAndOffset(t *testing.T) {
	t.Parallel()
	guard := slices.Repeat([]byte{guardByte}, guardBytes)
	_, ok := overrun(atDevice, guard, guard, 100)
	assert.True(t, ok)

	after := slices.Clone(guard)
	after[3], after[4] = 0, 1
	d, ok := overrun(atDevice, guard, after, 100)
	assert.False(t, ok)
	assert.Equal(t, []any{103, 104, 2, causeOverrun, atDevice},
		[]any{d.FirstBadOffsetBytes, d.LastBadOffsetBytes, d.BadBytes, d.Cause, d.At})
	assert.Equal(t, "0001d6", d.FoundHex[:6])
	assert.Equal(t, "d6d6d6", d.ExpectedHex[:6])
	d.SizeBytes = 100
	assert.Contains(t, d.describe(), "2 bytes outside the device's target written, from offset 103")

	before := slices.Clone(guard)
	before[guardBytes-1] = 9
	d, ok = overrun(atReturn, before, after, 100)
	assert.False(t, ok)
	assert.Equal(t, []any{-1, 104, 3, atReturn}, []any{d.FirstBadOffsetBytes, d.LastBadOffsetBytes, d.BadBytes, d.At})
}

// Sizes that memory cannot have are skipped, also if a number of copies of them is more than an int counts.
func TestLargestSizesAreSkipped(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	for _, n := range []int{math.MaxInt, math.MaxInt - 4096, math.MaxInt/2 + 1, math.MaxInt/3 + 2} {
		r, err := Run(t.Context(), dev, Plan{Sizes: []int{n}, Variants: 1, NoStale: true, Peer: dev.Runtime().Devices()[1]})
		require.NoError(t, err)
		assert.Empty(t, r.Failures)
		assert.Positive(t, r.CasesPlanned)
		assert.Equal(t, r.CasesPlanned, r.SkippedCases)
	}
}
