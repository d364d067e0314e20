//go:build !linux

package weights

import (
	"errors"
	"os"

	"github.com/gopinned/pinned/internal/hostos"
)

var errNoSpace = errors.New("no space left")

func freeSpace(string) (int64, bool) { return 0, false }

func reserve(f *os.File, n int64) (*hostos.PagesAhead, error) { return nil, f.Truncate(n) }

func openDirect(string) *os.File { return nil }

func lock(*os.File) locking { return isUnknown }

func lockDir(string) func() { return func() {} }

func syncDir(string) error { return nil }
