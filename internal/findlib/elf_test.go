//go:build linux

package findlib

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sharedObject returns the bytes of a 64-bit shared object whose segments end
// at its last byte. change may spoil the header and the segments before they
// are written.
func sharedObject(t testing.TB, change func(h *elf.Header64, segments []elf.Prog64)) []byte {
	t.Helper()
	const size = 8192
	h := elf.Header64{
		Ident:     [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:      uint16(elf.ET_DYN),
		Machine:   uint16(elf.EM_X86_64),
		Version:   uint32(elf.EV_CURRENT),
		Phoff:     64,
		Ehsize:    64,
		Phentsize: 56,
		Phnum:     3,
	}
	segments := []elf.Prog64{
		{Type: uint32(elf.PT_LOAD), Off: 0, Filesz: 4096, Memsz: 4096},
		{Type: uint32(elf.PT_LOAD), Off: 4096, Filesz: size - 4096, Memsz: 1 << 20}, // the rest is .bss
		{Type: uint32(elf.PT_NOTE), Off: 64, Filesz: 32},
	}
	if change != nil {
		change(&h, segments)
	}
	var b bytes.Buffer
	require.NoError(t, binary.Write(&b, binary.LittleEndian, h))
	require.NoError(t, binary.Write(&b, binary.LittleEndian, segments))
	return append(b.Bytes(), make([]byte, size-b.Len())...)
}

func check(file []byte) error {
	return checkELF(bytes.NewReader(file), uint64(len(file)), "amd64")
}

func TestCheckELF(t *testing.T) {
	t.Parallel()
	type change = func(h *elf.Header64, segments []elf.Prog64)
	for name, tt := range map[string]struct {
		change change
		want   string // "" for a file that is fine
	}{
		"whole": {},
		"32-bit": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS32) },
			"wrong architecture: 32-bit, this process is 64-bit",
		},
		"no class": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Ident[elf.EI_CLASS] = 0 },
			"wrong architecture: ELF class ELFCLASSNONE, this process is 64-bit",
		},
		"big-endian": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Ident[elf.EI_DATA] = byte(elf.ELFDATA2MSB) },
			"wrong architecture: byte order ELFDATA2MSB, this process is little-endian",
		},
		"another machine": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Machine = uint16(elf.EM_AARCH64) },
			"wrong architecture: built for AARCH64, this process is amd64",
		},
		"an executable": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Type = uint16(elf.ET_EXEC) },
			"not a shared library but an executable",
		},
		"an object file": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Type = uint16(elf.ET_REL) },
			"not a shared library but an object file",
		},
		"a core dump": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Type = uint16(elf.ET_CORE) },
			"not a shared library but ELF type ET_CORE",
		},
		"program headers of another size": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Phentsize = 32 },
			"damaged: program headers of 32 bytes, not 56",
		},
		"program headers past the end": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Phoff = 8192 - 3*56 + 1 },
			"truncated: the table of segments ends at byte 8193, the file has 8192 (copy or install it again)",
		},
		"program headers past all ends": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Phoff = math.MaxUint64 - 1 },
			"truncated: the table of segments ends at byte 18446744073709551615, the file has 8192 (copy or install it again)",
		},
		"a segment past the end": {
			func(_ *elf.Header64, s []elf.Prog64) { s[1].Filesz++ },
			"truncated: a segment ends at byte 8193, the file has 8192 (copy or install it again)",
		},
		"a segment whose end overflows": {
			func(_ *elf.Header64, s []elf.Prog64) { s[0].Off, s[0].Filesz = math.MaxUint64, 4096 },
			"truncated: a segment ends at byte 18446744073709551615, the file has 8192 (copy or install it again)",
		},
		"a segment past the end that is not loaded": {
			func(_ *elf.Header64, s []elf.Prog64) { s[2].Filesz = 1 << 40 }, "",
		},
		"section headers past the end": {
			func(h *elf.Header64, _ []elf.Prog64) { h.Shoff, h.Shnum, h.Shentsize = 1<<40, 30, 64 }, "",
		},
	} {
		err := check(sharedObject(t, tt.change))
		if tt.want == "" {
			assert.NoError(t, err, name)
		} else {
			assert.EqualError(t, err, tt.want, name)
		}
	}
}

func TestCheckELFOfEveryLength(t *testing.T) {
	t.Parallel()
	whole := sharedObject(t, nil)
	for n := range len(whole) {
		err := check(whole[:n])
		switch {
		case n == 0:
			require.EqualError(t, err, "an empty file")
		case n < 4:
			require.ErrorContains(t, err, "not an ELF file", "%d bytes", n)
		default:
			require.ErrorIs(t, err, errTruncated, "%d bytes", n)
		}
	}
	require.NoError(t, check(append(whole, "signature"...)), "more than the segments")
}

func TestCheckNamesOtherKindsOfFiles(t *testing.T) {
	t.Parallel()
	assert.EqualError(t, check([]byte("/* GNU ld script */\nINPUT(libcudart.so.12)\n")), `not an ELF file (a linker script?): it starts with "/* GNU ld script"`)
	assert.EqualError(t, check([]byte("\x1f\x8b\x08\x00")), `not an ELF file: it starts with "\x1f\x8b\b\x00"`)
}

// A file that disappears, shrinks or cannot be read while it is checked.
func TestCheckELFReportsFailedReads(t *testing.T) {
	t.Parallel()
	whole := sharedObject(t, nil)
	assert.EqualError(t, checkELF(bytes.NewReader(whole[:100]), 8192, "amd64"), "EOF")
	assert.Equal(t, fs.ErrPermission, checkELF(failingReader{&fs.PathError{Op: "read", Path: "/x", Err: fs.ErrPermission}}, 8192, "amd64"))
}

type failingReader struct{ err error }

func (r failingReader) ReadAt([]byte, int64) (int, error) { return 0, r.err }

func FuzzCheckELF(f *testing.F) {
	f.Add(sharedObject(f, nil))
	f.Add(sharedObject(f, nil)[:200])
	f.Add(sharedObject(f, func(h *elf.Header64, _ []elf.Prog64) { h.Phnum = math.MaxUint16 }))
	f.Add(sharedObject(f, func(_ *elf.Header64, s []elf.Prog64) { s[0].Off = math.MaxUint64 }))
	f.Add([]byte("\x7fELF"))
	f.Add([]byte("/* GNU ld script */"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, file []byte) {
		if check(file) != nil {
			return
		}
		// Go's own reader has nothing to object to in what it read of it.
		whole, err := elf.NewFile(bytes.NewReader(file))
		if err != nil {
			return // of the section headers
		}
		assert.Equal(t, elf.ET_DYN, whole.Type)
		assert.Equal(t, elf.EM_X86_64, whole.Machine)
		for _, p := range whole.Progs {
			if p.Type == elf.PT_LOAD {
				assert.LessOrEqual(t, p.Off, uint64(len(file)))
				assert.LessOrEqual(t, p.Filesz, uint64(len(file))-p.Off)
			}
		}
	})
}

// The loader takes the first file of that name that suits it.
func TestCheckOfABareName(t *testing.T) {
	t.Parallel()
	whole := sharedObject(t, nil)
	other := sharedObject(t, func(h *elf.Header64, _ []elf.Prog64) { h.Machine = uint16(elf.EM_AARCH64) })
	root := makeTree(t, "/etc/ld.so.conf = /configured\n", "/usr/lib64/", "/empty/", "/usr/lib/libonce.so.1 = text")
	for file, contents := range map[string][]byte{
		"/first/libcut.so.1": other, "/second/libcut.so.1": whole[:5000], "/usr/lib64/libcut.so.1": whole,
		"/first/libwhole.so.1": whole, "/second/libwhole.so.1": whole[:5000],
		"/configured/libconfigured.so.1": whole[:5000],
		"/usr/lib64/libsystem.so.1":      whole[:5000],
		"/elsewhere/libelsewhere.so.1":   whole[:5000],
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(root+file), 0o755))
		require.NoError(t, os.WriteFile(root+file, contents, 0o644))
	}
	h := fakeHost(root, map[string]string{"LD_LIBRARY_PATH": "/empty:/first:/second"}, "")

	for name, file := range map[string]string{
		"libcut.so.1":        "/second/libcut.so.1",
		"libconfigured.so.1": "/configured/libconfigured.so.1",
		"libsystem.so.1":     "/usr/lib64/libsystem.so.1",
	} {
		assert.EqualError(t, h.Check(name), file+": truncated: a segment ends at byte 8192, the file has 5000 (copy or install it again)")
	}
	for _, name := range []string{"libwhole.so.1", "libelsewhere.so.1", "libabsent.so.1", "libonce.so.1"} {
		assert.NoError(t, h.Check(name), name)
	}
}

func TestCheckOfAPath(t *testing.T) {
	t.Parallel()
	root := makeTree(t, "/empty.so", "/directory.so/", "/link.so -> whole.so", "/unreadable.so = x")
	require.NoError(t, os.WriteFile(root+"/whole.so", sharedObject(t, nil), 0o644))
	require.NoError(t, os.Chmod(root+"/unreadable.so", 0))
	h := fakeHost(root, nil, "")
	assert.NoError(t, h.Check("/whole.so"))
	assert.NoError(t, h.Check("/link.so"))
	assert.EqualError(t, h.Check("/empty.so"), "an empty file")
	assert.EqualError(t, h.Check("/directory.so"), "a directory")
	assert.ErrorIs(t, h.Check("/absent.so"), fs.ErrNotExist)
	assert.ErrorIs(t, h.Check("/whole.so/absent.so"), syscall.ENOTDIR)
	if os.Geteuid() != 0 { // root reads it all the same
		assert.ErrorIs(t, h.Check("/unreadable.so"), fs.ErrPermission)
	}
	assert.EqualError(t, Host{}.Check("/dev/null"), "not a regular file")
}

// Check has nothing against the libraries that this machine runs on, and
// notices each of them that is cut off within its last segment.
func TestCheckOfThisMachinesLibraries(t *testing.T) {
	t.Parallel()
	h := This()
	checked := 0
	for _, dir := range h.systemDirs() {
		files, err := filepath.Glob(dir + "/lib*.so.*")
		require.NoError(t, err)
		for _, file := range files {
			library, err := elf.Open(file)
			if err != nil {
				continue // a link to nowhere, a text
			}
			end := uint64(0)
			for _, p := range library.Progs {
				if p.Type == elf.PT_LOAD {
					end = max(end, p.Off+p.Filesz)
				}
			}
			ours := library.Type == elf.ET_DYN && library.Machine == machines[h.arch] && library.Class == elf.ELFCLASS64
			require.NoError(t, library.Close())
			err = h.Check(file)
			if !ours {
				require.Error(t, err, file)
				continue
			}
			require.NoError(t, err, file)
			f, err := os.Open(file)
			require.NoError(t, err)
			require.NoError(t, checkELF(f, end, h.arch), file)
			require.ErrorIs(t, checkELF(f, end-1, h.arch), errTruncated, file)
			require.NoError(t, f.Close())
			checked++
		}
	}
	if checked == 0 {
		t.Skipf("no shared library of %s in %s: package cudart checks the ones that its tests load", h.arch, strings.Join(h.systemDirs(), " "))
	}
}
