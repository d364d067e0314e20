package findlib

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"strings"
)

// errTruncated is the one defect that the dynamic loader does not report: it
// maps the segments that the file's headers name, and reading a page past the
// end of the file is a SIGBUS, which ends the process.
var errTruncated = errors.New("truncated")

// Check reports why the file at p cannot be loaded as a shared library by a
// process of the host's architecture: it is cut off, empty, for another
// machine, not an ELF file, or cannot be read. The error does not contain p.
//
// A name without a slash is for the dynamic loader to find. It is refused if
// the file that the loader would take is cut off, as far as the loader's
// directories are known.
func (h Host) Check(p string) error {
	if strings.Contains(p, "/") {
		return h.checkFile(p)
	}
	for _, dir := range h.loaderDirs() {
		file := path.Join(dir, p)
		err := h.checkFile(file)
		if err == nil {
			return nil
		}
		if errors.Is(err, errTruncated) {
			return fmt.Errorf("%s: %w", file, err)
		}
		// Absent or unsuitable: the loader goes on to the next directory, or
		// reports it.
	}
	return nil
}

func (h Host) checkFile(p string) error {
	// Before opening it: opening a named pipe would wait for its writer.
	info, err := os.Stat(h.root + p)
	switch {
	case err != nil:
		return cause(err)
	case info.IsDir():
		return errors.New("a directory")
	case !info.Mode().IsRegular():
		return errors.New("not a regular file")
	}
	f, err := os.Open(h.root + p)
	if err != nil {
		return cause(err)
	}
	defer f.Close()
	return checkELF(f, uint64(info.Size()), h.arch)
}

// machines are the values of e_machine for each GOARCH.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// checkELF checks what the dynamic loader uses of a file with size bytes: the
// ELF header and the segments. Unlike elf.NewFile it ignores the section
// headers, which the loader never reads and which are the last part of a file.
func checkELF(r io.ReaderAt, size uint64, arch string) error {
	if size == 0 {
		return errors.New("an empty file")
	}
	h, err := readHeader(r, size)
	if err != nil {
		return err
	}
	if m := elf.Machine(h.Machine); m != machines[arch] {
		return fmt.Errorf("wrong architecture: built for %s, this process is %s", strings.TrimPrefix(m.String(), "EM_"), arch)
	}
	if t := elf.Type(h.Type); t != elf.ET_DYN {
		name := map[elf.Type]string{elf.ET_EXEC: "an executable", elf.ET_REL: "an object file"}[t]
		return fmt.Errorf("not a shared library but %s", cmp.Or(name, "ELF type "+t.String()))
	}
	return checkSegments(r, size, h)
}

// readHeader reads the header of an ELF file of 64 bits.
func readHeader(r io.ReaderAt, size uint64) (h elf.Header64, err error) {
	start := make([]byte, binary.Size(h))
	n, err := r.ReadAt(start, 0)
	if err != nil && err != io.EOF {
		return h, cause(err)
	}
	start = start[:n]
	if !bytes.HasPrefix(start, []byte(elf.ELFMAG)) {
		hint := ""
		if start[0] >= ' ' && start[0] <= '~' {
			hint = " (a linker script?)"
		}
		return h, fmt.Errorf("not an ELF file%s: it starts with %.16q", hint, start)
	}
	if n > elf.EI_DATA {
		if c := elf.Class(start[elf.EI_CLASS]); c != elf.ELFCLASS64 {
			return h, fmt.Errorf("wrong architecture: %s, this process is 64-bit", cmp.Or(map[elf.Class]string{elf.ELFCLASS32: "32-bit"}[c], "ELF class "+c.String()))
		}
		if d := elf.Data(start[elf.EI_DATA]); d != elf.ELFDATA2LSB {
			return h, fmt.Errorf("wrong architecture: byte order %v, this process is little-endian", d)
		}
	}
	if err := inside("the ELF header", 0, uint64(binary.Size(h)), size); err != nil {
		return h, err
	}
	_, err = binary.Decode(start, binary.LittleEndian, &h)
	return h, err
}

// checkSegments checks that the segments which are loaded are within the file.
func checkSegments(r io.ReaderAt, size uint64, h elf.Header64) error {
	var p elf.Prog64
	if int(h.Phentsize) != binary.Size(p) {
		return fmt.Errorf("damaged: program headers of %d bytes, not %d", h.Phentsize, binary.Size(p))
	}
	length := int(h.Phnum) * binary.Size(p)
	if err := inside("the table of segments", h.Phoff, uint64(length), size); err != nil {
		return err
	}
	table := make([]byte, length)
	if n, err := r.ReadAt(table, int64(h.Phoff)); n < length {
		return cause(err)
	}
	for ; len(table) > 0; table = table[binary.Size(p):] {
		if _, err := binary.Decode(table, binary.LittleEndian, &p); err != nil {
			return err
		}
		if elf.ProgType(p.Type) != elf.PT_LOAD {
			continue // a part of a loaded segment, or not loaded
		}
		if err := inside("a segment", p.Off, p.Filesz, size); err != nil {
			return err
		}
	}
	return nil
}

// inside reports whether n bytes from offset off on are within a file.
func inside(what string, off, n, size uint64) error {
	end := off + n
	if end < off {
		end = math.MaxUint64
	}
	if end > size {
		return fmt.Errorf("%w: %s ends at byte %d, the file has %d (copy or install it again)", errTruncated, what, end, size)
	}
	return nil
}
