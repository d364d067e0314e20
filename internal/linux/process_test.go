package linux_test

import (
	"io/fs"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseProcessStatus(t *testing.T) {
	t.Parallel()
	s, err := linux.ParseProcessStatus("Name:\ta: b\nState:\tS (sleeping)\nGroups:\t \nVmRSS:\t    1668 kB\nThreads:\t1\nVmLck:\tmany kB\n")
	require.NoError(t, err)
	assert.Equal(t, "a: b", s["Name"])
	n, ok := s.Size("VmRSS")
	assert.True(t, ok)
	assert.Equal(t, 1668<<10, n)
	for _, none := range []string{"VmLck", "Threads", "VmPin"} {
		_, ok = s.Size(none)
		assert.False(t, ok, none)
	}
	assert.False(t, s.Ended())
	for _, state := range []string{"Z (zombie)", "X (dead)"} {
		assert.True(t, linux.ProcessStatus{"State": state}.Ended(), state)
	}
	_, err = linux.ParseProcessStatus("Name:\ta\nmore\n")
	assert.ErrorContains(t, err, `line 2: "more" is not`)
}

func TestEverySMaps(t *testing.T) {
	t.Parallel()
	var names []string
	sizes, resident := 0, 0
	each := func(m linux.Mapping, s linux.SMaps) {
		names = append(names, m.Name)
		assert.Equal(t, 1, s.Maps)
		assert.Equal(t, m.End-m.Start, uintptr(s.Size))
		sizes += s.Size
		resident += s.Rss + s.Hugetlb
	}
	require.NoError(t, linux.ParseEverySMaps(strings.NewReader(smapsText), each))
	assert.Equal(t, []string{"[anon:pinned]", "", "/anon_hugepage (deleted)"}, names)
	assert.Equal(t, 8<<20+4096, sizes)
	assert.Equal(t, 8<<20+4096, resident)

	require.NoError(t, linux.ParseEverySMaps(strings.NewReader(""), func(linux.Mapping, linux.SMaps) { t.Error("called") }))
	for _, text := range []string{"Rss: 4 kB\n", "1-2 rw-p\n", "1000-2000 rw-p 0 00:00 0\nRss: many kB\n", "1000-2000 rw-p 0 00:00 0\nRss\n"} {
		assert.ErrorContains(t, linux.ParseEverySMaps(strings.NewReader(text), func(linux.Mapping, linux.SMaps) {}), "line ", text)
	}
}

func TestProcessFiles(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{
		"proc/7/status":  {Data: []byte("Name:\tx\n")},
		"proc/7/smaps":   {Data: []byte("1000-2000 rw-p 0 00:00 0\nRss: many kB\n")},
		"proc/7/environ": {Data: []byte("A=1\x00B=2 3\x00")},
	}
	s, err := linux.ReadProcessStatus(fsys, 7)
	require.NoError(t, err)
	assert.Equal(t, "x", s["Name"])
	env, err := linux.ReadProcessEnviron(fsys, 7)
	require.NoError(t, err)
	assert.Equal(t, []string{"A=1", "B=2 3"}, env)
	assert.ErrorContains(t, linux.ReadProcessSMaps(fsys, 7, nil), "/proc/7/smaps:2: ")
	_, err = linux.ReadProcessStatus(fsys, 8)
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorIs(t, linux.ReadProcessSMaps(fsys, 8, nil), fs.ErrNotExist)
}

func TestSMapsRollup(t *testing.T) {
	t.Parallel()
	s, err := linux.ReadSMapsRollup(fstest.MapFS{"proc/thread-self/smaps_rollup": {Data: []byte(
		"55de4fca8000-7ffc93842000 ---p 00000000 00:00 0                          [rollup]\nRss:                1760 kB\nPss:                 232 kB\nPrivate_Hugetlb:     2048 kB\nLocked:                4 kB\n")}})
	require.NoError(t, err)
	assert.Equal(t, 1760<<10, s.Rss)
	assert.Equal(t, 2048<<10, s.Hugetlb)
	assert.Equal(t, 4<<10, s.Locked)
	if runtime.GOOS != "linux" {
		return
	}
	s, err = linux.ReadSMapsRollup(os.DirFS("/"))
	require.NoError(t, err)
	assert.Greater(t, s.Rss, 1<<20)
}
