package linux_test

import (
	"io/fs"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestTransparentHugePages(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]linux.TransparentHugePages{
		"no-gpu-cgroup-v1": {Enabled: "madvise", Defrag: "madvise", Shmem: "never", PageSize: 2 * mib},
		"wsl2":             {Enabled: "never"},
	} {
		got, err := linux.ReadTransparentHugePages(captured(t, name))
		require.NoError(t, err, name)
		assert.Equal(t, want, got, name)
	}
	for _, size := range []string{"0\n", "-2097152\n", "3000000\n", "huge\n"} {
		_, err := linux.ReadTransparentHugePages(host(map[string]string{
			"sys/kernel/mm/transparent_hugepage/enabled":        "always [madvise] never\n",
			"sys/kernel/mm/transparent_hugepage/hpage_pmd_size": size,
		}))
		assert.ErrorContains(t, err, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size:1: ", size)
	}
}

func TestHugetlbPools(t *testing.T) {
	t.Parallel()
	fsys := captured(t, "vmd-cxl")
	pool, err := linux.ReadHugetlbPool(fsys, 2*mib)
	require.NoError(t, err)
	assert.Equal(t, linux.HugetlbPool{PageSize: 2 * mib, Total: 16, Free: 10, Reserved: 4}, pool)
	assert.Equal(t, 6, pool.Available(), "four are promised already")
	pool, err = linux.NUMANode(0).HugetlbPool(fsys, 2*mib)
	require.NoError(t, err)
	assert.Equal(t, 10, pool.Available())
	_, err = linux.ReadHugetlbPool(fsys, gib)
	require.ErrorIs(t, err, fs.ErrNotExist)
	assert.Zero(t, linux.HugetlbPool{Free: 3, Reserved: 4}.Available(), "never negative")

	sizes, err := linux.NUMANode(0).HugetlbSizes(captured(t, "epyc-dual-cgroup-v2"))
	require.NoError(t, err)
	assert.Equal(t, []int{2 * mib, gib}, sizes)
	sizes, err = linux.NUMANode(0).HugetlbSizes(host(map[string]string{
		"sys/devices/system/node/node0/hugepages/hugepages-64kB/nr_hugepages":       "0\n",
		"sys/devices/system/node/node0/hugepages/hugepages-16777216kB/nr_hugepages": "0\n",
		"sys/devices/system/node/node0/hugepages/hugepages-kB/nr_hugepages":         "0\n",
		"sys/devices/system/node/node0/hugepages/demote":                            "0\n",
	}))
	require.NoError(t, err)
	assert.Equal(t, []int{64 * kib, 16 * gib}, sizes)
}
