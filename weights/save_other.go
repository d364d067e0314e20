//go:build !linux

package weights

import (
	"errors"
	"os"
)

var errNoSpace = errors.New("no space left")

func freeSpace(string) (int64, bool) { return 0, false }

const hugePage = 2 << 20

func reserve(f *os.File, n int64) (mapped []byte, err error) { return nil, f.Truncate(n) }

func unmap([]byte) error { return nil }

func makeHuge([]byte) bool { return false }

func populate([]byte) {}

func openDirect(string) *os.File { return nil }

func lock(*os.File) locking { return isUnknown }

func lockDir(string) func() { return func() {} }

func syncDir(string) error { return nil }
