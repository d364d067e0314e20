//go:build !(linux && !android && (amd64 || arm64))

package dynlib

import "errors"

// A Library cannot be loaded here.
type Library struct{ path string }

// Open fails with [errors.ErrUnsupported].
func Open(string) (*Library, error) { return nil, errors.ErrUnsupported }

// Symbol returns 0.
func (l *Library) Symbol(string) uintptr { return 0 }

// Call is never called: there is no library whose function it could call.
func Call(uintptr, ...uintptr) uintptr { return 0 }
