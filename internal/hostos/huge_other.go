//go:build !linux

package hostos

func MapHuge(n int) ([]byte, func() error, error) { return Map(n, 0) }

// A FileMapping is of Linux alone.
type FileMapping struct{ Bytes []byte }

func (*FileMapping) Unmap() error { return nil }

func (*FileMapping) MakePages(int, int) {}

func Populate([]byte) {}
