package hosttest

import "testing"

// Stride is 1, and under -short 8: for tests that judge every host there is, or make every call of a run fail, one
// after the other, which shows no more under the race detector and an emulator than without.
func Stride() int {
	if testing.Short() {
		return 8
	}
	return 1
}

// Sample returns all items, and under -short one in eight: see [Stride].
func Sample[T any](items []T) (some []T) {
	for i := 0; i < len(items); i += Stride() {
		some = append(some, items[i])
	}
	return some
}
