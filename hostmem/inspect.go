package hostmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// inspect finds mem among the mappings of the process. It returns the mappings that contain
// mem and describes its pages, or returns why CUDA cannot register it.
func inspect(mem []byte, system *pages.System) (covered []linux.Mapping, m pages.Memory, err error) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	end := start + uintptr(len(mem))
	covered, heap, err := mappings(mem, start, end)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, m, fmt.Errorf("read the process's mappings: %w: %w", errors.ErrUnsupported, err)
	case err != nil:
		return nil, m, fmt.Errorf("read the process's mappings: %w", err)
	case heap:
		return nil, m, ErrGoMemory
	}
	m.Bytes = mem
	if m.ReadOnly, err = access(covered, start, end); err != nil {
		return nil, m, err
	}
	m.Backing, m.Shared = backing(covered, system)
	return covered, m, nil
}

// mappings returns the mappings of the process that contain mem, and whether a part of it
// is of the Go heap.
func mappings(mem []byte, start, end uintptr) (covered []linux.Mapping, heap bool, err error) {
	maps, err := linux.OpenMaps(os.DirFS("/"))
	if err != nil {
		return nil, false, err
	}
	defer maps.Close()
	if covered, err = maps.Within(start, end); err == nil {
		heap, err = goMemory(maps, covered, mem)
	}
	return covered, heap, err
}

// backing returns the kind of pages of the mappings: page cache, if any of them is. shared
// reports that all of them are mapped shared.
func backing(maps []linux.Mapping, system *pages.System) (b pages.Backing, shared bool) {
	shared = true
	for i, m := range maps {
		shared = shared && m.Shared
		of := backingOf(m, system)
		switch {
		case i == 0, of == pages.PageCache:
			b = of
		case of != b && b != pages.PageCache:
			b = pages.Ordinary
		}
	}
	return b, shared
}

func backingOf(m linux.Mapping, system *pages.System) pages.Backing {
	if !m.Shared || !m.File || inMemory(m) {
		return pages.Ordinary // a file's private mapping has pages of its own once it is written to
	}
	on, err := system.Calls.FileSystem(strings.TrimSuffix(m.Name, " (deleted)"))
	if err != nil {
		return pages.PageCache // it was removed: this is the cautious answer
	}
	return on.Backing()
}

// inMemory reports whether a mapping of a file is shared memory: a memfd, /dev/zero, /dev/shm
// or System V.
func inMemory(m linux.Mapping) bool {
	for _, prefix := range []string{"/memfd:", "/dev/", "/SYSV"} {
		if strings.HasPrefix(m.Name, prefix) {
			return true
		}
	}
	return false
}

// access returns how [start, end) can be registered: for reading only or for
// both, or why it cannot. maps are the mappings that overlap it.
//
// The rules are those of the driver (R580, CUDA 13.0). It refuses holes and memory that
// cannot be read. Memory that cannot be written has to be
// registered read-only, and that works where the mapping is shared. For a
// private mapping the driver requests pages that it can write to; with a
// file's private mapping it hangs and does not return. So a range that contains a private
// mapping without write permission is refused.
func access(maps []linux.Mapping, start, end uintptr) (readOnly bool, err error) {
	at := start
	var private *linux.Mapping
	for i, m := range maps {
		if m.Start > at {
			break
		}
		at = min(m.End, end)
		if !m.Read {
			return false, fmt.Errorf("%v cannot be read (mprotect)", m)
		}
		readOnly = readOnly || !m.Write
		if !m.Shared && (private == nil || !m.Write) {
			private = &maps[i]
		}
	}
	if at < end {
		return false, fmt.Errorf("nothing is mapped at %#x, %d bytes from its start", at, at-start)
	}
	if readOnly && private != nil {
		return false, fmt.Errorf("%v is mapped privately, and not all of the range can be written: the driver hangs on that (map it shared, or writable)", *private)
	}
	return readOnly, nil
}

// writesThrough returns a mapping that is shared, writable and of a file on a disk, if there
// is one.
func writesThrough(maps []linux.Mapping) (linux.Mapping, bool) {
	for _, m := range maps {
		if m.Shared && m.Write && m.File && !inMemory(m) {
			return m, true
		}
	}
	return linux.Mapping{}, false
}
