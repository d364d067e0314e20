package probe

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// silentTicks is how often this process looks before the silence of another one is too long.
const silentTicks = 15

// silenceOf counts for how many ticks of this process another one has sent nothing. Time in which
// this process does not run is no silence: after Ctrl-Z, or in a control group that was frozen,
// both say nothing.
type silenceOf struct{ left atomic.Int64 }

// allow allows a number of ticks from now on.
func (s *silenceOf) allow(ticks int) { s.left.Store(int64(ticks)) }

// errSilent is the cause of a context that ends because a process has sent nothing for too long.
var errSilent = errors.New("silent")

// listen returns a context that ends with errSilent when heard is not called for a time: this one
// first, and then that one.
func listen(ctx context.Context, first, then time.Duration) (listening context.Context, heard, stop func()) {
	listening, cancel := context.WithCancelCause(ctx)
	tick := then / silentTicks
	ticker := time.NewTicker(tick)
	quiet := new(silenceOf)
	quiet.allow(int(first / tick))
	go quiet.watch(listening, ticker.C, func() { cancel(errSilent) })
	return listening, func() { quiet.allow(silentTicks) }, func() { ticker.Stop(); cancel(nil) }
}

// watch calls tooLong at the first tick after those that were allowed. It returns then, and at
// the end of ctx.
func (s *silenceOf) watch(ctx context.Context, ticks <-chan time.Time, tooLong func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
			if s.left.Add(-1) < 0 {
				tooLong()
				return
			}
		}
	}
}
