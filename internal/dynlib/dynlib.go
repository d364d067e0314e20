// Package dynlib loads shared libraries and calls their functions.
package dynlib

// A Library is a library that the dynamic loader has loaded. It is never unloaded, because
// CUDA's threads and exit handlers would still run its code.
type Library struct {
	handle uintptr
	path   string
}

// String returns the path.
func (l *Library) String() string { return l.path }
