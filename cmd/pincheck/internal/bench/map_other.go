//go:build !linux

package bench

import (
	"errors"
	"os"
)

func mapPlain(int) ([]byte, func() error, error) { return nil, nil, errors.ErrUnsupported }

func mapLocked(int, string) ([]byte, func() error, error) { return nil, nil, errors.ErrUnsupported }

func mapForReading(*os.File, int) ([]byte, func() error, error) {
	return nil, nil, errors.ErrUnsupported
}

func dropCache(*os.File, int) (float64, error) { return 0, errors.ErrUnsupported }

func opensDirect(string) bool { return false }

func onDisk(string) (int, bool, error) { return 0, false, errors.ErrUnsupported }

func unlinkedFile(string) (*os.File, string, error) { return nil, "", errors.ErrUnsupported }
