package compare

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

// A busyMachine makes up runs of one machine that others use too: bursts that take a share of all that is measured,
// for parts of a sample to many series long, a drift within the run, and heavy tails of single samples.
type busyMachine struct {
	r       *rand.Rand
	series  []busySeries
	bursts  float64 // a second
	longest float64 // seconds
	depth   float64 // at most
	walk    float64 // of the level in a second, as a standard deviation
	tail    float64 // of samples
}

type busySeries struct {
	result.Series
	level  float64
	n      int
	sample float64 // seconds
}

// newBusyMachine has series of large copies, of small ones and of pinning, of quick runs and of others.
func newBusyMachine(seed uint64, links, others, n int) *busyMachine {
	m := &busyMachine{r: rand.New(rand.NewPCG(seed, 3))}
	m.bursts, m.longest, m.depth = 0.2+m.r.Float64(), 2, 0.5
	m.walk, m.tail = 0.02*m.r.Float64(), 0.01+0.03*m.r.Float64()
	for i := range links + others {
		s := measured(fmt.Sprint(i), result.Higher)
		if i >= links {
			s.Name = "pin_rate"
		}
		m.series = append(m.series, busySeries{s, 10 + 50*m.r.Float64(), n, 0.01 + 0.02*m.r.Float64()})
	}
	return m
}

// heavy returns a value of Student's distribution with 3 degrees of freedom.
func (m *busyMachine) heavy() float64 {
	squares := 0.0
	for range 3 {
		x := m.r.NormFloat64()
		squares += x * x
	}
	return m.r.NormFloat64() / math.Sqrt(squares/3)
}

// run is a run in which one series is different by a factor; none for a negative index.
func (m *busyMachine) run(different int, factor float64) []result.Series {
	walked, left, taken := 0.0, 0.0, 0.0
	var out []result.Series
	for i, s := range m.series {
		for range s.n {
			if left -= s.sample; left < 0 {
				left, taken = 0, 0
				if m.r.Float64() < m.bursts*s.sample {
					left, taken = math.Exp(math.Log(0.005)+m.r.Float64()*math.Log(m.longest/0.005)), m.depth*m.r.Float64()
				}
			}
			walked += m.walk * math.Sqrt(s.sample) * m.r.NormFloat64()
			v := s.level * math.Exp(walked+m.tail*m.heavy()) * (1 - taken)
			if i == different {
				v *= factor
			}
			s.Samples = append(s.Samples, v)
		}
		s.Stats = result.Summarize(s.Samples)
		out = append(out, s.Series)
	}
	return out
}

// Of 1,000 comparisons of a busy machine with itself at most 10 find a difference in any series, whatever is measured.
func TestABusyMachineDiffersInOneOfAHundredComparisonsAtMost(t *testing.T) {
	t.Parallel()
	for _, c := range hosttest.Sample([]struct{ hosts, links, others, n int }{
		{2, 4, 20, 9}, {2, 60, 60, 9}, {2, 20, 0, 9}, {2, 6, 0, 25}, {2, 40, 40, 25}, {2, 0, 30, 6}, {2, 3, 1, 12}, {4, 20, 20, 9},
	}) {
		t.Run(fmt.Sprintf("%v", c), func(t *testing.T) {
			t.Parallel()
			wrong, rounds := 0, 1000
			for seed := range rounds {
				m := newBusyMachine(uint64(seed), c.links, c.others, c.n)
				var runs [][]result.Series
				for range c.hosts {
					runs = append(runs, m.run(-1, 1))
				}
				got, err := Compare(runsOf(t, runs...), 0.03)
				require.NoError(t, err)
				if differs(got) {
					wrong++
				}
			}
			t.Logf("%d of %d comparisons differ", wrong, rounds)
			assert.LessOrEqual(t, wrong, rounds/100)
		})
	}
}

// A steady series that is 15% slower is named, also among series of a busy machine.
func TestAChangeOfASteadySeriesIsNamed(t *testing.T) {
	t.Parallel()
	const links = 20
	for name, others := range map[string]int{"alone": 0, "beside busy series": 40} {
		found, alone, rounds := 0, 0, 200
		for seed := range rounds {
			m := newBusyMachine(uint64(seed), 0, others, 9)
			steady := func(different int) (out []result.Series) {
				for i := range links {
					level := 55.0
					if i == different {
						level *= 0.85
					}
					out = append(out, measured(fmt.Sprint("steady", i), result.Higher, noise(m.r, level, 0.005, 9)...))
				}
				return append(out, m.run(-1, 1)...)
			}
			c, err := Compare(runsOf(t, steady(-1), steady(seed%links)), 0.03)
			require.NoError(t, err)
			if find(t, c, fmt.Sprint("steady", seed%links)).Verdict == Worse {
				found++
			}
			if n := slices.IndexFunc(c.Rows, func(r Row) bool {
				return r.Verdict != Same && r.Verdict != Unclear && r.Labels.Get("name") != fmt.Sprint("steady", seed%links)
			}); n < 0 {
				alone++
			}
		}
		t.Logf("%s: found %d of %d, and nothing else in %d", name, found, rounds, alone)
		assert.GreaterOrEqual(t, found, rounds*95/100, name)
		assert.GreaterOrEqual(t, alone, rounds*99/100, name)
	}
}
