package shm

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// An Info describes memory that has a name.
type Info struct {
	Path    string
	Len     int       // bytes of the content
	Created time.Time // of Create
	Used    time.Time // of the last Open for writing, Begin, Complete or Close
	Maker   int       // process id of the process that made it, in its own namespace
	UID     int       // user id of the owner of the file
	Keep    bool      // it stays when no process has it open
	Content Content
	// Users are the processes that have it open, as far as they are in this PID namespace (/proc/locks).
	Users []int
}

// List returns the memory in a directory, empty for DefaultDir, in the order of the names. It skips other files, and files
// that this user may not read. It takes no lock.
func List(dir string) ([]Info, error) {
	dir = cmp.Or(dir, DefaultDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("shm: list: %w", err)
	}
	locks, err := linux.ReadLocks(os.DirFS("/"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("shm: list %s: %w", dir, err)
	}
	var all []Info
	for _, e := range entries {
		if e.Type().IsRegular() {
			if info, ok := inspect(filepath.Join(dir, e.Name()), locks); ok {
				all = append(all, info)
			}
		}
	}
	return all, nil
}

// inspect describes a file; ok is false if it is not one of Create.
func inspect(path string, locks []linux.FileLock) (info Info, ok bool) {
	f, err := openNamed(path, true)
	if err != nil {
		return info, false
	}
	defer f.Close()
	h, err := readHeader(f, pages.Host(), true)
	if err != nil {
		return info, false
	}
	page := make([]byte, headerSize)
	stat, err := f.Stat()
	if err == nil {
		_, err = f.ReadAt(page, 0)
	}
	if err != nil {
		return info, false
	}
	id, uid, _ := identify(stat)
	info = Info{Path: path, Len: h.size, Created: h.created, Used: timeAt(page, atUsed), Maker: h.pid, UID: uid, Keep: h.keep, Content: contentOf(page)}
	for _, l := range locks {
		if fmt.Sprintf("%s:%d", l.Device, l.Inode) == id.String() && !slices.Contains(info.Users, l.PID) {
			info.Users = append(info.Users, l.PID)
		}
	}
	slices.Sort(info.Users)
	return info, true
}

// Remove removes the name of memory. Processes that have it open keep it until they close it. The error wraps
// [fs.ErrNotExist] if there is none, and [ErrDamaged] if the file is not one of Create.
func Remove(name string, o Options) error {
	path, err := o.path(name)
	if err == nil && path == "" {
		err = errors.New("the name is empty")
	}
	if err == nil {
		err = remove(path, o)
	}
	return prefixed(fmt.Sprintf("remove %q", name), err)
}

func remove(path string, o Options) error {
	f, err := openNamed(path, true)
	if err != nil {
		return explainOpen(path, err)
	}
	defer f.Close()
	if _, err := readHeader(f, pages.Host(), o.AnyOwner); err != nil {
		return err
	}
	return os.Remove(path)
}

// Sweep removes memory of this user in a directory, empty for DefaultDir, that nobody has open and nobody keeps: its last
// process was killed. It returns the paths of what it has removed.
func Sweep(dir string) (removed []string, err error) {
	all, err := List(dir)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, info := range all {
		if info.UID != os.Geteuid() {
			continue
		}
		ok, err := removeUnused(info.Path)
		if ok {
			removed = append(removed, info.Path)
		}
		errs = append(errs, err)
	}
	return removed, prefixed("sweep", errors.Join(errs...))
}

// removeUnused removes memory that nobody has open and nobody keeps. removed is true also if somebody else has removed it.
//
// Whoever gets the exclusive lock on memory that is not kept has to remove its name: a process that closes it meanwhile takes
// the holder of the lock for one that has it open.
func removeUnused(path string) (removed bool, err error) {
	f, err := openNamed(path, true)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, explainOpen(path, err)
	}
	defer func() { _ = closeLocked(f) }()
	h, err := readHeader(f, pages.Host(), false)
	if err != nil || h.keep {
		return false, err
	}
	alone, err := tryLock(f, true)
	if err != nil || !alone {
		return false, err
	}
	m := Memory{path: path}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if m.id, _, _ = identify(info); !m.named() {
		return true, nil // a new one may have the name
	}
	return true, os.Remove(path)
}
