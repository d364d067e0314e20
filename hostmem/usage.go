package hostmem

import (
	"context"
	"sync/atomic"
)

// A usage counts the calls that are using something just now, so that it can be
// closed when there are none, and no lock is held while they are inside CUDA.
//
// state holds, from the low bits up, the calls in progress, whether a goroutine
// waits for their end, whether the thing was closed, and how many calls there were.
// So one comparison shows that no call has begun since.
type usage struct {
	state atomic.Uint64
	idle  chan struct{} // sent to when the last call in progress ends
}

const (
	usageCalls  = 1<<30 - 1
	usageWaited = 1 << 30
	usageClosed = 1 << 31
	usageCall   = 1<<32 + 1 // one more call, in progress
)

func (u *usage) init() { u.idle = make(chan struct{}, 1) }

// begin starts a call; false means that the thing was closed.
func (u *usage) begin() bool {
	if u.state.Add(usageCall)&usageClosed == 0 {
		return true
	}
	u.end()
	return false
}

// end ends a call.
func (u *usage) end() {
	if s := u.state.Add(^uint64(0)); s&usageCalls == 0 && s&usageWaited != 0 {
		select {
		case u.idle <- struct{}{}:
		default:
		}
	}
}

// wait waits until no call is in progress, and returns the state at that moment. It
// is for one goroutine at a time.
func (u *usage) wait(ctx context.Context) (seen uint64, err error) {
	for {
		if seen = u.state.Load(); seen&usageCalls == 0 {
			return seen, nil
		}
		if seen = u.state.Or(usageWaited); seen&usageCalls == 0 {
			continue
		}
		select {
		case <-u.idle:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// close refuses calls from now on, unless one has begun since the state was seen.
func (u *usage) close(seen uint64) bool {
	return u.state.CompareAndSwap(seen, seen|usageClosed)
}

func (u *usage) closed() bool { return u.state.Load()&usageClosed != 0 }
