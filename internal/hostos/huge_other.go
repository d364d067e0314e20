//go:build !linux

package hostos

func MapHuge(n int) ([]byte, func() error, error) { return Map(n, 0) }
