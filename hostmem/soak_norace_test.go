//go:build linux && !android && (amd64 || arm64) && !race

package hostmem

const soakOperations = 1_000_000
