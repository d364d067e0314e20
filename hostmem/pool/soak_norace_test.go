//go:build linux && !android && (amd64 || arm64) && !race

package pool

const soakOperations = 1_000_000
