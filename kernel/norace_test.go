//go:build linux && !android && (amd64 || arm64) && !race

package kernel_test

const raceEnabled = false
