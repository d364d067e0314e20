//go:build !linux

package hostos

import (
	"errors"
	"fmt"
)

func MapHuge(n int) ([]byte, func() error, error) { return Map(n, 0) }

// A FileMapping is a shared mapping of a range of a file.
type FileMapping struct{ Bytes []byte }

func MapFile(int, int64, int) (*FileMapping, error) {
	return nil, fmt.Errorf("map a file: %w", errors.ErrUnsupported)
}

func (*FileMapping) Unmap() error { return nil }

func (*FileMapping) MakePages(int, int) {}

func Populate([]byte) {}
