package linux_test

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

const mapsFile = "proc/thread-self/maps"

// openText opens maps that consist of text.
func openText(tb testing.TB, text string) *linux.Maps {
	tb.Helper()
	maps, err := linux.OpenMaps(host(map[string]string{mapsFile: text}))
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, maps.Close()) })
	return maps
}

const threeMappings = `1000-3000 rw-p 00000000 00:00 0
3000-4000 r--s 00000000 fe:00 7                     /data/weights
8000-9000 ---p 00000000 00:00 0                     [anon:guard]
`

func TestFind(t *testing.T) {
	t.Parallel()
	all, err := linux.ParseMaps(threeMappings)
	require.NoError(t, err)
	lookups := []struct {
		addr uintptr
		want int // index in all, or -1
	}{{0, 0}, {0xfff, 0}, {0x1000, 0}, {0x2fff, 0}, {0x3000, 1}, {0x3fff, 1}, {0x4000, 2}, {0x8000, 2}, {0x8fff, 2}, {0x9000, -1}, {^uintptr(0), -1}}
	check := func(t *testing.T, maps *linux.Maps, addr uintptr, want int) {
		t.Helper()
		got, ok, err := maps.Find(addr)
		require.NoError(t, err)
		require.Equal(t, want >= 0, ok, "%#x", addr)
		if ok {
			assert.Equal(t, all[want], got, "%#x", addr)
		}
	}
	t.Run("ascending", func(t *testing.T) {
		t.Parallel()
		maps := openText(t, threeMappings)
		for _, l := range lookups {
			check(t, maps, l.addr, l.want)
			check(t, maps, l.addr, l.want)
		}
	})
	t.Run("descending", func(t *testing.T) {
		t.Parallel()
		maps := openText(t, threeMappings)
		for _, l := range slices.Backward(lookups) {
			check(t, maps, l.addr, l.want)
		}
	})
	t.Run("each after each", func(t *testing.T) {
		t.Parallel()
		for _, first := range lookups {
			for _, second := range lookups {
				maps := openText(t, threeMappings)
				check(t, maps, first.addr, first.want)
				check(t, maps, second.addr, second.want)
				check(t, maps, first.addr, first.want)
			}
		}
	})
	t.Run("nothing mapped", func(t *testing.T) {
		t.Parallel()
		_, ok, err := openText(t, "").Find(0)
		require.NoError(t, err)
		assert.False(t, ok)
	})
}

func TestWithin(t *testing.T) {
	t.Parallel()
	all, err := linux.ParseMaps(threeMappings)
	require.NoError(t, err)
	maps := openText(t, threeMappings)
	for _, tc := range []struct {
		start, end uintptr
		want       []linux.Mapping
	}{
		{0, 0x1000, nil},
		{0, 0x1001, all[:1]},
		{0x2fff, 0x3001, all[:2]},
		{0x3000, 0x8000, all[1:2]},
		{0x3fff, 0x8001, all[1:]},
		{0x4000, 0x8000, nil},
		{0, ^uintptr(0), all},
		{0x9000, ^uintptr(0), nil},
		{0x2000, 0x2000, nil},
		{0x3000, 0x2000, nil},
	} {
		got, err := maps.Within(tc.start, tc.end)
		require.NoError(t, err)
		assert.Equal(t, tc.want, got, "%#x-%#x", tc.start, tc.end)
	}
}

func TestMalformedMapsEndALookup(t *testing.T) {
	t.Parallel()
	text := threeMappings + "what\n"
	_, ok, err := openText(t, text).Find(0x8000)
	require.NoError(t, err, "the line is above what was asked for")
	assert.True(t, ok)
	_, _, err = openText(t, text).Find(0x9000)
	require.EqualError(t, err, `/proc/thread-self/maps:4: "what" is not a mapping, as proc(5) describes it`)
	_, err = openText(t, text).Within(0, 0xa000)
	require.ErrorContains(t, err, "/proc/thread-self/maps:4: ")
	_, _, err = openText(t, "1000-2000 rw-p\n").Find(0x1000)
	require.ErrorContains(t, err, "/proc/thread-self/maps:1: ")
	_, _, err = openText(t, strings.Repeat("x", 2<<20)).Find(0x1000)
	require.ErrorContains(t, err, "/proc/thread-self/maps: ")
}

// manyMappings are the maps of a process with n mappings of a page and as many
// holes.
func manyMappings(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%x-%x rw-p 00000000 00:00 0 \n", 0x10000+i*0x2000, 0x11000+i*0x2000)
	}
	return b.String()
}

// counted counts the bytes that are read of its files.
type counted struct {
	fs.FS
	bytes *int
}

func (c counted) Open(name string) (fs.File, error) {
	f, err := c.FS.Open(name)
	return countedFile{f, c.bytes}, err
}

type countedFile struct {
	fs.File
	bytes *int
}

func (f countedFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	*f.bytes += n
	return n, err
}

// What lies above the address is not read, and nothing is read twice on the way up.
func TestLookupsReadUpToTheAddress(t *testing.T) {
	t.Parallel()
	const n = 40_000
	text := manyMappings(n)
	var bytes int
	maps, err := linux.OpenMaps(counted{host(map[string]string{mapsFile: text}), &bytes})
	require.NoError(t, err)
	defer maps.Close()
	assert.Zero(t, bytes, "opening reads nothing")
	find := func(i int) {
		t.Helper()
		addr := uintptr(0x10000 + i*0x2000)
		m, ok, err := maps.Find(addr)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, addr, m.Start)
	}
	find(n / 100)
	assert.Less(t, bytes, len(text)/50)
	for i := n / 100; i < n/2; i += 10 {
		find(i)
	}
	assert.Less(t, bytes, len(text)*51/100, "one way up")
	find(0)
	assert.Less(t, bytes, len(text)*52/100, "from the start again")
}

func TestSkippedMappingsAreNotAllocated(t *testing.T) {
	text := manyMappings(10_000)
	fsys := host(map[string]string{mapsFile: text})
	skipped := testing.AllocsPerRun(5, func() {
		maps, err := linux.OpenMaps(fsys)
		require.NoError(t, err)
		_, ok, err := maps.Find(0x10000 + 9_999*0x2000)
		require.NoError(t, err)
		require.True(t, ok)
	})
	assert.Less(t, skipped, 100.0, "for 9,999 mappings that were not asked for")
}

func FuzzFind(f *testing.F) {
	f.Add(threeMappings, uint64(0x3000), uint64(0x1000))
	f.Add(manyMappings(3), uint64(0x12000), uint64(0))
	f.Add("0-2000 r--p 0 0 7 /a\r", uint64(0x1fff), uint64(0x1000))
	f.Fuzz(func(t *testing.T, text string, a, b uint64) {
		all, err := linux.ParseMaps(text)
		if err != nil || !slices.IsSortedFunc(all, func(a, b linux.Mapping) int {
			if a.End <= b.Start {
				return -1
			}
			return 1
		}) {
			return
		}
		maps := openText(t, text)
		for _, addr := range []uintptr{uintptr(a), uintptr(b)} {
			i := slices.IndexFunc(all, func(m linux.Mapping) bool { return m.End > addr })
			got, ok, err := maps.Find(addr)
			require.NoError(t, err)
			require.Equal(t, i >= 0, ok)
			if ok {
				require.Equal(t, all[i], got)
			}
		}
	})
}
