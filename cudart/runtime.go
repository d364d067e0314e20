package cudart

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// A Source provides the entry points of one CUDA runtime library. Open makes
// one for each libcudart it tries; cudasim provides a simulated one.
type Source interface {
	// Symbol returns the address of the C function called name, or 0 when
	// the library does not export it.
	Symbol(name string) uintptr
	// String names the library: its path, or what it simulates.
	String() string
}

// A Library tells which CUDA runtime library is in use and how it was found.
type Library struct {
	Path      string    // where it lies, or what it simulates
	Found     string    // how it was found
	Simulated bool      // it came from Options.Source
	Runtime   Version   // version of the library
	Driver    Version   // newest CUDA version that the installed driver supports
	Attempts  []Attempt // every candidate, in the order tried, this one last
	Missing   []string  // optional functions that it does not export
}

// An Attempt is a candidate that [Open] looked at.
type Attempt struct {
	Path    string  // file, or the bare name given to the loader
	Found   string  // how it was found
	Runtime Version // version, 0 when that could not be learnt
	Err     error   // why it was not taken, nil for the one that was
}

// A Runtime is a loaded CUDA runtime library. All its methods, and those of
// everything made from it, may be called from any goroutine.
type Runtime struct {
	*binding
	lib     Library
	devices []*Device
	several bool // more than one device: the current one has to be selected
	debug   bool
	closed  atomic.Bool
	waits   *waits

	mu   sync.Mutex
	left []func() error // see undone
}

// Library tells which library was loaded and how it was found.
func (rt *Runtime) Library() Library { return rt.lib }

// Debug tells whether Options.Debug, or PINNED_DEBUG=1, was set at Open.
func (rt *Runtime) Debug() bool { return rt.debug }

// DeviceCount returns the number of devices that CUDA shows this process,
// which CUDA_VISIBLE_DEVICES may limit (cudaGetDeviceCount, asked at Open).
func (rt *Runtime) DeviceCount() int { return len(rt.devices) }

// Device returns device i, counted from 0 in CUDA's order.
func (rt *Runtime) Device(i int) (*Device, error) {
	if i < 0 || i >= len(rt.devices) {
		have := fmt.Sprintf("this process sees devices 0 to %d", len(rt.devices)-1)
		if len(rt.devices) == 0 {
			have = "this process sees none; is CUDA_VISIBLE_DEVICES empty?"
		}
		return nil, &Error{Op: fnSetDevice.name(), Code: ErrInvalidDevice, Detail: fmt.Sprintf("device %d: %s", i, have)}
	}
	return rt.devices[i], nil
}

// Devices returns all devices in CUDA's order.
func (rt *Runtime) Devices() []*Device { return append([]*Device(nil), rt.devices...) }

// Close ends waits in progress with [ErrClosed] and destroys what the Runtime
// itself made. From then on methods that queue work or create something return
// ErrClosed; those that release something, and queries, work on, so that
// deferred calls may come in any order. Streams, events and memory are the
// caller's to release: none that is lost is destroyed afterwards. The library
// stays loaded: it cannot be unloaded safely. A second Close does nothing.
//
// Close does not wait for calls that are inside the library: see
// [Runtime.Stuck].
func (rt *Runtime) Close() error {
	if rt.closed.Swap(true) {
		return nil
	}
	rt.waits.close()
	var errs []error
	for _, d := range rt.devices {
		errs = append(errs, d.closeEvents())
	}
	for _, retry := range rt.takeLeft() {
		errs = append(errs, retry())
	}
	return errors.Join(errs...)
}

// Closed reports whether Close was called.
func (rt *Runtime) Closed() bool { return rt.closed.Load() }

// undone keeps what failed without a caller to report to: Close tries again.
func (rt *Runtime) undone(retry func() error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.left = append(rt.left, retry)
}

func (rt *Runtime) takeLeft() []func() error {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	left := rt.left
	rt.left = nil
	return left
}
