package weights

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropCache removes the pages of n bytes at off of a file from the page cache, if shared is set
// also the pages that they share with others. The kernel may refuse: it is advice.
func dropCache(f *os.File, off int64, n int, shared bool) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	page := int64(os.Getpagesize())
	from, to := (off+page-1)/page*page, (off+int64(n))/page*page
	if shared {
		from, to = off/page*page, (off+int64(n)+page-1)/page*page
	}
	if from >= to {
		return // 0 bytes would stand for all that follow
	}
	_ = conn.Control(func(fd uintptr) {
		_ = unix.Fadvise(int(fd), from, to-from, unix.FADV_DONTNEED)
	})
}
