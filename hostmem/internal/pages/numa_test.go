package pages

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func file(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }

func TestNewSystemReadsAHost(t *testing.T) {
	t.Parallel()
	s := NewSystem(fstest.MapFS{
		"sys/kernel/mm/transparent_hugepage/enabled":                                 file("always [madvise] never\n"),
		"sys/kernel/mm/transparent_hugepage/defrag":                                  file("always defer [defer+madvise] madvise never\n"),
		"sys/kernel/mm/transparent_hugepage/hpage_pmd_size":                          file("536870912\n"),
		"sys/devices/system/node/has_memory":                                         file("0,2\n"),
		"sys/devices/system/node/online":                                             file("0-3\n"),
		"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":                      file("20\n"),
		"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages":                    file("10\n"),
		"sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages":                    file("3\n"),
		"sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages":      file("20\n"),
		"sys/devices/system/node/node2/hugepages/hugepages-2048kB/free_hugepages":    file("4\n"),
		"sys/devices/system/node/node2/hugepages/hugepages-1048576kB/nr_hugepages":   file("2\n"),
		"proc/sys/kernel/osrelease":                                                  file("6.12.9-arch1-1\n"),
		"sys/devices/system/node/node2/hugepages/hugepages-1048576kB/free_hugepages": file("no number\n"),
	})
	assert.Equal(t, "madvise", s.THP)
	assert.Equal(t, "defer+madvise", s.Defrag)
	assert.Equal(t, 512<<20, s.HugePage)
	assert.Equal(t, []int{0, 2}, s.Nodes)
	assert.Equal(t, linux.Release{Major: 6, Minor: 12}, s.Kernel)
	assert.Equal(t, 7, s.freeHuge(2<<20, -1))
	assert.Equal(t, 4, s.freeHuge(2<<20, 2))
	assert.Zero(t, s.freeHuge(2<<20, 0))
	assert.Zero(t, s.freeHuge(1<<30, 2))
}

func TestNewSystemWithoutFiles(t *testing.T) {
	t.Parallel()
	s := NewSystem(fstest.MapFS{"sys/kernel/mm/transparent_hugepage/enabled": file("nonsense")})
	assert.Empty(t, s.THP)
	assert.Zero(t, s.HugePage)
	assert.Empty(t, s.Nodes)
	assert.Zero(t, s.Kernel)
	assert.Positive(t, s.Page)

	s = NewSystem(fstest.MapFS{
		"sys/kernel/mm/transparent_hugepage/enabled": file("[always] madvise never"),
		"sys/devices/system/node/online":             file("0-1\n"),
	})
	assert.Equal(t, "always", s.THP)
	assert.Equal(t, 2<<20, s.HugePage)
	assert.Equal(t, []int{0, 1}, s.Nodes)
}

func TestPlans(t *testing.T) {
	t.Parallel()
	const huge = 2 << 20
	for _, tc := range []struct {
		n, align int
		noHuge   bool
		want     plan
	}{
		{1, 0, false, plan{n: 1, mapped: 4096, page: 4096, align: 4096}},
		{huge - 1, 0, false, plan{n: huge - 1, mapped: huge, page: 4096, align: 4096}},
		{huge, 0, false, plan{n: huge, mapped: huge, page: 4096, align: huge, thp: true}},
		{huge + 1, 64, false, plan{n: huge + 1, mapped: huge + 4096, page: 4096, align: 4096, thp: true}},
		{huge, 0, true, plan{n: huge, mapped: huge, page: 4096, align: 4096}},
		{1, 1 << 30, false, plan{n: 1, mapped: 4096, page: 4096, align: 1 << 30}},
	} {
		got, err := newPlan(tc.n, 4096, tc.align, map[bool]int{false: huge}[tc.noHuge])
		require.NoError(t, err)
		assert.Equal(t, tc.want, got)
	}
	got, err := newPlan(5<<20, huge, 0, 0)
	require.NoError(t, err)
	assert.Equal(t, plan{n: 5 << 20, mapped: 6 << 20, page: huge, align: huge}, got)
}
