//go:build !race

package testgpu

// Race says that the tests run under the race detector.
const Race = false
