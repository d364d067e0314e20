package weights

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropCache removes n bytes at off of a file from the page cache, with the pages that
// they share with others. The kernel may refuse: it is advice.
func dropCache(f *os.File, off int64, n int) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	page := int64(os.Getpagesize())
	from := off / page * page
	to := (off + int64(n) + page - 1) / page * page
	_ = conn.Control(func(fd uintptr) {
		_ = unix.Fadvise(int(fd), from, to-from, unix.FADV_DONTNEED)
	})
}
