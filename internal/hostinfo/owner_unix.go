//go:build unix

package hostinfo

import "syscall"

func systemOwner(sys any) (Owner, bool) {
	stat, ok := sys.(*syscall.Stat_t)
	if !ok {
		return Owner{}, false
	}
	return Owner{int(stat.Uid), int(stat.Gid)}, true
}
