package transfer

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openDirect opens a file once more, past the page cache. Not every file system
// can.
func openDirect(f *os.File, flag int) (d *os.File, ok bool) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, false
	}
	ctlErr := conn.Control(func(fd uintptr) {
		d, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), flag|unix.O_DIRECT, 0)
	})
	return d, ctlErr == nil && err == nil
}

// readBlocks fills to, a number of blocks, unless the file ends before.
func readBlocks(d *os.File, to []byte, pos int64) (got int, err error) {
	for got < len(to) && got%block == 0 {
		n, err := unix.Pread(int(d.Fd()), to[got:], pos+int64(got))
		switch {
		case err == unix.EINTR:
			continue
		case notDirect(err):
			return 0, errNotDirect
		case err != nil:
			return got, fmt.Errorf("read %s past the page cache: %w", d.Name(), err)
		case n == 0:
			return got, nil
		}
		got += n
	}
	return got, nil
}

func notDirect(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}
