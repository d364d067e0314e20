package hostmem

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// mapsOf are the mappings of a process whose /proc/self/maps reads as text says.
func mapsOf(tb testing.TB, text string) *linux.Maps {
	tb.Helper()
	maps, err := linux.OpenMaps(fstest.MapFS{"proc/thread-self/maps": {Data: []byte(text)}})
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, maps.Close()) })
	return maps
}

func FuzzAccess(f *testing.F) {
	f.Add("558a0cef2000-558a0cef4000 r--p 00000000 fe:00 247026                     /usr/bin/cat\n7fdecfae7000-7fdecfb09000 rw-p 00000000 00:00 0 \n")
	f.Add("7f0000000000-7f0000001000 rw-s 00001000 00:01 2058 /memfd:a b (deleted)\n")
	f.Add("0-1 ---p 0 0 0")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := linux.ParseMaps(text)
		if err != nil {
			return
		}
		for _, m := range all {
			one := []linux.Mapping{m}
			readOnly, err := access(one, m.Start, m.End)
			if err == nil {
				require.True(t, m.Read)
				require.Equal(t, !m.Write, readOnly)
			}
			_, err = access(one, m.Start, m.End+1)
			require.Error(t, err)
			_, through := writesThrough(one)
			require.False(t, through && (!m.Shared || !m.Write || !m.File))
		}
	})
}

func TestAccess(t *testing.T) {
	t.Parallel()
	const text = `1000-3000 rw-p 00000000 00:00 0
3000-5000 rw-s 00000000 00:01 7                      /memfd:x
5000-7000 r--s 00000000 fe:00 8                      /data/weights
7000-9000 r--p 00000000 fe:00 8                      /data/weights
9000-b000 ---p 00000000 00:00 0                      [anon:guard]
b000-d000 r--p 00000000 00:00 0
f000-10000 rw-p 00000000 fe:00 9                     /data/cow
10000-11000 -w-p 00000000 00:00 0
12000-13000 rw-p 00000000 00:00 0
`
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
		{name: "a hole at the end", start: 0x12000, end: 0x13001, err: "nothing is mapped at 0x13000, 4096 bytes from its start"},
		{name: "before everything", start: 0x10, end: 0x20, err: "nothing is mapped at 0x10, 0 bytes"},
		{name: "above everything", start: 0x20000, end: 0x20001, err: "nothing is mapped at 0x20000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			covered, err := mapsOf(t, text).Within(tc.start, tc.end)
			require.NoError(t, err)
			readOnly, err := access(covered, tc.start, tc.end)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, tc.readOnly, readOnly)
		})
	}
}

func TestWritesThrough(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]bool{
		"1000-2000 rw-s 0 fe:00 7 /data/weights":           true,
		"1000-2000 rw-s 0 fe:00 7 /data/weights (deleted)": true,
		"1000-2000 r--s 0 fe:00 7 /data/weights":           false,
		"1000-2000 rw-p 0 fe:00 7 /data/weights":           false,
		"1000-2000 rw-s 0 00:01 7 /memfd:x (deleted)":      false,
		"1000-2000 rw-s 0 00:01 7 /dev/zero (deleted)":     false,
		"1000-2000 rw-s 0 00:1a 7 /dev/shm/x":              false,
		"1000-2000 rw-p 0 00:00 0":                         false,
	} {
		covered, err := linux.ParseMaps("0-1000 r--p 0 00:00 0\n" + line + "\n")
		require.NoError(t, err, line)
		m, ok := writesThrough(covered)
		assert.Equal(t, want, ok, line)
		if ok {
			assert.Equal(t, covered[1], m)
		}
	}
}
