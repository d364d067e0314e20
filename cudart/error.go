package cudart

import (
	"errors"
	"fmt"
	"os"

	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	// ErrUnsupported is returned by calls that the loaded library does not
	// export, and by everything on platforms other than Linux. errors.Is
	// reports that it is [errors.ErrUnsupported].
	ErrUnsupported = sentinel.New("not supported", errors.ErrUnsupported)

	// ErrClosed is returned by methods of a [Runtime], [Stream] or [Event]
	// that was closed. errors.Is reports that it is [os.ErrClosed].
	ErrClosed = sentinel.New("already closed", os.ErrClosed)

	// ErrNoLibrary is returned by [Open] when no usable libcudart was found.
	ErrNoLibrary = errors.New("cudart: no usable libcudart found")

	// ErrNoDriver is returned by [Open] when a libcudart was found but no
	// NVIDIA driver that it can talk to.
	ErrNoDriver = errors.New("cudart: no NVIDIA driver")

	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil")
	errNilEvent   = errors.New("the event is nil")
)

// An Error is a CUDA call that failed. Most callers should inspect it with
// [errors.Is] and a [Code]:
//
//	if errors.Is(err, cudart.ErrMemoryAllocation) { … }
type Error struct {
	Op     string // the C function, such as "cudaHostRegister"
	Code   Code   // what it returned
	Detail string // what it was asked to do
}

// Error tells call, detail and code.
func (e *Error) Error() string {
	s := e.Op
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	s += ": " + e.Code.Error()
	if e.Code.sticky() {
		s += " (the error may come from earlier asynchronous work, and the CUDA context cannot be used any more: restart the process)"
	}
	return s
}

// Unwrap returns the Code.
func (e *Error) Unwrap() error { return e.Code }

// sticky tells whether the code stays with the context until the process ends.
func (c Code) sticky() bool {
	switch c {
	case ErrIllegalAddress, ErrLaunchFailure, ErrLaunchTimeout, ErrHardwareStackError,
		ErrIllegalInstruction, ErrMisalignedAddress, ErrInvalidAddressSpace, ErrInvalidPc,
		ErrECCUncorrectable, ErrContextIsDestroyed:
		return true
	}
	return false
}

// Codes that no library returns: why a call was not made.
const (
	codeMissing       Code = -1 - iota // the library does not export the function
	codeClosed                         // the object was closed
	codeRuntimeClosed                  // the runtime was closed
)

// of marks the code of a call that another one needed first, so that errorf
// names the call that failed.
func (c Code) of(fn function) Code { return c | Code(fn+1)<<codeBits }

// codeBits are those of a code that the library returned.
const codeBits = 20

// call takes apart what of put together; fn is the call that was meant.
func (c Code) call(fn function) (function, Code) {
	if of := c >> codeBits; c > 0 && of > 0 {
		return function(of - 1), c & (1<<codeBits - 1)
	}
	return fn, c
}

// errorf makes the error of a call that returned a code other than Success.
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
	return &Error{Op: failed.name(), Code: code, Detail: detail}
}

// missing is the error of a call of a function that the library does not
// export. It names the symbol of the library's version, and the version that
// brings one where that has none.
func (rt *Runtime) missing(fn function) error {
	name, need := fn.name(), "another build of the library"
	for i := range symbols {
		s := &symbols[i]
		if s.fn != fn {
			continue
		}
		if s.serves(rt.lib.Runtime) {
			name = s.name
			break
		}
		if s.since > rt.lib.Runtime {
			name, need = s.name, "CUDA "+s.since.String()+" or later"
			break
		}
	}
	return fmt.Errorf("%s: not exported by %s (runtime %s), needs %s: %w",
		name, rt.lib.Path, rt.lib.Runtime, need, ErrUnsupported)
}

// invalid is the error of arguments that were refused before any call.
func invalid(fn function, format string, args ...any) error {
	return &Error{Op: fn.name(), Code: ErrInvalidValue, Detail: fmt.Sprintf(format, args...)}
}
