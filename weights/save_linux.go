package weights

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hostos"
)

const errNoSpace = unix.ENOSPC

// freeSpace returns the bytes that this user may write to the file system of a directory.
func freeSpace(dir string) (n int64, known bool) {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil || s.Blocks == 0 { // some network file systems do not say
		return 0, false
	}
	return int64(s.Bavail) * s.Bsize, true
}

// reserve sets the size of a file, and takes the space for it, but on tmpfs, where that would write all pages. A file
// there is mapped if it has huge pages.
func reserve(f *os.File, n int64) (mapped *hostos.PagesAhead, err error) {
	var s unix.Statfs_t
	inMemory := unix.Fstatfs(int(f.Fd()), &s) == nil && s.Type == unix.TMPFS_MAGIC
	if !inMemory {
		err := unix.Fallocate(int(f.Fd()), 0, 0, n)
		if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
			return nil, err
		}
	}
	if err := f.Truncate(n); err != nil || !inMemory || n < hostos.HugePage {
		return nil, err
	}
	mapping, err := hostos.MapFile(int(f.Fd()), 0, int(n))
	if err != nil {
		return nil, err
	}
	return hostos.NewPagesAhead(mapping), nil
}

// openDirect opens a file for writing without the page cache. It returns nil where that cannot be done.
func openDirect(name string) *os.File {
	f, err := os.OpenFile(name, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil
	}
	return f
}

// lock locks a file until it is closed.
func lock(f *os.File) locking {
	switch unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) {
	case nil:
		return isMine
	case unix.EWOULDBLOCK:
		return isLocked
	}
	return isUnknown
}

// lockDir waits until no other save gives names in a directory, where the file system has such locks.
func lockDir(dir string) (unlock func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	_ = unix.Flock(int(d.Fd()), unix.LOCK_EX)
	return func() { _ = d.Close() }
}

// syncDir flushes the names in a directory to storage.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) { // a file system whose directories need no fsync
		err = nil
	}
	return errors.Join(err, d.Close())
}
