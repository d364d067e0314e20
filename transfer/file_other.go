//go:build !linux

package transfer

import (
	"context"
	"errors"
	"os"
)

func (Call) reopenDirect(*os.File, int) *os.File { return nil }

func reopen(*os.File, int, int) *os.File { return nil }

type fileSystem uint32

func fileSystemOf(*os.File) fileSystem { return 0 }

func (fileSystem) isRemote() bool { return false }

func notDirect(error) bool { return true }

type cachedFile struct{}

func openCached(*os.File, fileSystem, int64, int) (*cachedFile, bool) { return nil, false }

func (*cachedFile) readNow([]byte, int) (int, error) { return 0, errors.ErrUnsupported }

func (*cachedFile) close() {}

func (target) downloadMapped(context.Context, *os.File, int64, int) (int, bool, error) {
	return 0, false, nil
}

func writesAtOffset(*os.File) bool { return false }

func resident([]byte) bool { return true }
