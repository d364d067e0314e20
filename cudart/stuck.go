package cudart

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"weak"
)

// noDevice is the ordinal of calls that are made for none.
const noDevice = -1

// The parts of cCall.name, from the low bits up. No call's name is 0.
const (
	nameFunction = 8  // bits
	nameDevice   = 24 // bits, of the ordinal plus one
)

func nameCall(number uint32, device int32, fn function) uint64 {
	return uint64(number)<<(nameFunction+nameDevice) | uint64(device+1)<<nameFunction | uint64(fn) + 1
}

// A StuckCall is a call into the CUDA library that does not return.
type StuckCall struct {
	Function string // such as "cudaStreamQuery"
	Device   int    // the ordinal, or -1 for a call that concerns none
}

// String names the call and its device.
func (c StuckCall) String() string {
	if c.Device == noDevice {
		return c.Function
	}
	return fmt.Sprintf("%s on device %d", c.Function, c.Device)
}

// Stuck returns the calls that stay inside the library for all of the next d.
// It takes that long, or until ctx ends, when it returns those that have been
// inside since it was called. Long calls are listed as well as those that never
// return: choose d accordingly.
//
// A call that never returns occupies its goroutine and one thread. Other
// streams and all waits go on.
func (rt *Runtime) Stuck(ctx context.Context, d time.Duration) []StuckCall {
	if ctx == nil {
		ctx = context.Background()
	}
	before := rt.inside()
	if len(before) == 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	var stuck []StuckCall
	for c, name := range rt.inside() {
		if before[c] != name {
			continue
		}
		fn := function(name&(1<<nameFunction-1)) - 1
		device := int(name>>nameFunction&(1<<nameDevice-1)) - 1
		stuck = append(stuck, StuckCall{Function: fn.name(), Device: device})
	}
	slices.SortFunc(stuck, func(a, b StuckCall) int { return strings.Compare(a.String(), b.String()) })
	return stuck
}

// inside are the calls that are inside the library, by name.
func (b *binding) inside() map[*cCall]uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := make(map[*cCall]uint64)
	for _, w := range b.made {
		f := w.Value()
		if f == nil {
			continue
		}
		for _, c := range [...]*cCall{&f.cCall, &f.own} {
			if name := atomic.LoadUint64(&c.inside); name != 0 {
				calls[c] = name
			}
		}
	}
	return calls
}

// forgetFrames drops those that the garbage collector took. It needs b.mu.
func (b *binding) forgetFrames() {
	b.made = slices.DeleteFunc(b.made, func(w weak.Pointer[frame]) bool { return w.Value() == nil })
}
