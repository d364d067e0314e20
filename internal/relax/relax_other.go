//go:build !(amd64 || arm64)

// Package relax has the hint of a goroutine that polls memory.
package relax

// Core does nothing where no instruction is known.
func Core() {}
