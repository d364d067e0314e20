//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// getenv is secure_getenv(3): in a process that runs with more rights than its
// caller (setuid, file capabilities) the caller must not choose what is loaded.
func getenv(name string) string {
	if runsElevated() {
		return ""
	}
	return os.Getenv(name)
}

// runsElevated tells whether the kernel set AT_SECURE, as the loader does.
func runsElevated() bool {
	const atSecure = 23
	vector, _ := unix.Auxv() // not to be had in odd build modes: as if not set
	for _, entry := range vector {
		if entry[0] == atSecure {
			return entry[1] != 0
		}
	}
	return false
}

// why returns an error's cause without the path, which the caller has.
func why(err error) string {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err.Error()
	}
	return err.Error()
}

func notFolder(err error) bool { return errors.Is(err, unix.ENOTDIR) }
