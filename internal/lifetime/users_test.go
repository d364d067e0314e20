package lifetime

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Random operations on one Users, beside an oracle of three variables.
func TestUsersModel(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	var u Users
	generation, open, calls := uint32(0), true, 0
	for range 100_000 {
		of := generation - uint32(random.IntN(4)/3) // sometimes the one before
		now := open && of == generation
		require.Equal(t, now, u.Open(of))
		switch random.IntN(6) {
		case 5:
			if random.IntN(4) == 0 {
				retired, idle := u.RetireAndRenew(of)
				assert.Equal(t, now, retired)
				assert.Equal(t, now && calls == 0, idle)
				open = open && !retired
				if idle {
					generation++
					open = true
				}
			}
		case 4:
			u.Hold()
			calls++
		case 0:
			if begun := u.Begin(of); assert.Equal(t, now, begun, "Begin") && begun {
				calls++
			}
		case 1:
			if calls > 0 {
				calls--
				assert.Equal(t, !open && calls == 0, u.End(), "End")
			}
		case 2:
			if random.IntN(4) == 0 {
				retired, idle := u.Retire(of)
				assert.Equal(t, now, retired)
				assert.Equal(t, now && calls == 0, idle)
				open = open && !retired
			}
		default:
			if !open && calls == 0 {
				generation++
				open = true
				assert.Equal(t, generation, u.Renew())
			}
		}
		require.Equal(t, calls, u.Calls())
		require.Equal(t, generation, u.Generation())
		if t.Failed() {
			return
		}
	}
}

// Goroutines use something while others end its generations: who is told that one is over
// has it alone. The race detector sees the accesses.
func TestUsersHandOver(t *testing.T) {
	t.Parallel()
	const generations = 3000
	var u Users
	var thing uint32 // read by calls, written by the one that is told
	over := func() {
		thing++
		u.Renew()
	}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for g := u.Generation(); g < generations; g = u.Generation() {
				if u.Begin(g) {
					if thing != g {
						t.Errorf("generation %d sees %d", g, thing)
					}
					if i%2 == 0 {
						runtime.Gosched()
					}
					if u.End() {
						over()
					}
				}
				if _, idle := u.Retire(g); idle {
					over()
				}
			}
		})
	}
	all.Wait()
	assert.GreaterOrEqual(t, thing, uint32(generations))
}

func BenchmarkUsers(b *testing.B) {
	var u Users
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if u.Begin(0) {
				u.End()
			}
		}
	})
}
