package hosttest

import "testing"

// sampled is one in how many of the items a test takes under -short.
const sampled = 8

// Sample returns all items, and under -short one in eight: for tests that judge every host there is, one after the
// other, which shows no more under the race detector and an emulator than without.
func Sample[T any](items []T) []T {
	if !testing.Short() {
		return items
	}
	var some []T
	for i := 0; i < len(items); i += sampled {
		some = append(some, items[i])
	}
	return some
}
