package cudart

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrClosed is wrapped by the errors of values that are closed or released, in all
	// packages of this module. errors.Is reports that it is [os.ErrClosed].
	ErrClosed = sentinel.New("already closed", os.ErrClosed)

	// ErrInUse is wrapped by the error of a Close while callers still hold something of the
	// value, such as leases, batches or memory, and by that of a second loop over the
	// batches of one loader.
	ErrInUse = errors.New("in use")

	// ErrNoLibrary is returned by [Open] if no usable libcudart was found.
	ErrNoLibrary = errors.New("no usable libcudart found")

	// ErrNoDriver is returned by [Open] if a libcudart was found, but no NVIDIA
	// driver that it can use, and with [DriverAPI] if there is no libcuda.
	ErrNoDriver = errors.New("no NVIDIA driver")

	errNotMade    = errors.New("nil, or a zero value, which no method of this package has returned")
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil, or a zero value")
	errNilEvent   = errors.New("the event is nil, or a zero value")
)

// An Error is a CUDA call that failed. Most callers should inspect it with
// [errors.Is] and a [Code]:
//
//	if errors.Is(err, cudart.ErrMemoryAllocation) { … }
type Error struct {
	Op     string // the C function, such as "cudaHostRegister"
	Code   Code   // what it returned
	Detail string // its arguments
	// API is DriverAPI if libcuda returned the code. Op is then the function of the runtime
	// that the call stands for, and the message has the driver's name of the code, too.
	API API
}

// Error returns the function, its arguments and the code, and adds if the process
// has to be restarted.
func (e *Error) Error() string {
	s := e.Op
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	s += ": " + e.Code.Error()
	if name := codeTable()[e.Code].driver; e.API == DriverAPI && name != "" {
		s += " (the driver's " + name + ")"
	}
	if e.Code.Fatal() {
		s += " (the error may come from earlier asynchronous work, and the CUDA context cannot be used any more: restart the process)"
	}
	return s
}

// Unwrap returns the Code.
func (e *Error) Unwrap() error { return e.Code }

// A Code is a cudaError_t. It is an error with its name and text built in, so that
// errors.Is(err, ErrMemoryAllocation) and messages need no library. A code of a library
// newer than CUDA 13.0 keeps its number, and its name and text say that it is
// unrecognized.
type Code int32

const (
	unrecognizedName = "unrecognized cudaError_t"
	unrecognizedText = "unrecognized error code"
)

// Name returns the C name, as cudaGetErrorName does: "cudaErrorMemoryAllocation".
// For an unrecognized code it is a phrase with spaces, which no name has.
func (c Code) Name() string { return cmp.Or(codeTable()[c].name, unrecognizedName) }

// Text returns the short description, as cudaGetErrorString does: "out of memory".
func (c Code) Text() string { return cmp.Or(codeTable()[c].text, unrecognizedText) }

// Error returns name, number and text: "cudaErrorMemoryAllocation (2): out of memory".
func (c Code) Error() string {
	return c.Name() + " (" + strconv.Itoa(int(c)) + "): " + c.Text()
}

// Is reports that [ErrNotSupported] and [ErrCallRequiresNewerDriver] are
// [errors.ErrUnsupported].
func (c Code) Is(target error) bool {
	return target == errors.ErrUnsupported && (c == ErrNotSupported || c == ErrCallRequiresNewerDriver)
}

// Fatal reports whether the error persists until the process ends: the process can no longer use
// the device.
func (c Code) Fatal() bool {
	switch c {
	case ErrIllegalAddress, ErrLaunchFailure, ErrLaunchTimeout, errHardwareStackError,
		ErrIllegalInstruction, ErrMisalignedAddress, errInvalidAddressSpace, errInvalidPc,
		ErrECCUncorrectable, ErrContextIsDestroyed:
		return true
	}
	return false
}

// Codes that no library returns: why a call was not made.
const (
	codeMissing       Code = -1 - iota // the library does not export the function
	codeClosed                         // the stream or event was closed
	codeRuntimeClosed                  // the runtime was closed
)

// of adds to a code the function that returned it. Calls that another call needs
// first return such codes, so that errorf names the function that failed. success, and a code
// that has its function, stay as they are.
func (c Code) of(fn function) Code {
	if c == success || c>>codeBits != 0 {
		return c
	}
	return c | Code(fn+1)<<codeBits
}

// codeBits is the number of bits of a code that a library returns.
const codeBits = 20

// call separates what of combined. fn is the function that was to be called.
func (c Code) call(fn function) (function, Code) {
	if of := c >> codeBits; c > 0 && of > 0 {
		return function(of - 1), c & (1<<codeBits - 1)
	}
	return fn, c
}

// errorf makes the error of a call that returned a code other than success. The
// format is for the arguments of the call.
func (rt *Runtime) errorf(fn function, code Code, format string, args ...any) error {
	detail := fmt.Sprintf(format, args...)
	failed, code := code.call(fn)
	switch code {
	case codeMissing:
		return rt.missing(fn)
	case codeClosed:
		return fmt.Errorf("%s: %s: %w", fn.name(), detail, ErrClosed)
	case codeRuntimeClosed:
		return fmt.Errorf("%s: %s: the Runtime was closed: %w", fn.name(), detail, ErrClosed)
	}
	if failed != fn {
		detail = fmt.Sprintf("for %s: %s", fn.name(), detail)
	}
	return &Error{Op: failed.name(), Code: code, Detail: detail, API: rt.lib.API}
}

// missing makes the error of a function that the library does not export. It names
// the symbol of the library's version, or else the first version that has one.
func (rt *Runtime) missing(fn function) error {
	name, remedy := fn.name(), "another build of the library"
	rows := symbols
	if rt.lib.API == DriverAPI {
		rows = driverSymbols
	}
	for _, s := range rows {
		if s.fn == fn && s.serves(rt.lib.Runtime) {
			name = s.name
			break
		}
		if s.fn == fn && s.since > rt.lib.Runtime {
			name, remedy = s.name, "CUDA "+s.since.String()+" or later"
			break
		}
	}
	return fmt.Errorf("%s: not exported by %s (runtime %s), needs %s: %w",
		name, rt.lib.Path, rt.lib.Runtime, remedy, errors.ErrUnsupported)
}

// notMade makes the error of a method of nil, or of a zero value.
func notMade(fn function) error { return fmt.Errorf("%s: %w", fn.name(), errNotMade) }

// invalid makes the error of arguments that were refused before any call.
func invalid(fn function, format string, args ...any) error {
	return &Error{Op: fn.name(), Code: ErrInvalidValue, Detail: fmt.Sprintf(format, args...)}
}
