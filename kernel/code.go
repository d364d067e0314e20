package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/ptx"
)

// fatbinMagic begins a fat binary: 0xBA55ED50.
const fatbinMagic = "\x50\xed\x55\xba"

// checkCode returns an error for code that is not PTX, a cubin or a fat binary, or not
// whole: CUDA trusts the lengths in it, and reads it only when a kernel is looked up. For
// PTX it returns the kernels and their parameters.
func checkCode(code []byte) (kernels map[string]ptx.Entry, err error) {
	text := bytes.TrimRight(code, "\x00") // PTX may have the zero byte that ends it
	parsed, isPTX := ptx.Parse(text)
	switch zero := bytes.IndexByte(text, 0); {
	case len(code) == 0:
		err = fmt.Errorf("the code is empty")
	case bytes.HasPrefix(code, []byte(elf.ELFMAG)):
		err = checkCubin(code)
	case bytes.HasPrefix(code, []byte(fatbinMagic)):
		err = checkFatbin(code)
	case !isPTX:
		err = fmt.Errorf("%d bytes that begin with %.16q are neither PTX, nor a cubin, nor a fat binary", len(code), code)
	case zero >= 0:
		err = fmt.Errorf("the PTX has a zero byte at offset %d of %d, where CUDA takes it to end", zero, len(code))
	default:
		return parsed.Kernels, nil
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", err, cudart.ErrInvalidKernelImage)
	}
	return nil, err
}

// within returns an error unless the code has n bytes from offset off on.
func within(code []byte, what string, off, n uint64) error {
	if size := uint64(len(code)); off > size || n > size-off {
		return fmt.Errorf("%s has %d bytes or more at offset %d, and there are %d: it is damaged, or a part is missing", what, n, off, size)
	}
	return nil
}

// decode reads n values of an array at offset off.
func decode[T any](code []byte, what string, off, n uint64) ([]T, error) {
	list := make([]T, min(n, math.MaxUint16))
	if err := within(code, what, off, uint64(binary.Size(list))); err != nil {
		return nil, err
	}
	_, err := binary.Decode(code[off:], binary.LittleEndian, list)
	return list, err
}

// checkCubin checks the headers of an ELF file and the bounds of its sections and segments.
// (elf.NewFile refuses cubins, which have versions of their own.)
func checkCubin(code []byte) error {
	headers, err := decode[elf.Header64](code, "the cubin's header", 0, 1)
	if err != nil {
		return err
	}
	h := headers[0]
	switch {
	case elf.Class(h.Ident[elf.EI_CLASS]) != elf.ELFCLASS64 || elf.Machine(h.Machine) != elf.EM_CUDA:
		return fmt.Errorf("an ELF file of %v for %v is not a cubin", elf.Class(h.Ident[elf.EI_CLASS]), elf.Machine(h.Machine))
	case int(h.Shentsize) != binary.Size(elf.Section64{}) || h.Phnum > 0 && int(h.Phentsize) != binary.Size(elf.Prog64{}):
		return fmt.Errorf("the cubin's section headers have %d bytes and its program headers %d: it is damaged", h.Shentsize, h.Phentsize)
	}
	sections, err := decode[elf.Section64](code, "the cubin's table of sections", h.Shoff, uint64(h.Shnum))
	for i := 0; i < len(sections) && err == nil; i++ {
		if s := sections[i]; elf.SectionType(s.Type) != elf.SHT_NOBITS {
			err = within(code, fmt.Sprintf("the cubin's section %d", i), s.Off, s.Size)
		}
	}
	if err != nil {
		return err
	}
	segments, err := decode[elf.Prog64](code, "the cubin's table of segments", h.Phoff, uint64(h.Phnum))
	for i := 0; i < len(segments) && err == nil; i++ {
		err = within(code, fmt.Sprintf("the cubin's segment %d", i), segments[i].Off, segments[i].Filesz)
	}
	return err
}

// checkFatbin checks the lengths in a fat binary, as fatbinary of CUDA 11 to 13 writes it: a
// header, and entries of a header and PTX or a cubin.
func checkFatbin(code []byte) error {
	const fixed = 16 // bytes of a header that have its size and the size after it
	if err := within(code, "the fat binary's header", 0, fixed); err != nil {
		return err
	}
	at, size := uint64(binary.LittleEndian.Uint16(code[6:])), binary.LittleEndian.Uint64(code[8:])
	if at < fixed || size == 0 {
		return fmt.Errorf("the fat binary's header has %d bytes and its entries %d: it is damaged", at, size)
	}
	if err := within(code, "the fat binary", at, size); err != nil {
		return err
	}
	for code = code[:at+size]; at < uint64(len(code)); {
		if err := within(code, "an entry of the fat binary", at, fixed); err != nil {
			return err
		}
		header, size := uint64(binary.LittleEndian.Uint32(code[at+4:])), binary.LittleEndian.Uint64(code[at+8:])
		at += max(header, fixed)
		if err := within(code, "code in the fat binary", at, size); err != nil {
			return err
		}
		at += size
	}
	return nil
}
