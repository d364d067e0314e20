package probe

import (
	"context"
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
