package cudart

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// LibraryEnv is the environment variable that names the libcudart to load,
// when Options.Library does not.
const LibraryEnv = "PINNED_CUDART"

// DebugEnv is the environment variable that switches on Options.Debug.
const DebugEnv = "PINNED_DEBUG"

// Options choose the library. The zero value finds one.
type Options struct {
	// Library is the path of the libcudart to load, or a bare name which the
	// system's loader looks for. Empty means: what PINNED_CUDART names, else
	// the newest of those found that the driver supports.
	Library string
	// Source, if not nil, is used instead of a library of the system.
	Source Source
	// Debug checks each asynchronous copy for host memory that is not
	// pinned, at the cost of two calls a copy. PINNED_DEBUG=1 does the same.
	Debug bool
}

// An OpenError says why [Open] found nothing to work with. It unwraps to
// [ErrNoLibrary] or [ErrNoDriver], or to the error of the library which all
// depends on, which errors.Is tells.
type OpenError struct {
	Err      error
	Attempts []Attempt   // libraries that were tried
	Looked   []string    // places where libraries were looked for
	Driver   DriverFacts // what there is of a driver
}

// Unwrap returns the reason.
func (e *OpenError) Unwrap() error { return e.Err }

// Error tells what was tried, where, and what would help.
func (e *OpenError) Error() string {
	var b strings.Builder
	b.WriteString(e.Err.Error())
	for _, a := range e.Attempts {
		fmt.Fprintf(&b, "\n\ttried %s (%s): %v", a.Path, a.Found, a.Err)
	}
	if errors.Is(e.Err, ErrNoLibrary) && len(e.Looked) > 0 {
		fmt.Fprintf(&b, "\n\tlooked in %s", strings.Join(e.Looked, ", "))
	}
	fmt.Fprintf(&b, "\n\tdriver: %v", e.Driver)
	fmt.Fprintf(&b, "\n\twhat helps: %s", e.Remedy())
	return b.String()
}

// Remedy says what to do about it.
func (e *OpenError) Remedy() string {
	switch {
	case errors.Is(e.Err, ErrNoDriver):
		return "install an NVIDIA driver or, in a container, start it with the GPU (--gpus all, or the nvidia runtime class)"
	case errors.Is(e.Err, ErrInsufficientDriver):
		return "update the driver, or name an older libcudart with " + LibraryEnv
	case errors.Is(e.Err, ErrNoLibrary):
		return "install CUDA's runtime library (package cuda-cudart, or pip install nvidia-cuda-runtime), or name one with " + LibraryEnv + "=/path/to/libcudart.so.12"
	}
	return "see the error, and run nvidia-smi"
}

// Open finds a CUDA runtime library, loads it, and asks it for the devices. It
// makes no context on any of them. Where it looks is told in the package's
// documentation under Loading. The error is an [*OpenError] unless the
// platform itself is unsupported.
func Open(o Options) (*Runtime, error) {
	if !platformSupported {
		return nil, fmt.Errorf("open: CUDA's runtime is reached on Linux (amd64, arm64) only: %w", ErrUnsupported)
	}
	debug := o.Debug || getenv(DebugEnv) == "1"
	if o.Source != nil {
		rt, err := load(o.Source)
		if err != nil {
			return nil, &OpenError{Err: err, Attempts: []Attempt{{Path: o.Source.String(), Found: "Options.Source", Err: err}}}
		}
		return rt.ready(Library{Found: "Options.Source", Simulated: true, Attempts: []Attempt{{Path: o.Source.String(), Found: "Options.Source", Runtime: rt.lib.Runtime}}}, debug)
	}

	system := newFinder()
	var candidates []candidate
	var looked []string
	switch named := getenv(LibraryEnv); {
	case o.Library != "":
		candidates = []candidate{{path: o.Library, found: "Options.Library"}}
	case named != "":
		candidates = []candidate{{path: named, found: LibraryEnv}}
	default:
		candidates, looked = system.candidates()
		// The newest first; equal ones stay in the order of the search.
		slices.SortStableFunc(candidates, func(a, b candidate) int { return int(b.version) - int(a.version) })
	}

	lib := Library{}
	for _, c := range candidates {
		attempt := Attempt{Path: c.path, Found: c.found, Runtime: c.version}
		rt, err := openCandidate(c)
		if err == nil {
			attempt.Runtime = rt.lib.Runtime
			lib.Found, lib.Attempts = c.found, append(lib.Attempts, attempt)
			return rt.ready(lib, debug)
		}
		attempt.Err = err
		lib.Attempts = append(lib.Attempts, attempt)
	}
	return nil, &OpenError{Err: verdict(lib.Attempts), Attempts: lib.Attempts, Looked: looked, Driver: system.driver()}
}

// verdict is the reason that matters most of all attempts: a library that
// loads and works but for the driver outweighs files that are none.
func verdict(attempts []Attempt) error {
	var insufficient, driver, other error
	for _, a := range attempts {
		var ce *Error
		switch {
		case errors.Is(a.Err, ErrNoDriver):
			driver = a.Err
		case errors.Is(a.Err, ErrInsufficientDriver):
			insufficient = a.Err
		case errors.As(a.Err, &ce):
			other = a.Err
		}
	}
	for _, err := range []error{driver, other, insufficient} {
		if err != nil {
			return err
		}
	}
	return ErrNoLibrary
}

func openCandidate(c candidate) (*Runtime, error) {
	source, err := loadLibrary(c.path)
	if err != nil {
		return nil, err
	}
	return load(source)
}

// load binds a source and asks whether it works with the driver.
func load(source Source) (*Runtime, error) {
	rt, count, err := bind(source)
	if err != nil {
		return nil, err
	}
	for i := range count {
		d, err := rt.newDevice(i)
		if err != nil {
			return nil, err
		}
		rt.devices = append(rt.devices, d)
	}
	rt.several = count > 1
	return rt, nil
}

// ready completes a runtime that works.
func (rt *Runtime) ready(lib Library, debug bool) (*Runtime, error) {
	lib.Path, lib.Runtime, lib.Driver, lib.Missing = rt.lib.Path, rt.lib.Runtime, rt.lib.Driver, rt.lib.Missing
	rt.lib, rt.debug = lib, debug
	return rt, nil
}

// bind resolves the symbols and returns the number of devices.
func bind(source Source) (*Runtime, int, error) {
	rt := &Runtime{binding: newBinding(), lib: Library{Path: source.String()}}
	rt.waits = newWaits(rt)
	resolve := func(s *symbol) error {
		address := source.Symbol(s.name)
		if address == 0 {
			if s.required {
				return fmt.Errorf("no function %s in it, so not a CUDA runtime library of version 11 to 13: %w", s.name, ErrNoLibrary)
			}
			rt.lib.Missing = append(rt.lib.Missing, s.name)
		}
		rt.entry[s.fn], rt.abi[s.fn] = address, s.abi
		return nil
	}
	// The version decides which rows serve, so what tells it comes first.
	const versionRows = 3
	for i := range symbols[:versionRows] {
		if err := resolve(&symbols[i]); err != nil {
			return nil, 0, err
		}
	}
	var err error
	if rt.lib.Driver, err = rt.version(fnDriverGetVersion); err != nil {
		return nil, 0, err
	}
	if rt.lib.Driver == 0 {
		return nil, 0, fmt.Errorf("%w that %s can use", ErrNoDriver, rt.lib.Path)
	}
	if rt.lib.Runtime, err = rt.version(fnRuntimeGetVersion); err != nil {
		return nil, 0, err
	}
	if major := rt.lib.Runtime.Major(); major < 11 || major > 13 {
		return nil, 0, fmt.Errorf("runtime %s: only 11.x to 13.x are known: %w", rt.lib.Runtime, ErrUnsupported)
	}
	for i := range symbols[versionRows:] {
		s := &symbols[versionRows+i]
		if !s.serves(rt.lib.Runtime) {
			continue
		}
		if err := resolve(s); err != nil {
			return nil, 0, err
		}
	}
	count, err := rt.count()
	return rt, count, err
}

func (rt *Runtime) version(fn function) (Version, error) {
	f := rt.begin()
	defer rt.end(f)
	f.out[0] = 0
	f.args[0] = f.outPtr(0)
	if code := rt.ask(fn, f); code != Success {
		return 0, rt.errorf(fn, code, "%s", rt.lib.Path)
	}
	return Version(f.outInt(0)), nil
}

// count asks for the devices. None at all is an answer.
func (rt *Runtime) count() (int, error) {
	f := rt.begin()
	defer rt.end(f)
	f.out[0] = 0
	f.args[0] = f.outPtr(0)
	switch code := rt.ask(fnGetDeviceCount, f); code {
	case Success:
		return f.outInt(0), nil
	case ErrNoDevice:
		return 0, nil
	default:
		return 0, rt.errorf(fnGetDeviceCount, code, "runtime %s, driver for up to %s", rt.lib.Runtime, rt.lib.Driver)
	}
}
