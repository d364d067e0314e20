package cudart

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/internal/findlib"
)

// LibraryEnv is the environment variable that names the libcudart to load,
// when Options.Library does not.
const LibraryEnv = "PINNED_CUDART"

// DebugEnv is the environment variable that switches on Options.Debug.
const DebugEnv = "PINNED_DEBUG"

// Options choose the library. The zero value finds one.
type Options struct {
	// Library is the path of the libcudart to load, or a bare name which the
	// dynamic loader looks for. Empty means: what PINNED_CUDART names, else
	// the newest of those found that the driver supports.
	Library string
	// Source, if not nil, is used instead of a library of the system.
	Source Source
	// Debug checks each asynchronous copy for host memory that is not
	// pinned, at the cost of two calls a copy. PINNED_DEBUG=1 does the same.
	Debug bool
}

// Open finds a CUDA runtime library, loads it, and asks it for the devices. It
// makes no context on any of them. The package's documentation lists, under
// Loading, where it searches. A host without a device is not an error: the
// Runtime has none then. The error is an [*OpenError], or wraps
// [ErrUnsupported] where the platform itself is unsupported.
func Open(o Options) (*Runtime, error) {
	if !platformSupported {
		return nil, fmt.Errorf("open: CUDA's runtime is reached on Linux (amd64, arm64) only: %w", ErrUnsupported)
	}
	o.Debug = o.Debug || findlib.Getenv(DebugEnv) == "1"
	if o.Source != nil {
		attempts := []Attempt{{Path: o.Source.String(), Found: "Options.Source"}}
		rt := attempts[0].try(o.Source, nil)
		if rt == nil {
			return nil, &OpenError{Err: verdict(attempts), Attempts: attempts}
		}
		return rt.ready(o, attempts), nil
	}

	host := findlib.This()
	candidates, looked := o.candidates(host)
	var attempts []Attempt
	for _, c := range candidates {
		attempt := Attempt{Path: c.Path, Found: c.Found, Runtime: versionInName(c.Version)}
		rt := attempt.try(loadChecked(host, c.Path))
		attempts = append(attempts, attempt)
		if rt != nil {
			return rt.ready(o, attempts), nil
		}
	}
	return nil, &OpenError{Err: verdict(attempts), Attempts: attempts, Looked: looked, Driver: DriverFacts(host.Driver())}
}

// libcudart describes the library to the search.
var libcudart = findlib.Library{
	Name:      "libcudart",
	Sonames:   []string{"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"},
	Wheel:     "nvidia_cuda_runtime",
	WheelDirs: []string{"nvidia/cu*", "torch"}, // NVIDIA's own wheels, and PyTorch's before it used them
	Toolkit:   true,
}

// candidates returns the libraries to try, in order, and the places that were
// searched for them. A library that is named is the only one.
func (o Options) candidates(host findlib.Host) (list []findlib.Candidate, looked []string) {
	named, by := o.Library, "Options.Library"
	if named == "" {
		named, by = findlib.Getenv(LibraryEnv), LibraryEnv
	}
	if named != "" {
		return []findlib.Candidate{{Path: named, Found: by, Version: host.Version(libcudart, named)}}, nil
	}
	list, looked = host.Find(libcudart)
	// The newest first; equal ones stay in the order of the search.
	slices.SortStableFunc(list, func(a, b findlib.Candidate) int {
		return cmp.Compare(versionInName(b.Version), versionInName(a.Version))
	})
	return list, looked
}

// loadChecked loads a library after a check of its file: a file that is cut off
// would end the process in dlopen.
func loadChecked(host findlib.Host, path string) (Source, error) {
	if err := host.Check(path); err != nil {
		return nil, err
	}
	return loadLibrary(path)
}

// try binds a loaded library and asks it for the devices. It completes the
// attempt, and returns nil if that failed.
func (a *Attempt) try(source Source, err error) *Runtime {
	if a.Err = err; err != nil {
		return nil
	}
	rt := &Runtime{binding: newBinding(), lib: Library{Path: source.String()}}
	rt.waits = newWaits(rt)
	if a.Err = rt.bind(source); a.Err == nil {
		a.Err = rt.addDevices()
	}
	if rt.lib.Runtime != 0 { // otherwise the version in the file's name has to do
		a.Runtime = rt.lib.Runtime
	}
	if a.Err != nil {
		return nil
	}
	return rt
}

// ready completes a runtime that works. The last attempt led to it.
func (rt *Runtime) ready(o Options, attempts []Attempt) *Runtime {
	rt.lib.Attempts, rt.lib.Found = attempts, attempts[len(attempts)-1].Found
	rt.lib.Simulated, rt.debug = o.Source != nil, o.Debug
	return rt
}

// verdict is the reason that matters most of all attempts: a library that
// loads and works but for the driver outweighs files that are not one. Of
// several libraries, the newest counts.
func verdict(attempts []Attempt) error {
	reasons := []func(err error) bool{
		func(err error) bool { return errors.Is(err, ErrNoDriver) },
		func(err error) bool {
			var called *Error
			return errors.As(err, &called) && called.Code != ErrInsufficientDriver
		},
		func(err error) bool { return errors.Is(err, ErrInsufficientDriver) },
	}
	for _, reason := range reasons {
		if i := slices.IndexFunc(attempts, func(a Attempt) bool { return reason(a.Err) }); i >= 0 {
			return attempts[i].Err
		}
	}
	return ErrNoLibrary
}

// bind asks for the versions and resolves the functions.
func (rt *Runtime) bind(source Source) (err error) {
	resolve := func(rows []symbol) error {
		for i := range rows {
			s := &rows[i]
			if !s.serves(rt.lib.Runtime) {
				continue
			}
			address := source.Symbol(s.name)
			if address == 0 {
				if s.required {
					return fmt.Errorf("no function %s in it: not a CUDA runtime library of version 11 to 13", s.name)
				}
				rt.lib.Missing = append(rt.lib.Missing, s.name)
			}
			rt.entry[s.fn], rt.abi[s.fn] = address, s.abi
		}
		return nil
	}
	if err := resolve(symbols[:versionRows]); err != nil {
		return err
	}
	if rt.lib.Driver, err = rt.version(fnDriverGetVersion); err != nil {
		return err
	}
	if rt.lib.Driver == 0 {
		return fmt.Errorf("%w that %s can use", ErrNoDriver, rt.lib.Path)
	}
	if rt.lib.Runtime, err = rt.version(fnRuntimeGetVersion); err != nil {
		return err
	}
	if major := rt.lib.Runtime.Major(); major < 11 || major > 13 {
		return fmt.Errorf("runtime %s: only 11.x to 13.x are known: %w", rt.lib.Runtime, ErrUnsupported)
	}
	return resolve(symbols[versionRows:])
}

// addDevices asks for the devices and adds each to the runtime.
func (rt *Runtime) addDevices() error {
	count, err := rt.count()
	if err != nil {
		return err
	}
	for i := range count {
		d, err := rt.newDevice(i)
		if err != nil {
			return err
		}
		rt.devices = append(rt.devices, d)
	}
	rt.several = count > 1
	return nil
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

// count returns the number of devices. That there is none is not an error.
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
