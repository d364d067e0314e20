package probe

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// silentTicks is the number of ticks without an answer after which a child process counts as hung.
const silentTicks = 15

// silenceOf counts the ticks of this process in which a child process has sent nothing, or the
// library does not open. It counts ticks and not time, because processes stop after Ctrl-Z and in a
// frozen control group.
type silenceOf struct{ left atomic.Int64 }

// allow sets the number of ticks that may pass without an answer.
func (s *silenceOf) allow(ticks int) { s.left.Store(int64(ticks)) }

// errSilent is the cause of a context that ends because a process has sent nothing for too long.
var errSilent = errors.New("silent")

// listen returns a context that ends with cause if heard is not called in time: within first at
// the beginning, and within then after each call.
func listen(ctx context.Context, first, then time.Duration, cause error) (listening context.Context, heard, stop func()) {
	listening, cancel := context.WithCancelCause(ctx)
	tick := then / silentTicks
	ticker := time.NewTicker(tick)
	allowance := new(silenceOf)
	allowance.allow(int(first / tick))
	go allowance.watch(listening, ticker.C, func() { cancel(cause) })
	return listening, func() { allowance.allow(silentTicks) }, func() { ticker.Stop(); cancel(nil) }
}

// watch calls tooLong once the allowed ticks have passed. It returns then, or when ctx ends.
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
