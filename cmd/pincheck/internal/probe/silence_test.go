package probe

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// What counts is how often this process has looked, and not the time: it may have been stopped.
func TestSilenceIsCountedWhileThisProcessRuns(t *testing.T) {
	t.Parallel()
	ticks := make(chan time.Time)
	var s silenceOf
	s.allow(3)
	ended, silent := make(chan struct{}), false
	go func() {
		defer close(ended)
		s.watch(t.Context(), ticks, func() { silent = true })
	}()
	now := time.Now()
	tick := func() {
		now = now.Add(time.Hour)
		ticks <- now
	}
	for range 3 {
		tick()
	}
	s.allow(2) // it sends something; the third tick may be counted after this
	tick()
	select {
	case <-ended:
		assert.Fail(t, "it was heard after the third tick")
	default:
	}
	for open := true; open; {
		select {
		case ticks <- now:
		case <-ended:
			open = false
		}
	}
	assert.True(t, silent)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.watch(ctx, nil, func() { assert.Fail(t, "the end is no silence") })
}
