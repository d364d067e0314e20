//go:build !linux

package transfer

import (
	"errors"
	"os"
)

func reopenDirect(*os.File, int) *os.File { return nil }

func preadDirect(*os.File, []byte, int64) (int, error) { return 0, errors.ErrUnsupported }

func notDirect(error) bool { return true }

type sharedFile struct {
	file  *os.File
	mem   []byte
	off   int64
	slow  bool
	grows bool
	put   func(to, from []byte)
}

func mapShared(*os.File, int64, int, bool) (*sharedFile, error) { return nil, errors.ErrUnsupported }

func (*sharedFile) close(int) error { return nil }

type cachedFile struct{}

func openCached(*os.File, int64, int) (*cachedFile, bool) { return nil, false }

func (*cachedFile) readNow([]byte, int) (int, error) { return 0, errors.ErrUnsupported }

func (*cachedFile) close() {}

func writesAtOffset(*os.File) bool { return false }
