package linux_test

import (
	"os"
	"path"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseMaps(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		line string
		want linux.Mapping
		text string
	}{
		{
			"558a0cef2000-558a0cef4000 r--p 00000000 fe:00 247026                     /usr/bin/cat",
			linux.Mapping{Start: 0x558a0cef2000, End: 0x558a0cef4000, Read: true, File: true, Name: "/usr/bin/cat"},
			"/usr/bin/cat at 0x558a0cef2000-0x558a0cef4000",
		},
		{
			"7fdecfae7000-7fdecfb09000 rw-p 00000000 00:00 0 ",
			linux.Mapping{Start: 0x7fdecfae7000, End: 0x7fdecfb09000, Read: true, Write: true},
			"anonymous memory at 0x7fdecfae7000-0x7fdecfb09000",
		},
		{
			"7f9deaa00000-7f9dfe590000 ---p 00000000 00:00 0",
			linux.Mapping{Start: 0x7f9deaa00000, End: 0x7f9dfe590000},
			"anonymous memory at 0x7f9deaa00000-0x7f9dfe590000",
		},
		{
			"7f0000000000-7f0000001000 rw-s 00001000 00:01 2058                       /memfd:a b (deleted)",
			linux.Mapping{Start: 0x7f0000000000, End: 0x7f0000001000, Read: true, Write: true, Shared: true, File: true, Name: "/memfd:a b (deleted)"},
			"/memfd:a b (deleted) at 0x7f0000000000-0x7f0000001000",
		},
		{
			"7f0000000000-7f0000001000 -w-s 00001000 00:01 2058 ",
			linux.Mapping{Start: 0x7f0000000000, End: 0x7f0000001000, Write: true, Shared: true, File: true},
			"a file at 0x7f0000000000-0x7f0000001000",
		},
		{
			"c000000000-c000400000 rw-p 00000000 00:00 0                              [anon: Go: heap]",
			linux.Mapping{Start: 0xc000000000, End: 0xc000400000, Read: true, Write: true, Name: "[anon: Go: heap]"},
			"[anon: Go: heap] at 0xc000000000-0xc000400000",
		},
		{
			"ffff9d028000-ffff9d02a000 r-xp 00000000 00:00 0 [vdso]", // an emulator's spacing
			linux.Mapping{Start: 0xffff9d028000, End: 0xffff9d02a000, Read: true, Name: "[vdso]"},
			"[vdso] at 0xffff9d028000-0xffff9d02a000",
		},
		{
			`1000-2000 r--p 00000000 fe:00 1                     /a\012b`,
			linux.Mapping{Start: 0x1000, End: 0x2000, Read: true, File: true, Name: "/a\nb"},
			"/a\nb at 0x1000-0x2000",
		},
		{
			"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]",
			linux.Mapping{Start: 0xffffffffff600000, End: 0xffffffffff601000, Name: "[vsyscall]"},
			"[vsyscall] at 0xffffffffff600000-0xffffffffff601000",
		},
	} {
		t.Run(tc.line, func(t *testing.T) {
			t.Parallel()
			got, err := linux.ParseMaps(tc.line + "\n")
			require.NoError(t, err)
			require.Len(t, got, 1)
			assert.Equal(t, tc.want, got[0])
			assert.Equal(t, tc.text, got[0].String())
		})
	}
}

func TestParseMapsRefusesOtherLines(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"",
		"Rss: 4 kB",
		"1000-2000",
		"1000-2000 rw-p",
		"1000-2000 rw-p 0 00:00",
		"1000-2000 rw-p 0 00:00 x",
		"1000-2000 rw- 0 00:00 0",
		"2000-1000 rw-p 0 00:00 0",
		"1000-1000 rw-p 0 00:00 0",
		"1000 rw-p 0 00:00 0",
		"x-2000 rw-p 0 00:00 0",
		"-2000 rw-p 0 00:00 0",
		"1000- rw-p 0 00:00 0",
		"1000-fffffffffffffffff rw-p 0 00:00 0",
	} {
		_, err := linux.ParseMaps("1000-2000 rw-p 0 00:00 0\n" + line + "\n")
		require.ErrorContains(t, err, "line 2: ", "%q", line)
	}
}

func TestMappedFiles(t *testing.T) {
	t.Parallel()
	maps, err := linux.ParseMaps(`55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 1311 /usr/bin/app
7f3c00000000-7f3c00021000 rw-p 00000000 00:00 0
7f3c10000000-7f3c10010000 rw-s 00000000 00:01 77                         /memfd:libcudart.so.12 (deleted)
7f3c20000000-7f3c20010000 rw-p 00000000 00:00 0                          [anon:x/libcudart.so.12]
7f3c30000000-7f3c30080000 r-xp 00000000 08:01 1400                       /opt/my libs/libcudart.so.12.4.127
7f3c30080000-7f3c30090000 r--p 00080000 08:01 1400                       /opt/my libs/libcudart.so.12.4.127
7f3c40000000-7f3c40080000 r-xp 00000000 08:01 1401                       /v/nvidia/cu13/lib/libcudart.so.13 (deleted)
7f3c50000000-7f3c50080000 r-xp 00000000 08:01 1402                       /v/nvidia/cu13/lib/libcudart.so.13
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
`)
	require.NoError(t, err)
	assert.Equal(t, []linux.MappedFile{
		{Path: "/usr/bin/app"},
		{Path: "/memfd:libcudart.so.12", Deleted: true},
		{Path: "/opt/my libs/libcudart.so.12.4.127"},
		{Path: "/v/nvidia/cu13/lib/libcudart.so.13", Deleted: true},
		{Path: "/v/nvidia/cu13/lib/libcudart.so.13"},
	}, linux.MappedFiles(maps))
	assert.Empty(t, linux.MappedFiles(nil))
}

func TestMappedFilesOfThisProcess(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("no /proc on " + runtime.GOOS)
	}
	maps, err := linux.ReadMaps(os.DirFS("/"))
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	assert.Contains(t, linux.MappedFiles(maps), linux.MappedFile{Path: self})
}

func FuzzParseMaps(f *testing.F) {
	f.Add("558a0cef2000-558a0cef4000 r--p 00000000 fe:00 247026                     /usr/bin/cat\n7fdecfae7000-7fdecfb09000 rw-p 00000000 00:00 0 \n")
	f.Add("7f0000000000-7f0000001000 rw-s 00001000 00:01 2058 /memfd:a b (deleted)\n")
	f.Add("0-1 ---p 0 0 0")
	f.Add(`1-2 rw-p 0 0 9 /\012`)
	f.Fuzz(func(t *testing.T, text string) {
		all, err := linux.ParseMaps(text)
		if err != nil {
			require.Nil(t, all)
			return
		}
		lines := 0
		for range strings.Lines(text) {
			lines++
		}
		require.Len(t, all, lines)
		for _, m := range all {
			require.Less(t, m.Start, m.End)
			require.NotEmpty(t, m.String())
		}
		seen := map[linux.MappedFile]bool{}
		for _, file := range linux.MappedFiles(all) {
			require.True(t, path.IsAbs(file.Path), "%q", file.Path)
			require.False(t, seen[file], "%q twice", file.Path)
			seen[file] = true
		}
	})
}
