//go:build race

package testgpu

// Race says that the tests run under the race detector, which takes several times the memory
// and, where bytes are touched one by one, tens of times as long.
const Race = true
