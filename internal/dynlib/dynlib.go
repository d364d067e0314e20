// Package dynlib loads shared libraries and calls their functions.
package dynlib

// String returns the path.
func (l *Library) String() string { return l.path }
