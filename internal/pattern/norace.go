//go:build !race

package pattern

func writes([]byte) {}
