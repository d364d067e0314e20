//go:build linux && !android && (amd64 || arm64)

package verify

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// memoryFile opens a new file of n bytes in memory, which has no name.
func memoryFile(n int) (*os.File, error) {
	const name = "verify"
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(n)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
