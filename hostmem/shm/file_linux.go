//go:build linux && !android && (amd64 || arm64)

package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// openTemporary makes a file without a name in a directory, which has one once it is linked.
func openTemporary(dir string, mode fs.FileMode) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "open a temporary file in", Path: dir, Err: err}
	}
	return withMode(os.NewFile(uintptr(fd), dir), mode)
}

// openAnonymous makes a memfd. Its size can change until seal.
func openAnonymous(mode fs.FileMode) (*os.File, error) {
	fd, err := unix.MemfdCreate("pinned", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return withMode(os.NewFile(uintptr(fd), "memfd:pinned"), mode)
}

func withMode(f *os.File, mode fs.FileMode) (*os.File, error) {
	if err := f.Chmod(mode); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// seal keeps the size of a memfd.
func seal(f *os.File) error {
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	return os.NewSyscallError("seal the memfd", err)
}

// link gives a temporary file its name. The error wraps fs.ErrExist if another file has it.
func link(f *os.File, path string) error {
	err := unix.Linkat(unix.AT_FDCWD, descriptorPath(f), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	if err != nil {
		return &os.LinkError{Op: "link", Old: "a temporary file", New: path, Err: err}
	}
	return nil
}

func descriptorPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// openNamed opens a file, but no link. It does not wait for the writer of a pipe.
func openNamed(path string, readOnly bool) (*os.File, error) {
	return open(path, readOnly, unix.O_NOFOLLOW|unix.O_NONBLOCK)
}

// reopen opens a file anew, so that its locks are not shared with other descriptors.
func reopen(f *os.File, readOnly bool) (*os.File, error) { return open(descriptorPath(f), readOnly, 0) }

func open(path string, readOnly bool, flags int) (*os.File, error) {
	access := unix.O_RDWR
	if readOnly {
		access = unix.O_RDONLY
	}
	return os.OpenFile(path, access|flags, 0)
}

// An identity identifies a file.
type identity struct {
	device, inode uint64
}

// String is as in /proc/locks.
func (i identity) String() string {
	return fmt.Sprintf("%02x:%02x:%d", unix.Major(i.device), unix.Minor(i.device), i.inode)
}

// identify returns the file that a FileInfo is of, its user, and how many names it has.
func identify(info fs.FileInfo) (id identity, uid, names int) {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return identity{}, -1, 0
	}
	return identity{s.Dev, s.Ino}, int(s.Uid), int(s.Nlink)
}

// tryLock locks a file for this descriptor (flock): shared with others, or exclusively. The kernel releases the lock with
// the descriptor. ok is false if another has a lock that forbids it.
func tryLock(f *os.File, exclusive bool) (ok bool, err error) {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, os.NewSyscallError("flock", err)
}

// closeLocked unlocks a file and closes it. A process that is being started has a copy of each descriptor until it
// executes its program, and with it the lock, unless that is released.
func closeLocked(f *os.File) error {
	err := os.NewSyscallError("flock", unix.Flock(int(f.Fd()), unix.LOCK_UN))
	return errors.Join(err, f.Close())
}

// lockWriter makes this descriptor the only one that writes, or ends that (F_OFD_SETLK). ok is false if another one is.
func lockWriter(f *os.File, lock bool) (ok bool, err error) {
	l := unix.Flock_t{Type: unix.F_UNLCK, Len: 1}
	if lock {
		l.Type = unix.F_WRLCK
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, os.NewSyscallError("fcntl", err)
}

// reserve takes the pages of a file (fallocate).
func reserve(f *os.File, n int64) error {
	return os.NewSyscallError("fallocate", unix.Fallocate(int(f.Fd()), 0, 0, n))
}

// errNoSpace is in the errors of file systems that are full.
const errNoSpace = unix.ENOSPC
