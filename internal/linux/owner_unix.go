//go:build unix

package linux

import (
	"syscall"

	"golang.org/x/sys/unix"
)

func systemOwner(sys any) (Owner, bool) {
	stat, ok := sys.(*syscall.Stat_t)
	if !ok {
		return Owner{}, false
	}
	return Owner{int(stat.Uid), int(stat.Gid)}, true
}

func systemMajor(sys any) int {
	stat, ok := sys.(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return int(unix.Major(uint64(stat.Rdev)))
}
