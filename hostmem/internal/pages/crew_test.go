package pages

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// model is a made-up host: bytes a second by the number of threads at work.
type model func(threads int) float64

const gb = 1e9

var models = map[string]struct {
	procs int
	rate  model
}{
	"2 cores":                    {2, func(n int) float64 { return 7 * gb * float64(min(n, 2)) }},
	"4 cores":                    {4, func(n int) float64 { return 7.5 * gb * float64(min(n, 4)) }},
	"8 cores":                    {8, func(n int) float64 { return 7 * gb * float64(min(n, 8)) }},
	"16 cores, measured":         {16, func(n int) float64 { return min(6.5*float64(n), 54) * gb }},
	"16 cores, slow beyond four": {16, func(n int) float64 { return 7 * gb * float64(min(n, 4)) / float64(max(1, n-4)) }},
	"16 cores, slow beyond six":  {16, func(n int) float64 { return map[bool]float64{true: 8 * float64(n), false: 12}[n <= 6] * gb }},
	"64 cores":                   {64, func(n int) float64 { return min(3*float64(n), 90) * gb }},
	"64 cores, slow beyond ten":  {64, func(n int) float64 { return map[bool]float64{true: 5 * float64(n), false: 10}[n <= 10] * gb }},
	"one thread does it all":     {16, func(n int) float64 { return 10 * gb }},
}

// work sleeps as the model says, looking anew at how many work every quarter.
type simulated struct {
	rate model
	mu   sync.Mutex
	at   int
	most int
	seen map[int]int // items by number of threads
}

func (s *simulated) work(_ context.Context, off, n int) error {
	s.mu.Lock()
	s.at++
	s.most = max(s.most, s.at)
	s.seen[s.at]++
	s.mu.Unlock()
	for range 4 {
		s.mu.Lock()
		each := s.rate(s.at) / float64(s.at)
		s.mu.Unlock()
		time.Sleep(time.Duration(float64(n) / 4 / each * 1e9))
	}
	s.mu.Lock()
	s.at--
	s.mu.Unlock()
	return nil
}

func simulate(t *testing.T, procs, threads, n int, rate model) (took time.Duration, s *simulated) {
	s = &simulated{rate: rate, seen: make(map[int]int)}
	synctest.Test(t, func(t *testing.T) {
		c := &crew{to: n, size: min(maxItem, max(n/(4*procs)&^(2<<20-1), 2<<20)), want: threads, procs: procs, work: s.work}
		start := time.Now()
		require.NoError(t, c.run(t.Context()))
		took = time.Since(start)
		assert.Zero(t, c.running)
	})
	return took, s
}

// On every host the crew comes near to the best fixed number of threads, which
// it does not know, and never falls into the hole that the wrong one is.
func TestTheCrewComesNearTheBestNumberOfThreads(t *testing.T) {
	t.Parallel()
	for name, m := range models {
		for _, size := range []int{64 << 20, 1<<30 + 1, 4<<30 + 1} {
			t.Run(fmt.Sprintf("%s, %d MiB", name, size>>20), func(t *testing.T) {
				t.Parallel()
				var best time.Duration
				bestThreads := 0
				for _, threads := range []int{1, 2, 3, 4, 5, 6, 8, 10, 12, 16} {
					if threads > mostThreads(m.procs) {
						break
					}
					took, _ := simulate(t, m.procs, threads, size, m.rate)
					if best == 0 || took < best {
						best, bestThreads = took, threads
					}
				}
				took, s := simulate(t, m.procs, 0, size, m.rate)
				t.Logf("best %v with %d, adaptive %v, at most %d, %v", best, bestThreads, took, s.most, s.seen)
				assert.LessOrEqual(t, s.most, mostThreads(m.procs))
				switch few, _ := simulate(t, m.procs, min(firstThreads, m.procs), size, m.rate); {
				case size < 1<<30: // too short to find out much: never far from a few threads
					assert.Less(t, took.Seconds(), 1.8*few.Seconds())
				case size < 4<<30:
					assert.Less(t, took.Seconds(), 2.5*best.Seconds())
				default:
					assert.Less(t, took.Seconds(), 1.5*best.Seconds())
				}
			})
		}
	}
}

func TestAFixedNumberOfThreadsIsKept(t *testing.T) {
	t.Parallel()
	for _, threads := range []int{1, 2, 3, 5, 16, 100} {
		_, s := simulate(t, 2, threads, 1<<30, models["2 cores"].rate)
		assert.Equal(t, threads, s.most)
	}
}

func TestMostThreads(t *testing.T) {
	t.Parallel()
	for procs, want := range map[int]int{1: 1, 2: 2, 4: 4, 8: 8, 12: 8, 16: 8, 24: 12, 32: 16, 128: 16} {
		assert.Equal(t, want, mostThreads(procs), "%d", procs)
	}
}

func TestOneDisturbedWindowChangesNothing(t *testing.T) {
	t.Parallel()
	rate := models["16 cores, measured"].rate
	s := &simulated{rate: rate, seen: make(map[int]int)}
	var items int
	s.rate = func(n int) float64 {
		// The host does something else for a while, soon after the crew doubled.
		if items++; items > 4*13 && items < 4*28 {
			return rate(n) / 3
		}
		return rate(n)
	}
	synctest.Test(t, func(t *testing.T) {
		c := &crew{to: 4 << 30, size: maxItem, procs: 16, work: s.work}
		require.NoError(t, c.run(t.Context()))
		assert.Equal(t, 8, c.want)
	})
}
