//go:build !(linux && !android && (amd64 || arm64))

package dynlib

import "errors"

// A Library is a library that the dynamic loader has loaded. It is never unloaded, because
// CUDA's threads and exit handlers would still run its code.
type Library struct {
	path string
}

// Open fails with [errors.ErrUnsupported].
func Open(string) (*Library, error) { return nil, errors.ErrUnsupported }

// Symbol returns 0.
func (l *Library) Symbol(string) uintptr { return 0 }

// Call is never called: there is no library whose function it could call.
func Call(uintptr, ...uintptr) uintptr { return 0 }
