package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
)

// Create makes memory of n bytes, which are zero, and makes it resident with several threads. An empty name makes one
// without a name: see [Memory.File]. The file takes n bytes rounded up to a page, and another page.
//
// If the name exists, the error wraps [fs.ErrExist], unless that is memory of a process that was killed before it could
// remove it. Of several processes that create one name, one succeeds. The error wraps [hostmem.ErrLimit] if the host or the
// control group lacks the memory, and ENOSPC if the file system does. When ctx ends, Create returns its error. After an
// error nothing stays.
func Create(ctx context.Context, name string, n int, o Options) (*Memory, error) {
	m, err := create(ctx, name, n, o)
	if err != nil {
		return nil, fmt.Errorf("shm: create %q of %d bytes: %w", name, n, err)
	}
	return m, nil
}

func create(ctx context.Context, name string, n int, o Options) (m *Memory, err error) {
	path, err := o.path(name)
	switch {
	case ctx == nil:
		return nil, errNilContext
	case err != nil:
		return nil, err
	case n <= 0 || n > math.MaxInt/2:
		return nil, errors.New("the size must be positive, and fit the address space")
	case o.Keep && path == "":
		return nil, errors.New("Options.Keep needs a name (a memory without one exists while a process has it open)")
	case o.Mode&^0o666 != 0:
		return nil, fmt.Errorf("Options.Mode of %v: want bits of 0666", o.Mode)
	case ctx.Err() != nil:
		return nil, bounded.Ended(ctx)
	}
	mode := cmp.Or(o.Mode, 0o600)
	m = &Memory{path: path, header: header{keep: o.Keep, size: n, created: time.Now(), pid: os.Getpid(), uid: os.Getuid()}}
	if path == "" {
		m.file, err = openAnonymous(mode)
	} else {
		m.file, err = openTemporary(filepath.Dir(path), mode)
	}
	if err != nil {
		return nil, advise(err)
	}
	if err := m.fill(ctx, o); err != nil {
		m.keep = false
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// advise adds what to do where a file system has no files without a name.
func advise(err error) error {
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("%w (Options.Dir must be of a tmpfs or a hugetlbfs)", err)
	}
	return err
}

// fill gives a new file its size, its header, its name, and then its pages: of several makers of a name all but one end
// before they take memory.
func (m *Memory) fill(ctx context.Context, o Options) error {
	system := pages.SystemOf(ctx)
	on, err := system.Calls.FileSystem(descriptorPath(m.file))
	if err != nil {
		return err
	}
	if !on.Memory {
		return fmt.Errorf("its directory is on a disk: %w (Options.Dir must be of a tmpfs or a hugetlbfs)", errors.ErrUnsupported)
	}
	m.offset = max(system.Page, on.Page)
	whole := roundUp(int64(m.size), m.offset) + int64(m.offset)
	reservation, err := budget.Process().Acquire(ctx, budget.Request{Bytes: int(whole), Reserved: on.Page > 0})
	if err != nil {
		return err
	}
	defer reservation.Release() // Register reserves it again, and finds it resident
	if err := m.file.Truncate(whole); err != nil {
		return err
	}
	if err := m.putHeader(system); err != nil {
		return err
	}
	if m.path == "" {
		err = seal(m.file)
	} else {
		err = m.link(ctx)
	}
	if err == nil {
		err = m.open(system)
	}
	if err != nil {
		return err
	}
	if node, ok := hostmem.NodeOf(ctx, o.Device); ok {
		m.mem.Bind(node)
	}
	err = m.mem.Populate(ctx, pages.Populate{Threads: o.Workers})
	if err == nil && len(m.mem.Notes()) > 0 { // Linux before 5.14 does not populate
		err = reserve(m.file, whole)
	}
	return noSpace(err)
}

// putHeader writes the header of a new file.
func (m *Memory) putHeader(system *pages.System) error {
	page, err := pages.MapFile(system, m.file, 0, headerSize, true)
	if err != nil {
		return err
	}
	err = pages.Access(func() { m.header.put(page.Bytes()) })
	return errors.Join(noSpace(err), page.Unmap())
}

// noSpace adds what a page that the kernel does not have means here.
func noSpace(err error) error {
	if err != nil && errors.Is(err, pages.ErrFault) {
		return fmt.Errorf("%w: the file system has no space left (df; in a container, the size of its /dev/shm): %w", errNoSpace, err)
	}
	return err
}

// link gives the file its name, and opens it by that: /proc shows the name then, and other processes find it.
func (m *Memory) link(ctx context.Context) error {
	if err := m.lock(); err != nil { // before others can open it
		return err
	}
	if err := m.takeName(ctx); err != nil {
		return err
	}
	f, err := openNamed(m.path, false)
	if err != nil {
		return err
	}
	temporary := m.file
	m.file = f
	if err = m.lock(); err == nil && !m.named() {
		err = fmt.Errorf("it was removed meanwhile: %w", fs.ErrNotExist)
	}
	return errors.Join(err, closeLocked(temporary))
}

// takeName links the file. Memory of that name which nobody has, and nobody keeps, is removed.
func (m *Memory) takeName(ctx context.Context) error {
	for {
		err := link(m.file, m.path)
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		switch removed, why := removeUnused(m.path); {
		case why != nil:
			return fmt.Errorf("%w: %w", err, why)
		case !removed:
			return fmt.Errorf("%w: it is in use or kept (open it, or remove it with Remove)", err)
		}
		if ctx.Err() != nil {
			return bounded.Ended(ctx)
		}
	}
}
