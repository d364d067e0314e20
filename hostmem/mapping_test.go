package hostmem

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseMapping(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		line string
		want mapping
	}{
		{
			"558a0cef2000-558a0cef4000 r--p 00000000 fe:00 247026                     /usr/bin/cat",
			mapping{start: 0x558a0cef2000, end: 0x558a0cef4000, read: true, file: true, name: "/usr/bin/cat"},
		},
		{
			"7fdecfae7000-7fdecfb09000 rw-p 00000000 00:00 0 ",
			mapping{start: 0x7fdecfae7000, end: 0x7fdecfb09000, read: true, write: true},
		},
		{
			"7f9deaa00000-7f9dfe590000 ---p 00000000 00:00 0",
			mapping{start: 0x7f9deaa00000, end: 0x7f9dfe590000},
		},
		{
			"7f0000000000-7f0000001000 rw-s 00001000 00:01 2058                       /memfd:a b (deleted)",
			mapping{start: 0x7f0000000000, end: 0x7f0000001000, read: true, write: true, shared: true, file: true, name: "/memfd:a b (deleted)"},
		},
		{
			"c000000000-c000400000 rw-p 00000000 00:00 0                              [anon: Go: heap]",
			mapping{start: 0xc000000000, end: 0xc000400000, read: true, write: true, name: "[anon: Go: heap]"},
		},
		{
			"ffff9d028000-ffff9d02a000 r-xp 00000000 00:00 0 [vdso]", // an emulator's spacing
			mapping{start: 0xffff9d028000, end: 0xffff9d02a000, read: true, name: "[vdso]"},
		},
	} {
		t.Run(tc.line, func(t *testing.T) {
			t.Parallel()
			got, err := parseMapping(tc.line)
			require.NoError(t, err)
			assert.Equal(t, tc.want, got)
		})
	}
}

func TestParseMappingRefusesOtherLines(t *testing.T) {
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
		"1000-fffffffffffffffff rw-p 0 00:00 0",
	} {
		_, err := parseMapping(line)
		require.ErrorIs(t, err, errMapsLine, "%q", line)
	}
	_, err := parseMappings(strings.NewReader("1000-2000 rw-p 0 00:00 0\nwhat\n"))
	require.ErrorIs(t, err, errMapsLine)
}

func FuzzParseMappings(f *testing.F) {
	f.Add("558a0cef2000-558a0cef4000 r--p 00000000 fe:00 247026                     /usr/bin/cat\n7fdecfae7000-7fdecfb09000 rw-p 00000000 00:00 0 \n")
	f.Add("7f0000000000-7f0000001000 rw-s 00001000 00:01 2058 /memfd:a b (deleted)\n")
	f.Add("0-1 ---p 0 0 0")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parseMappings(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, m := range all {
			require.Less(t, m.start, m.end)
			require.NotEmpty(t, m.String())
			in := within([]mapping{m}, m.start, m.end)
			require.Equal(t, []mapping{m}, in)
			require.Empty(t, within([]mapping{m}, m.end, m.end+1))
			if _, err := access([]mapping{m}, m.start, m.end); err == nil {
				require.True(t, m.read)
			}
			low, high := rowAround([]mapping{m}, m.start)
			require.Equal(t, []uintptr{m.start, m.end}, []uintptr{low, high})
		}
	})
}

func TestAccess(t *testing.T) {
	t.Parallel()
	var (
		anonymous   = mapping{start: 0x1000, end: 0x3000, read: true, write: true}
		sharedNext  = mapping{start: 0x3000, end: 0x5000, read: true, write: true, shared: true, file: true, name: "/memfd:x"}
		sharedFile  = mapping{start: 0x5000, end: 0x7000, read: true, shared: true, file: true, name: "/data/weights"}
		privateFile = mapping{start: 0x7000, end: 0x9000, read: true, file: true, name: "/data/weights"}
		none        = mapping{start: 0x9000, end: 0xb000, name: "[anon:guard]"}
		frozen      = mapping{start: 0xb000, end: 0xd000, read: true}
		cow         = mapping{start: 0xf000, end: 0x10000, read: true, write: true, file: true, name: "/data/cow"}
		blind       = mapping{start: 0x10000, end: 0x11000, write: true}
		last        = mapping{start: 0x12000, end: 0x13000, read: true, write: true}
		all         = []mapping{anonymous, sharedNext, sharedFile, privateFile, none, frozen, cow, blind, last}
	)
	for _, tc := range []struct {
		name       string
		start, end uintptr
		readOnly   bool
		err        string
	}{
		{name: "anonymous", start: 0x1001, end: 0x2fff},
		{name: "two mappings", start: 0x1001, end: 0x4fff},
		{name: "private file, writable", start: 0xf000, end: 0x10000},
		{name: "shared file, read-only", start: 0x5000, end: 0x7000, readOnly: true},
		{name: "partly read-only, all shared", start: 0x4000, end: 0x6000, readOnly: true},
		{name: "partly read-only, partly private", start: 0x2000, end: 0x6000, err: "anonymous memory at 0x1000-0x3000 is mapped privately"},
		{name: "private file, read-only", start: 0x7123, end: 0x8000, err: "/data/weights at 0x7000-0x9000 is mapped privately"},
		{name: "a byte of a private file, read-only", start: 0x6000, end: 0x7001, err: "mapped privately"},
		{name: "private anonymous, read-only", start: 0xb000, end: 0xc000, err: "mapped privately"},
		{name: "no access", start: 0x9000, end: 0xa000, err: "[anon:guard] at 0x9000-0xb000 cannot be read"},
		{name: "write only", start: 0x10000, end: 0x10001, err: "cannot be read"},
		{name: "a hole in between", start: 0xe000, end: 0xf001, err: "nothing is mapped at 0xe000"},
		{name: "a hole at the end", start: 0x12000, end: 0x13001, err: "nothing is mapped at 0x13000, 4096 bytes from its begin"},
		{name: "before everything", start: 0x10, end: 0x20, err: "nothing is mapped at 0x10, 0 bytes"},
		{name: "behind everything", start: 0x20000, end: 0x20001, err: "nothing is mapped at 0x20000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			readOnly, err := access(all, tc.start, tc.end)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, tc.readOnly, readOnly)
		})
	}
}
