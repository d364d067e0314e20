package hostmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// openMaps opens the mappings of this process. Close them.
func openMaps() (*linux.Maps, error) {
	maps, err := linux.OpenMaps(os.DirFS("/"))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	return maps, err
}

// access returns how [start, end) can be registered: for reading only or for
// both, or why it cannot. maps are the mappings that overlap it.
//
// The rules are what the driver does (R580, CUDA 13.0). Holes and memory that
// cannot be read are invalid to it. Memory that cannot be written has to be
// registered read-only, and that works where the mapping is shared. Of a
// private one the driver would want pages of its own to write to: with a
// file's it was seen to hang for good, so that none is let through, nor any
// range of which one is a part.
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
		return false, fmt.Errorf("%v is mapped privately, and not all of the range can be written: the driver hangs on that; map it shared, or writable", *private)
	}
	return readOnly, nil
}

// writesThrough returns one of the mappings that is shared, writable and a
// file's, if there is one. Memory that only looks like a file does not count.
func writesThrough(maps []linux.Mapping) (linux.Mapping, bool) {
	for _, m := range maps {
		onDisk := m.File && !strings.HasPrefix(m.Name, "/memfd:") && !strings.HasPrefix(m.Name, "/dev/")
		if m.Shared && m.Write && onDisk {
			return m, true
		}
	}
	return linux.Mapping{}, false
}
