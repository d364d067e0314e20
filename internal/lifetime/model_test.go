package lifetime

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/bounded"
)

var rounds = flag.Int("rounds", 400, "rounds of the model test")

// The model: one Lifetime, of which calls, Closes, ends of contexts and of releases are done at
// random, and time passes. After each step all goroutines run until they wait; then the oracle,
// which is three variables, says who may wait and what each Close has returned.
func TestLifetimeModel(t *testing.T) {
	t.Parallel()
	for round := range *rounds {
		synctest.Test(t, func(t *testing.T) {
			m := &model{T: t, random: rand.New(rand.NewPCG(1, uint64(round)))}
			for range 60 {
				m.step()
				m.check()
			}
			m.end()
		})
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
}

type model struct {
	*testing.T
	random *rand.Rand
	Lifetime

	// The oracle.
	calls    int
	shut     bool
	released bool

	running *modelClose // whose release is in progress
	closes  []*modelClose
}

// A modelClose is one call of Close.
type modelClose struct {
	m       *model
	ctx     context.Context
	cancel  context.CancelCauseFunc // nil for a context that cannot end
	ended   time.Time               // when ctx ended; zero before
	outcome chan error              // what release is to return
	result  chan error              // what Close has returned
	ran     bool                    // its release has been called
	got     error                   // what that has returned
}

var errCause = errors.New("the context's cause")

func (m *model) step() {
	switch k := m.random.IntN(100); {
	case k < 30:
		if begun := m.Begin(); assert.Equal(m, !m.shut, begun, "Begin") && begun {
			m.calls++
		}
	case k < 55:
		if m.calls > 0 {
			m.calls--
			m.End()
		}
	case k < 57:
		m.shut = true
		assert.Equal(m, m.calls, m.Seal(), "Seal")
	case k < 70:
		m.close()
	case k < 80:
		if len(m.closes) > 0 {
			m.closes[m.random.IntN(len(m.closes))].end()
		}
	case k < 92:
		if c := m.running; c != nil {
			c.got = nil
			if m.random.IntN(3) > 0 {
				c.got = errRelease
			}
			m.running = nil
			m.released = c.got == nil
			c.outcome <- c.got
		}
	case k < 96:
		time.Sleep(bounded.Grace / 2)
	default:
		time.Sleep(2 * bounded.Grace)
	}
}

func (m *model) close() {
	m.shut = true
	c := &modelClose{m: m, ctx: context.Background(), outcome: make(chan error), result: make(chan error, 1)}
	if m.random.IntN(3) > 0 {
		c.ctx, c.cancel = context.WithCancelCause(c.ctx)
		if m.random.IntN(4) == 0 {
			c.end()
		}
	}
	m.closes = append(m.closes, c)
	go func() { c.result <- m.Close(c.ctx, c.release) }()
}

func (c *modelClose) end() {
	if c.cancel != nil && c.ended.IsZero() {
		c.ended = time.Now()
		c.cancel(errCause)
	}
}

// release is what Close calls. It returns when the model says so, and not with its context.
func (c *modelClose) release(ctx context.Context) error {
	assert.Nil(c.m, c.m.running, "two releases at a time")
	assert.Zero(c.m, c.m.calls, "calls during a release")
	assert.False(c.m, c.m.released, "released again")
	assert.False(c.m, c.ran, "one Close calls it once")
	assert.Equal(c.m, c.ctx, ctx)
	c.ran, c.m.running = true, c
	return <-c.outcome
}

// check compares what the Lifetime has done with what it must have.
func (m *model) check() {
	synctest.Wait()
	assert.Equal(m, m.shut, m.Sealed())
	m.closes = slices.DeleteFunc(m.closes, func(c *modelClose) bool {
		select {
		case err := <-c.result:
			m.returned(c, err)
			return true
		default:
			m.waits(c)
			return false
		}
	})
	if m.running == nil && m.shut && m.calls == 0 && !m.released {
		assert.Empty(m, m.closes, "none of these releases")
	}
	if m.Failed() {
		m.FailNow()
	}
}

// returned checks what a Close has returned.
func (m *model) returned(c *modelClose, err error) {
	switch {
	case m.running == c:
		assert.ErrorIs(m, err, bounded.ErrStuck)
		assert.ErrorIs(m, err, errCause)
		assert.GreaterOrEqual(m, time.Since(c.ended), bounded.Grace)
	case c.ran:
		assert.Equal(m, c.got, err, "its release's error")
	case err == nil:
		assert.True(m, m.released, "nil before the release has worked")
	default:
		assert.ErrorIs(m, err, errCause)
		assert.False(m, c.ended.IsZero(), "its context has not ended")
		assert.True(m, m.calls > 0 || m.running != nil, "it had to wait for nothing")
	}
}

// waits checks that a Close may be waiting.
func (m *model) waits(c *modelClose) {
	switch {
	case m.running == c:
		assert.True(m, c.ended.IsZero() || time.Since(c.ended) < bounded.Grace, "beyond its context")
	case !c.ended.IsZero():
		m.Error("waits beyond its context")
	default:
		assert.True(m, m.calls > 0 || m.running != nil, "waits for nothing")
	}
}

// end lets everything go on: all Closes return.
func (m *model) end() {
	for m.calls > 0 {
		m.calls--
		m.End()
	}
	for synctest.Wait(); m.running != nil; synctest.Wait() {
		c := m.running
		m.running, m.released, c.got = nil, true, nil
		c.outcome <- nil
	}
	m.check()
	require.Empty(m, m.closes)
	require.Zero(m, m.Seal())
	released := m.released
	require.NoError(m, m.Close(context.Background(), func(context.Context) error {
		assert.False(m, released, "released again")
		released = true
		return nil
	}))
	require.True(m, released, "never released")
}
