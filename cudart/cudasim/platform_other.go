//go:build !(linux && !android && (amd64 || arm64))

package cudasim

import (
	"errors"
	"fmt"
	"runtime"
)

var errPlatform = fmt.Errorf("cudasim: no C callbacks on %s/%s: %w", runtime.GOOS, runtime.GOARCH, errors.ErrUnsupported)

func newEntry(int, func(*arguments) uintptr) (uintptr, error) { return 0, errPlatform }

func callHostFunction(uintptr, uintptr) {}

type threadKey struct{}

func threads() (*threadKey, error) { return nil, errPlatform }

func (*threadKey) current() uint64 { return 0 }

func mapMemory(int) ([]byte, error) { return nil, errPlatform }

func unmapMemory([]byte) error { return errPlatform }

func dropMemory([]byte) error { return errPlatform }

func mapped(uintptr) bool { return true }
