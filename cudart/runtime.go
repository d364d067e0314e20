package cudart

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/internal/lifetime"
)

// A Source provides the entry points of one CUDA library, libcudart or libcuda. [Open] makes
// one for each library that it tries; package cudasim provides simulated ones.
type Source interface {
	// Symbol returns the address of the C function called name, or 0 if the
	// library does not export it.
	Symbol(name string) uintptr
	// String returns the library's path, or the name of a simulated one.
	String() string
}

// A Library describes the CUDA library in use.
type Library struct {
	API       API       // RuntimeAPI for a libcudart, DriverAPI for libcuda
	Path      string    // its file, or the name of a simulated one
	Found     string    // how it was found: "$CUDA_PATH", "loaded already", …
	Simulated bool      // it is Options.Source
	Runtime   Version   // of the library (cudaRuntimeGetVersion); with the driver API, Driver
	Driver    Version   // the newest that the driver supports (cudaDriverGetVersion)
	Attempts  []Attempt // every library tried, in order; this one is the last
	Missing   []string  // optional functions that it does not export
	CopyBatch bool      // Stream.CopyBatch works: library and driver are of CUDA 12.8 or later
	Discard   bool      // Stream.Discard works: both are of CUDA 13.0 or later

	// Notes lists signals with handlers that end a Go process, installed by the library or by a
	// library that it loaded.
	Notes []string
}

// An Attempt is a library that [Open] tried.
type Attempt struct {
	Path    string  // its file, or the bare name given to the dynamic loader
	Found   string  // how it was found
	Runtime Version // its version, 0 if unknown
	Err     error   // why it was rejected, nil if it was accepted
}

// A Version is a CUDA version as its libraries return it: 1000 times the major
// version plus 10 times the minor version, so 13.0 is 13000 and 12.4 is 12040.
// Zero means unknown or, for a driver, absent.
type Version int

// Major returns 12 for 12.4.
func (v Version) Major() int { return int(v) / 1000 }

// Minor returns 4 for 12.4.
func (v Version) Minor() int { return int(v) % 1000 / 10 }

// String returns "12.4", or "unknown" for zero.
func (v Version) String() string {
	if v == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%d.%d", v.Major(), v.Minor())
}

// A Runtime is a loaded CUDA library with its devices. All its methods,
// and those of everything made from it, may be called from any goroutine.
type Runtime struct {
	*binding
	source         Source
	modules        moduleBinding
	lib            Library
	devices        []*Device     // nil for one that CUDA cannot describe
	failed         map[int]error // the error of each device that CUDA cannot describe
	several        bool          // more than one device: a call must select its own
	debug          bool
	life           lifetime.Lifetime // no calls are counted
	closing        chan struct{}     // closed by Close
	failedCleanups []func() error    // see retryAtClose; guarded by binding.mu
}

func (rt *Runtime) made() bool { return rt != nil && rt.binding != nil }

// Library describes the library in use.
func (rt *Runtime) Library() Library {
	if !rt.made() {
		return Library{}
	}
	return rt.lib
}

// inDebug reports whether Options.Debug or PINNED_DEBUG=1 was set at Open.
func (rt *Runtime) inDebug() bool { return rt.made() && rt.debug }

// Device returns device i, counted from 0 in CUDA's order. The error wraps
// [ErrInvalidDevice] if there is no device i, and [ErrClosed]. A device that CUDA could
// not describe at Open has the error of that call.
func (rt *Runtime) Device(i int) (*Device, error) {
	if !rt.made() {
		return nil, notMade(fnSetDevice)
	}
	if rt.isClosed() {
		return nil, rt.errorf(fnSetDevice, codeRuntimeClosed, "device %d", i)
	}
	if i < 0 || i >= len(rt.devices) {
		have := fmt.Sprintf("this process sees devices 0 to %d", len(rt.devices)-1)
		if len(rt.devices) == 0 {
			have = "this process sees none; is CUDA_VISIBLE_DEVICES empty?"
		}
		return nil, &Error{Op: fnSetDevice.name(), Code: ErrInvalidDevice, Detail: fmt.Sprintf("device %d: %s", i, have)}
	}
	if err := rt.failed[i]; err != nil {
		return nil, err
	}
	return rt.devices[i], nil
}

// DeviceCount returns the number of devices that CUDA showed this process at Open
// (cudaGetDeviceCount). CUDA_VISIBLE_DEVICES may limit and reorder them.
func (rt *Runtime) DeviceCount() int {
	if !rt.made() {
		return 0
	}
	return len(rt.devices)
}

// Devices returns the devices in CUDA's order, without any that CUDA could not describe at
// Open: [Runtime.Device] returns the reason.
func (rt *Runtime) Devices() []*Device {
	if !rt.made() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(rt.devices), func(d *Device) bool { return d == nil })
}

// Close ends waits in progress with [ErrClosed] and destroys the events that the Runtime itself
// made. After that, methods that queue work or create objects return ErrClosed. Methods that
// release objects, and queries, still work, so deferred calls may run in any order. The caller must
// release streams, events and memory: after Close the garbage collector does not. The library stays
// loaded, because CUDA cannot be unloaded safely.
//
// Close does not wait for calls that are inside the library: see
// [Runtime.Stuck]. Its error joins those of cudaEventDestroy; another Close tries again.
// After nil a second Close does nothing.
func (rt *Runtime) Close() error {
	if !rt.made() {
		return nil
	}
	return rt.life.Close(context.Background(), func(context.Context) error {
		rt.endWaits()
		var errs []error
		for _, d := range rt.Devices() {
			errs = append(errs, d.closeEvents())
		}
		rt.binding.mu.Lock()
		failed := rt.failedCleanups
		rt.failedCleanups = nil
		rt.binding.mu.Unlock()
		for _, retry := range slices.Backward(failed) { // what raw.AtClose added when it was opened comes last
			if err := retry(); err != nil {
				rt.keepCleanup(retry)
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

// endWaits ends all waits. It is called by one goroutine at a time.
func (rt *Runtime) endWaits() {
	select {
	case <-rt.closing:
		return
	default:
	}
	close(rt.closing)
	for _, d := range rt.Devices() {
		d.waits.close()
	}
}

// isClosed reports whether Close was called.
func (rt *Runtime) isClosed() bool { return !rt.made() || rt.life.Sealed() }

// retryAtClose keeps what failed without a caller to report to: Close tries again. If Close
// was called already it may be over, so the next try is here.
func (rt *Runtime) retryAtClose(retry func() error) {
	if !rt.isClosed() || retry() != nil {
		rt.keepCleanup(retry)
	}
}

func (rt *Runtime) keepCleanup(retry func() error) {
	rt.binding.mu.Lock()
	defer rt.binding.mu.Unlock()
	rt.failedCleanups = append(rt.failedCleanups, retry)
}
