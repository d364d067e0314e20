//go:build unix

package linux

import "syscall"

func systemOwner(sys any) (Owner, bool) {
	stat, ok := sys.(*syscall.Stat_t)
	if !ok {
		return Owner{}, false
	}
	return Owner{int(stat.Uid), int(stat.Gid)}, true
}
