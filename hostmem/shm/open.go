package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
)

// Open maps memory by its name. The error wraps [fs.ErrNotExist] if there is none, [fs.ErrPermission] if it is another
// user's and Options.AnyOwner is not set, and [ErrDamaged] if the file is not one of Create.
func Open(ctx context.Context, name string, o Options) (*Memory, error) {
	path, err := o.path(name)
	switch {
	case ctx == nil:
		err = errNilContext
	case err == nil && path == "":
		err = errors.New("the name is empty")
	}
	var m *Memory
	if err == nil {
		m, err = openUnlocked(ctx, func() (*Memory, error) {
			f, err := openNamed(path, o.ReadOnly)
			if err != nil {
				return nil, explainOpen(path, err)
			}
			m, err := openFile(ctx, f, path, o)
			if err == nil && !m.named() { // it was removed before it was locked: another may have the name
				return nil, errors.Join(errLocked, m.Close())
			}
			return m, err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("shm: open %q: %w", name, err)
	}
	return m, nil
}

// openUnlocked opens a file once nobody has it exclusively.
func openUnlocked(ctx context.Context, open func() (*Memory, error)) (*Memory, error) {
	for range openAttempts {
		m, err := open()
		if !errors.Is(err, errLocked) {
			return m, err
		}
		select {
		case <-ctx.Done():
			return nil, bounded.Ended(ctx)
		case <-time.After(openPause):
		}
	}
	return nil, errLocked
}

const (
	openPause    = time.Millisecond
	openAttempts = 10_000
)

// errLocked is the error of a file that a process has for itself, as one does for a moment to remove it.
var errLocked = errors.New("another process has locked the file exclusively")

// explainOpen names a link.
func explainOpen(path string, err error) error {
	if info, failed := os.Lstat(path); failed == nil && info.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%w: it is a link", err)
	}
	return err
}

// OpenFile maps memory by a descriptor of its file, which a process has received or kept. It does not use f afterwards.
// Who has sent a descriptor is trusted: Options.AnyOwner is not needed. Errors are those of Open.
func OpenFile(ctx context.Context, f *os.File, o Options) (*Memory, error) {
	if ctx == nil || f == nil {
		return nil, errors.New("shm: open a file: the context or the file is nil")
	}
	o.AnyOwner = true
	path, _ := os.Readlink(descriptorPath(f)) // of memory without a name it is the path of no file
	m, err := openUnlocked(ctx, func() (*Memory, error) {
		own, err := reopen(f, o.ReadOnly)
		if err != nil {
			return nil, err
		}
		return openFile(ctx, own, path, o)
	})
	if err != nil {
		return nil, fmt.Errorf("shm: open %s: %w", f.Name(), err)
	}
	return m, nil
}

// openFile maps a file, and closes it after an error.
func openFile(ctx context.Context, f *os.File, path string, o Options) (*Memory, error) {
	m := &Memory{path: path, file: f, readOnly: o.ReadOnly}
	system := pages.SystemOf(ctx)
	h, err := readHeader(f, system, o.AnyOwner)
	if err == nil {
		m.header = h
		err = m.open(system)
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// readHeader reads the header of a file.
func readHeader(f *os.File, system *pages.System, anyOwner bool) (header, error) {
	info, err := f.Stat()
	if err != nil {
		return header{}, err
	}
	if !info.Mode().IsRegular() {
		return header{}, fmt.Errorf("%w: it is not a regular file (mode %v)", ErrDamaged, info.Mode())
	}
	if _, uid, _ := identify(info); !anyOwner && uid != os.Geteuid() && uid != 0 {
		return header{}, fmt.Errorf("it belongs to user %d: %w (Options.AnyOwner opens it)", uid, fs.ErrPermission)
	}
	on, err := system.Calls.FileSystem(descriptorPath(f))
	if err != nil {
		return header{}, err
	}
	page := make([]byte, headerSize)
	n, err := f.ReadAt(page, 0)
	if n < headerSize && err != nil && info.Size() >= headerSize {
		return header{}, err
	}
	return parse(page[:n], info.Size(), max(system.Page, on.Page))
}

// open locks and maps a file whose header is known.
func (m *Memory) open(system *pages.System) error {
	err := m.lock()
	if err != nil {
		return err
	}
	// The mappings do not keep the locks: the kernel may unmap a process's memory some time after its end.
	f, err := reopen(m.file, m.readOnly)
	if err != nil {
		return err
	}
	defer f.Close()
	if m.page, err = pages.MapFile(system, f, 0, headerSize, !m.readOnly); err != nil {
		return err
	}
	if m.mem, err = pages.MapFile(system, f, int64(m.offset), m.size, !m.readOnly); err != nil || m.readOnly {
		return err
	}
	return pages.Access(m.used)
}

// lock locks the file as one of its users.
func (m *Memory) lock() error {
	if ok, err := tryLock(m.file, false); err != nil || !ok {
		return cmp.Or(err, errLocked)
	}
	info, err := m.file.Stat()
	if err == nil {
		m.id, _, _ = identify(info)
	}
	return err
}
