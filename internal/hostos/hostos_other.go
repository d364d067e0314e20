//go:build !unix

package hostos

import (
	"errors"
	"fmt"
	"time"
)

func CPUTime() time.Duration { return -1 }

func Map(int, int) ([]byte, func() error, error) {
	return nil, nil, fmt.Errorf("map memory: %w", errors.ErrUnsupported)
}
