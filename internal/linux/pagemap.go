package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// pagePresent is the bit of an entry of pagemap for a page that is in memory, and mapped.
const pagePresent = 1 << 63

// ReadPageMap returns how many of the n bytes at addr this process has mapped, in whole
// pages, by /proc/self/pagemap. It needs no permission. Pages of managed memory that lie
// on a GPU alone are not mapped, nor are those that were never touched.
func ReadPageMap(fsys fs.FS, addr uintptr, n int) (mapped int, err error) {
	const name = "proc/self/pagemap"
	f, err := fsys.Open(name)
	if err != nil {
		return 0, inFile(name, err)
	}
	defer f.Close()
	at, ok := f.(io.ReaderAt)
	if !ok {
		return 0, inFile(name, fmt.Errorf("cannot be read at an offset: %w", errors.ErrUnsupported))
	}
	page := uintptr(os.Getpagesize())
	entries := make([]byte, 64<<10)
	for first, end := addr/page, (addr+uintptr(n)+page-1)/page; first < end; {
		part := entries[:min(uintptr(len(entries)), (end-first)*8)]
		read, err := at.ReadAt(part, int64(first)*8)
		if read < len(part) {
			return 0, inFile(name, err)
		}
		for i := 0; i < len(part); i += 8 {
			if binary.NativeEndian.Uint64(part[i:])&pagePresent != 0 {
				mapped += int(page)
			}
		}
		first += uintptr(len(part) / 8)
	}
	return mapped, nil
}
