//go:build race

package hostmem

const soakOperations = 50_000
