//go:build !linux

package transfer

import (
	"errors"
	"os"
)

func mapInMemory(*os.File, int64, int) (mem []byte, unmap func() error, err error) {
	return nil, nil, errors.ErrUnsupported
}
