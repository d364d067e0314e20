//go:build !race

package hostmem

const soakOperations = 1_000_000
