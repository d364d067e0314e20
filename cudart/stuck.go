package cudart

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// noDevice is the ordinal in calls that are for no device.
const noDevice = -1

// The parts of cCall.name, from the low bits up. No call's name is 0.
const (
	nameFunction = 8  // bits
	nameDevice   = 24 // bits, of the ordinal plus one
)

func nameCall(number uint32, device int32, fn function) uint64 {
	return uint64(number)<<(nameFunction+nameDevice) | uint64(device+1)<<nameFunction | uint64(fn) + 1
}

// A StuckCall is a call into the CUDA library that has not returned for a while. Values are equal
// if they are of the same call, and not if they are of two calls of the same function.
type StuckCall struct {
	Function string // such as "cudaStreamQuery"
	Device   int    // ordinal, or -1 for a call that is for no device

	call *cCall // where it is made
	name uint64 // has its number there
}

func stuckCall(call *cCall, name uint64) StuckCall {
	fn := function(name&(1<<nameFunction-1)) - 1
	device := int(name>>nameFunction&(1<<nameDevice-1)) - 1
	return StuckCall{Function: fn.name(), Device: device, call: call, name: name}
}

// String returns the function and the device: "cudaStreamQuery on device 0".
func (c StuckCall) String() string {
	if c.Device == noDevice {
		return c.Function
	}
	return fmt.Sprintf("%s on device %d", c.Function, c.Device)
}

// Stuck waits for d, and returns the calls that were inside the library all that time. If ctx ends
// first, it returns the calls that were inside since Stuck was called. If no call is inside the
// library, it returns at once. Calls that take long without being stuck are listed too: choose d
// accordingly. A nil ctx does not end.
func (rt *Runtime) Stuck(ctx context.Context, d time.Duration) []StuckCall {
	if !rt.made() {
		return nil
	}
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
		if before[c] == name {
			stuck = append(stuck, stuckCall(c, name))
		}
	}
	slices.SortFunc(stuck, func(a, b StuckCall) int { return strings.Compare(a.String(), b.String()) })
	return stuck
}

// inside returns the calls that are inside the library, with their names.
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
