//go:build !linux

package findlib

func elevated() bool { return false }
