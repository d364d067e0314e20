package cudart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/dynlib"
	"github.com/gopinned/pinned/internal/findlib"
)

// libraryEnv is the environment variable that names the library to load, if
// Options.Library does not.
const libraryEnv = "PINNED_CUDART"

// apiEnv is the environment variable that chooses the API of the library, if none of
// Options.API, Options.Library and Options.Source is set: "runtime" or "driver".
const apiEnv = "PINNED_CUDA_API"

// debugEnv is the environment variable that sets Options.Debug if it is 1.
const debugEnv = "PINNED_DEBUG"

// Options choose the library. The zero value finds one.
type Options struct {
	// Library is the path of the libcudart or libcuda to load, or a bare name for the
	// dynamic loader to find. Empty means the one that PINNED_CUDART names, or
	// else the newest libcudart that is found and that the driver supports, or
	// else libcuda.
	Library string
	// API is the API that the library must have. AnyAPI means the one that
	// PINNED_CUDA_API names, if that is set, and neither Library nor Source is. Else
	// it means a libcudart, and libcuda where none works.
	API API
	// Source, if not nil, is used instead of a library of the host.
	Source Source
	// Debug checks that the host memory of each asynchronous copy is pinned, at
	// the cost of two calls a copy. PINNED_DEBUG=1 does the same.
	Debug bool
}

// An API is one of CUDA's two interfaces to a program.
type API int

// The APIs. The functions that a library exports determine its API.
const (
	AnyAPI     API = iota // either
	RuntimeAPI            // libcudart's, which calls libcuda
	DriverAPI             // libcuda's: the driver alone
)

// String returns "runtime API" or "driver API", and "any API" for other values.
func (a API) String() string {
	switch a {
	case RuntimeAPI:
		return "runtime API"
	case DriverAPI:
		return "driver API"
	}
	return "any API"
}

// Open finds a CUDA library, loads it and reads its version and its
// devices. It makes no context on any device. The package's documentation lists
// under Loading where it searches. A host without devices is not an error: the
// Runtime then has none.
//
// The error is an [*OpenError], or wraps [errors.ErrUnsupported] on platforms other than
// Linux on amd64 and arm64, and [ErrInvalidValue] if Options.API or PINNED_CUDA_API is none
// of the APIs. Open returns when ctx ends even if a call into the library does not, as with a
// GPU or a driver that hangs: the error then wraps ctx's error and names the library and the
// call. The call keeps a goroutine and one thread until it returns; no other call follows it.
func Open(ctx context.Context, o Options) (*Runtime, error) {
	switch {
	case !platformSupported:
		return nil, fmt.Errorf("cudart: open: CUDA's runtime library is for Linux on amd64 and arm64: %w", errors.ErrUnsupported)
	case ctx == nil:
		return nil, fmt.Errorf("cudart: open: %w", errNilContext)
	}
	o.Debug = o.Debug || findlib.Getenv(debugEnv) == "1"
	if err := o.chooseAPI(findlib.Getenv(apiEnv)); err != nil {
		return nil, err
	}
	op := &librarySearch{o: o, host: findlib.This()}
	rt, err := bounded.Do(ctx, bounded.Call[*Runtime]{Run: func() (*Runtime, error) { return op.run(ctx) }, Grace: bounded.NoGrace})
	if errors.Is(err, bounded.ErrStuck) { // a Runtime that comes too late is garbage
		return nil, op.canceled(ctx)
	}
	return rt, err
}

// chooseAPI takes the API from the environment where the options leave it open.
func (o *Options) chooseAPI(env string) error {
	switch {
	case o.API < AnyAPI || o.API > DriverAPI:
		return fmt.Errorf("cudart: open: Options.API %d: must be AnyAPI, RuntimeAPI or DriverAPI: %w", int(o.API), ErrInvalidValue)
	case o.API != AnyAPI || o.Source != nil || o.Library != "" || env == "":
		return nil
	case env == "runtime":
		o.API = RuntimeAPI
	case env == "driver":
		o.API = DriverAPI
	default:
		return fmt.Errorf("cudart: open: %s=%s: must be runtime or driver: %w", apiEnv, env, ErrInvalidValue)
	}
	return nil
}

// libcudart describes the library to the search.
var libcudart = findlib.Library{
	Name:      "libcudart",
	Sonames:   []string{"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"},
	Wheel:     "nvidia_cuda_runtime",
	WheelDirs: []string{"nvidia/cu*", "torch"}, // NVIDIA's own wheels, and PyTorch's before it used them
	Toolkit:   true,
}

// A librarySearch is one call of Open.
type librarySearch struct {
	o    Options
	host findlib.Host

	// How far it is, for canceled.
	mu       sync.Mutex
	driver   DriverFacts
	searched []string
	attempts []Attempt
	calls    *binding // of the last attempt
}

// run tries one library after the other until one works or ctx ends.
func (op *librarySearch) run(ctx context.Context) (*Runtime, error) {
	for _, a := range op.search() {
		if ctx.Err() != nil {
			break
		}
		if rt := op.try(ctx, a); rt != nil {
			return rt, nil
		}
	}
	if ctx.Err() != nil {
		return nil, op.canceled(ctx)
	}
	return nil, &OpenError{Err: verdict(op.attempts), Attempts: op.attempts, Searched: op.searched, Driver: op.driver, source: op.o.Source != nil}
}

// search returns the libraries to try, in order.
func (op *librarySearch) search() []Attempt {
	if op.o.Source != nil {
		return []Attempt{{Path: op.o.Source.String(), Found: "Options.Source"}}
	}
	driver := DriverFacts(op.host.Driver())
	candidates, searched := op.o.candidates(op.host)
	op.mu.Lock()
	op.driver, op.searched = driver, searched
	op.mu.Unlock()
	attempts := make([]Attempt, len(candidates))
	for i, c := range candidates {
		attempts[i] = Attempt{Path: c.Path, Found: c.Found, Runtime: versionInName(c.Version)}
	}
	return attempts
}

// candidates returns the libraries of the host to try, in order, and the places
// that were searched for them. A library that is named is the only one.
func (o Options) candidates(host findlib.Host) (list []findlib.Candidate, searched []string) {
	named, by := o.Library, "Options.Library"
	if named == "" {
		named, by = findlib.Getenv(libraryEnv), libraryEnv
	}
	if named != "" {
		return []findlib.Candidate{{Path: named, Found: by, Version: host.Version(libcudart, named)}}, nil
	}
	if o.API == DriverAPI {
		return []findlib.Candidate{driverCandidate(host)}, nil
	}
	list, searched = host.Find(libcudart)
	// The newest first; equal ones stay in the order of the search.
	slices.SortStableFunc(list, func(a, b findlib.Candidate) int {
		return cmp.Compare(versionInName(b.Version), versionInName(a.Version))
	})
	if driver := driverCandidate(host); o.API == AnyAPI && path.IsAbs(driver.Path) {
		list, searched = append(list, driver), append(searched, foundDriver+": "+driver.Path)
	}
	return list, searched
}

// driverCandidate is the driver's library, where it was found or else by the name under which
// libcudart loads it.
func driverCandidate(host findlib.Host) findlib.Candidate {
	return findlib.Candidate{Path: cmp.Or(host.Driver().LibPath, "libcuda.so.1"), Found: foundDriver}
}

// foundDriver is Attempt.Found of the driver's library.
const foundDriver = "the driver's library"

// versionInName returns the version of a libcudart as far as its file name contains
// it: 12.4 for libcudart.so.12.4.127, 12.0 for libcudart.so.12, 0 for
// libcudart.so. All of 11.x have the soname libcudart.so.11.0.
func versionInName(v findlib.Version) Version {
	if v.Minor > 99 {
		v.Minor = 0 // a Version cannot hold it
	}
	return Version(1000*v.Major + 10*v.Minor)
}

// try loads and binds a library and reads its devices. It returns nil if any of that
// failed.
func (op *librarySearch) try(ctx context.Context, a Attempt) *Runtime {
	rt := &Runtime{binding: newBinding(), lib: Library{Path: a.Path, Found: a.Found, Simulated: op.o.Source != nil}, debug: op.o.Debug, closing: make(chan struct{})}
	op.mu.Lock()
	op.attempts, op.calls = append(op.attempts, a), rt.binding
	op.mu.Unlock()

	source, err := op.load(a)
	if err == nil {
		rt.source = source
		err = rt.bind(ctx, op.o.API)
	}
	if err == nil {
		err = rt.addDevices(ctx)
	}

	op.mu.Lock()
	defer op.mu.Unlock()
	last := &op.attempts[len(op.attempts)-1]
	last.Err = err
	if rt.lib.API == DriverAPI && op.o.Source == nil && op.driver.LibPath == "" {
		op.driver.LibPath = a.Path // it was named
	}
	if rt.lib.Runtime != 0 { // else the version in the file's name remains
		last.Runtime = rt.lib.Runtime
	}
	if err != nil {
		return nil
	}
	rt.lib.Attempts = op.attempts
	rt.lib.CopyBatch = rt.entry[fnMemcpyBatch] != 0 && rt.lib.Driver >= batchSince
	rt.lib.Discard = rt.entry[fnMemDiscardBatch] != 0 && rt.lib.Driver >= discardSince
	if !rt.lib.Simulated {
		rt.lib.Notes = handlersWithoutStack()
	}
	return rt
}

// load loads a library after it has checked the file: dlopen ends the process on a
// file that is cut off.
func (op *librarySearch) load(a Attempt) (Source, error) {
	if op.o.Source != nil {
		return op.o.Source, nil
	}
	err := op.host.Check(a.Path)
	damaged := err != nil && !errors.Is(err, fs.ErrNotExist)
	if err == nil {
		l, failed := dynlib.Open(a.Path)
		if failed == nil {
			return l, nil
		}
		err = failed
	}
	switch {
	case a.Found == foundDriver && damaged:
		err = fmt.Errorf("%w: %w", errDamagedDriver, err)
	case a.Found == foundDriver && op.o.API == DriverAPI:
		err = fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	return nil, err
}

// canceled makes the error of an opening whose context ended: it names what was
// being done. The opening may still be at it, on another goroutine.
func (op *librarySearch) canceled(ctx context.Context) error {
	op.mu.Lock()
	defer op.mu.Unlock()
	err := fmt.Errorf("canceled: %w", bounded.Ended(ctx))
	attempts := slices.Clone(op.attempts)
	stuck := ""
	if last := len(attempts) - 1; last >= 0 && attempts[last].Err == nil {
		a := &attempts[last]
		err = fmt.Errorf("%s: %w", a.Path, err)
		for c, name := range op.calls.inside() {
			stuck = stuckCall(c, name).String()
			err = fmt.Errorf("%s of %s %w: %w", stuck, a.Path, errNotReturned, bounded.Ended(ctx))
		}
		a.Err = err
	}
	return &OpenError{Err: err, Attempts: attempts, Searched: op.searched, Driver: op.driver, Stuck: stuck, source: op.o.Source != nil}
}

// errDamagedDriver is the reason of a libcuda that cannot be loaded, and errIncompleteDriver that of one that
// lacks functions of its version.
var (
	errDamagedDriver    = errors.New("the driver's library is damaged")
	errIncompleteDriver = errors.New("the driver's library is not whole")
)

// errNotReturned is the cause of an opening whose context ended during a call.
var errNotReturned = errors.New("has not returned")

// verdict returns the reason that matters most among all attempts: a library that
// works but for the driver outweighs files that are no library, and what the driver's library
// says itself outweighs a libcudart that could not use it. Among several libraries the newest counts.
func verdict(attempts []Attempt) error {
	called := func(err error) *Error {
		var call *Error
		errors.As(err, &call)
		return call
	}
	damaged := func(err error) bool { return errors.Is(err, errDamagedDriver) || errors.Is(err, errIncompleteDriver) }
	unusable := slices.ContainsFunc(attempts, func(a Attempt) bool { return errors.Is(a.Err, ErrNoDriver) })
	reasons := []func(err error) bool{
		func(err error) bool {
			call := called(err)
			return unusable && (damaged(err) || call != nil && call.API == DriverAPI)
		},
		func(err error) bool { return errors.Is(err, ErrNoDriver) },
		func(err error) bool { return called(err) != nil && called(err).Code != ErrInsufficientDriver },
		func(err error) bool { return errors.Is(err, ErrInsufficientDriver) },
		damaged,
	}
	for _, reason := range reasons {
		if i := slices.IndexFunc(attempts, func(a Attempt) bool { return reason(a.Err) }); i >= 0 {
			return attempts[i].Err
		}
	}
	return ErrNoLibrary
}

// bind reads the versions of the library and of the driver, and looks up the functions of the
// library's version.
func (rt *Runtime) bind(ctx context.Context, api API) error {
	switch {
	case rt.source.Symbol(names[fnRuntimeGetVersion]) != 0:
		rt.lib.API = RuntimeAPI
	case rt.source.Symbol(names[fnInit]) != 0:
		rt.lib.API = DriverAPI
	default:
		return fmt.Errorf("no function %s or %s in it: neither a CUDA runtime library nor a driver's", names[fnRuntimeGetVersion], names[fnInit])
	}
	switch {
	case api != AnyAPI && api != rt.lib.API:
		return fmt.Errorf("it exports the %v, and Options.API or %s asks for the %v: %w", rt.lib.API, apiEnv, api, errors.ErrUnsupported)
	case rt.lib.API == DriverAPI:
		return rt.bindDriver(ctx)
	}
	return rt.bindRuntime(ctx)
}

// resolve looks up the functions of rows that the library's version has. The error for one that
// is required and missing is that of missing.
func (rt *Runtime) resolve(rows []symbol, lookup func(*symbol) uintptr, missing func(name string) error) error {
	for i := range rows {
		s := &rows[i]
		if !s.serves(rt.lib.Runtime) {
			continue
		}
		address := lookup(s)
		if address == 0 {
			if s.required {
				return missing(s.name)
			}
			rt.lib.Missing = append(rt.lib.Missing, s.name)
		}
		rt.entry[s.fn], rt.abi[s.fn], rt.adapt[s.fn] = address, s.abi, s.adapt
	}
	return nil
}

// bindRuntime binds libcudart (cudaDriverGetVersion, cudaRuntimeGetVersion).
func (rt *Runtime) bindRuntime(ctx context.Context) (err error) {
	resolve := func(rows []symbol) error {
		return rt.resolve(rows, func(s *symbol) uintptr { return rt.source.Symbol(s.name) }, func(name string) error {
			return fmt.Errorf("no function %s in it: not a CUDA runtime library of version 11 to 13", name)
		})
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
	if err := ctx.Err(); err != nil {
		return err
	}
	if rt.lib.Runtime, err = rt.version(fnRuntimeGetVersion); err != nil {
		return err
	}
	if major := rt.lib.Runtime.Major(); major < 11 || major > 13 {
		return fmt.Errorf("runtime %s: only 11.x to 13.x are known: %w", rt.lib.Runtime, errors.ErrUnsupported)
	}
	return resolve(symbols[versionRows:])
}

// addDevices reads the number of devices and adds each to the runtime. A device that
// CUDA cannot describe does not hide the others, unless all are like that.
func (rt *Runtime) addDevices(ctx context.Context) error {
	count, err := rt.count()
	if err != nil {
		return err
	}
	rt.failed = make(map[int]error)
	if rt.lib.API == DriverAPI {
		rt.contexts = make([]atomic.Uintptr, count)
	}
	for i := range count {
		if err := ctx.Err(); err != nil {
			return err
		}
		d, err := rt.newDevice(i)
		if err != nil {
			rt.failed[i] = err
		}
		rt.devices = append(rt.devices, d)
	}
	if count > 0 && len(rt.failed) == count {
		return rt.failed[0]
	}
	rt.several = count > 1
	return nil
}

func (rt *Runtime) version(fn function) (Version, error) {
	f := rt.begin()
	f.out[0], f.args[0] = 0, f.outPtr(0)
	out, err := rt.finish(fn, f, rt.callAnyDevice(fn, f), func() string { return rt.lib.Path })
	return Version(out.int(0)), err
}

// count returns the number of devices (cudaGetDeviceCount). None is not an error.
func (rt *Runtime) count() (int, error) {
	f := rt.begin()
	f.out[0], f.args[0] = 0, f.outPtr(0)
	code := rt.callAnyDevice(fnGetDeviceCount, f)
	out, err := rt.finish(fnGetDeviceCount, f, code, func() string {
		return fmt.Sprintf("runtime %s, driver for up to %s", rt.lib.Runtime, rt.lib.Driver)
	})
	if code == ErrNoDevice {
		return 0, nil
	}
	return out.int(0), err
}
