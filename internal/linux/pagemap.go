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
	page := uintptr(os.Getpagesize())
	err = readPageMap(fsys, func(read func(first uintptr, entries []byte) (present int, err error)) error {
		entries := make([]byte, 64<<10)
		for first, end := addr/page, (addr+uintptr(n)+page-1)/page; first < end; {
			part := entries[:min(uintptr(len(entries)), (end-first)*8)]
			present, err := read(first, part)
			if err != nil {
				return err
			}
			mapped += present * int(page)
			first += uintptr(len(part) / 8)
		}
		return nil
	})
	return mapped, err
}

// PagesMapped reports whether this process has all pages mapped that have these addresses.
func PagesMapped(fsys fs.FS, addrs []uintptr) (all bool, err error) {
	page := uintptr(os.Getpagesize())
	all = true
	err = readPageMap(fsys, func(read func(first uintptr, entries []byte) (present int, err error)) error {
		entry := make([]byte, 8)
		for _, addr := range addrs {
			present, err := read(addr/page, entry)
			if err != nil {
				return err
			}
			all = all && present == 1
		}
		return nil
	})
	return all && err == nil, err
}

// readPageMap calls f with a function that reads the entries from that of a page on, and
// returns how many of the pages are present.
func readPageMap(fsys fs.FS, f func(read func(first uintptr, entries []byte) (present int, err error)) error) error {
	const name = "proc/self/pagemap"
	file, err := fsys.Open(name)
	if err != nil {
		return inFile(name, err)
	}
	defer file.Close()
	at, ok := file.(io.ReaderAt)
	if !ok {
		return inFile(name, fmt.Errorf("cannot be read at an offset: %w", errors.ErrUnsupported))
	}
	err = f(func(first uintptr, entries []byte) (present int, err error) {
		if n, err := at.ReadAt(entries, int64(first)*8); n < len(entries) {
			return 0, err
		}
		for i := 0; i < len(entries); i += 8 {
			if binary.NativeEndian.Uint64(entries[i:])&pagePresent != 0 {
				present++
			}
		}
		return present, nil
	})
	return inFile(name, err)
}
