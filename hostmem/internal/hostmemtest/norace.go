//go:build !race

package hostmemtest

// Race says that the race detector is on: tests are slow then, and need much memory.
const Race = false
