package linux

import (
	"io/fs"
	"strconv"
	"strings"
)

// A FileLock is a process that has locked a file (flock, fcntl).
type FileLock struct {
	PID    int
	Device string // "00:1a": major and minor number of the file system, hexadecimal
	Inode  uint64
}

// ReadLocks reads the locks of the processes in this PID namespace (/proc/locks), without those that wait, and without
// those of open file descriptions, which have no process.
func ReadLocks(fsys fs.FS) ([]FileLock, error) { return read(fsys, "proc/locks", ParseLocks) }

// ParseLocks parses /proc/locks: "1: FLOCK  ADVISORY  READ 1234 00:1a:5678 0 EOF".
func ParseLocks(text string) (all []FileLock, err error) {
	err = eachLine(text, "a lock, as proc_locks(5) describes it", func(line string) bool {
		fields := strings.Fields(line)
		if len(fields) > 1 && fields[1] == "->" {
			return true
		}
		if len(fields) != 8 {
			return false
		}
		pid, err := strconv.Atoi(fields[4])
		at := strings.LastIndexByte(fields[5], ':')
		if err != nil || at < 0 {
			return false
		}
		inode, err := strconv.ParseUint(fields[5][at+1:], 10, 64)
		if err != nil {
			return false
		}
		if pid > 0 {
			all = append(all, FileLock{pid, fields[5][:at], inode})
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}
