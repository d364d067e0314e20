package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// A PageKind is a kind of pages in /proc/self/pagemap.
type PageKind struct{ mask, want uint64 }

// The bits of an entry.
const (
	pagePresent   = 1 << 63 // in memory, and mapped
	pageShared    = 1 << 61 // a file's, or shared memory
	pageExclusive = 1 << 56 // only this process has it mapped; the zero page is not
)

var (
	// PagesMapped are in memory and mapped by this process. Pages of managed memory that
	// reside on a GPU alone are not, nor are those that were never touched.
	PagesMapped = PageKind{pagePresent, pagePresent}
	// PagesPrivate are those of PagesMapped that are anonymous and this process's alone.
	PagesPrivate = PageKind{pagePresent | pageShared | pageExclusive, pagePresent | pageExclusive}
)

// CountPages counts the pages of a kind that the n bytes at each of the addresses touch
// (/proc/self/pagemap). It needs no permission.
func CountPages(fsys fs.FS, kind PageKind, n int, addrs ...uintptr) (pages int, err error) {
	const name = "proc/self/pagemap"
	file, err := fsys.Open(name)
	if err != nil {
		return 0, inFile(name, err)
	}
	defer file.Close()
	from, ok := file.(io.ReaderAt)
	if !ok {
		return 0, inFile(name, fmt.Errorf("cannot be read at an offset: %w", errors.ErrUnsupported))
	}
	page := uintptr(os.Getpagesize())
	buf := make([]byte, min(64<<10, (uintptr(n)/page+2)*8))
	for _, addr := range addrs {
		for first, end := addr/page, (addr+uintptr(n)+page-1)/page; first < end; {
			entries := buf[:min(uintptr(len(buf)), (end-first)*8)]
			if got, err := from.ReadAt(entries, int64(first)*8); got < len(entries) {
				return 0, inFile(name, err)
			}
			first += uintptr(len(entries) / 8)
			for ; len(entries) > 0; entries = entries[8:] {
				if binary.NativeEndian.Uint64(entries)&kind.mask == kind.want {
					pages++
				}
			}
		}
	}
	return pages, nil
}
