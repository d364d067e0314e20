//go:build !linux

package transfer

import "os"

func openDirect(*os.File, int) (*os.File, bool) { return nil, false }

func readBlocks(*os.File, []byte, int64) (int, error) { return 0, errNotDirect }

func notDirect(error) bool { return true }
