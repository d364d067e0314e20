//go:build race

package verify

// raceEnabled says that these tests run under the race detector, tens of
// times as slow where bytes are touched one by one.
const raceEnabled = true
