//go:build !unix

package bench

import (
	"errors"
	"fmt"
)

func fresh(int) (b []byte, release func() error, err error) {
	return nil, nil, fmt.Errorf("map memory: %w", errors.ErrUnsupported)
}
