package linux_test

import (
	"io/fs"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

const numaMaps = `55d8f5327000 default file=/usr/bin/head\040N7=9 mapped=2 N0=2 kernelpagesize_kB=4
7f12d4000000 prefer:1 anon=16384 dirty=16384 N0=84 N1=16300 kernelpagesize_kB=4
7f12e4000000 default
7f12f4000000 bind:1 file=/anon_hugepage\040(deleted) huge anon=4 dirty=4 N1=4 kernelpagesize_kB=2048
`

func TestNUMAMaps(t *testing.T) {
	t.Parallel()
	maps, err := linux.ReadNUMAMaps(host(map[string]string{"proc/self/numa_maps": numaMaps}))
	require.NoError(t, err)
	require.Len(t, maps, 4)
	for _, c := range []struct {
		addr  uintptr
		pages map[linux.NUMANode]int
	}{
		{0x55d8f5327000, map[linux.NUMANode]int{0: 2}},
		{0x7f12d4000000, map[linux.NUMANode]int{0: 84, 1: 16300}},
		{0x7f12d7ffffff, map[linux.NUMANode]int{0: 84, 1: 16300}},
		{0x7f12e4000001, nil},
		{0x7f12f4000001, map[linux.NUMANode]int{1: 4}},
	} {
		m, ok := linux.NUMAMappingOf(maps, c.addr)
		assert.True(t, ok, "%x", c.addr)
		assert.Equal(t, c.pages, m.Pages, "%x", c.addr)
	}
	_, ok := linux.NUMAMappingOf(maps, 0x1000)
	assert.False(t, ok)

	_, err = linux.ReadNUMAMaps(host(map[string]string{}))
	require.ErrorIs(t, err, fs.ErrNotExist)
	for _, bad := range []string{"\n", "7f12d4000000\n", "xyz default\n", "7f12d4000000 default N0=x\n", "7f12d4000000 default N0=-1\n", "7f12d4000000 default N0\n"} {
		_, err := linux.ParseNUMAMaps(bad)
		var syntax *linux.SyntaxError
		assert.ErrorAs(t, err, &syntax, "%q", bad)
	}
}

func FuzzParseNUMAMaps(f *testing.F) {
	f.Add(numaMaps)
	f.Fuzz(func(t *testing.T, text string) {
		maps, err := linux.ParseNUMAMaps(text)
		if err != nil {
			return
		}
		for _, m := range maps {
			for _, pages := range m.Pages {
				assert.GreaterOrEqual(t, pages, 0)
			}
		}
	})
}
