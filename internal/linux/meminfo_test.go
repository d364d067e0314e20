package linux_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseMeminfo(t *testing.T) {
	t.Parallel()
	got, err := linux.ParseMeminfo("MemTotal:       24682416 kB\nActive(file):     20 kB\nInactive(file): 4 kB\nHugePages_Total:      7\nHugepagesize:       2048 kB\n")
	require.NoError(t, err)
	assert.Equal(t, linux.Meminfo{"MemTotal": 24682416 * kib, "Active(file)": 20 * kib, "Inactive(file)": 4 * kib, "HugePages_Total": 7, "Hugepagesize": 2 * mib}, got)
	assert.Equal(t, 24*kib, got.FileCache())

	got, err = linux.ParseMeminfo("Node 12 MemTotal:  5 kB\nNode 12 HugePages_Free:     0\n")
	require.NoError(t, err)
	assert.Equal(t, linux.Meminfo{"MemTotal": 5 * kib, "HugePages_Free": 0}, got)

	got, err = linux.ParseMeminfo("MemTotal: 18446744073709551615 kB\n")
	require.NoError(t, err)
	assert.Equal(t, linux.Meminfo{"MemTotal": math.MaxInt}, got)

	for _, text := range []string{"MemTotal", "MemTotal:", "MemTotal: -1 kB", "MemTotal: 1 MB", "MemTotal: 1 2 kB", ": 1 kB", "Node 0: 1 kB", "\n", "MemTotal: 18446744073709551616 kB"} {
		_, err := linux.ParseMeminfo(text)
		assert.Error(t, err, "%q", text)
	}
}

func FuzzParseMeminfo(f *testing.F) {
	f.Add("MemTotal: 24682416 kB\nHugePages_Total: 7\n")
	f.Add("Node 0 MemTotal: 5 kB\n")
	f.Fuzz(func(t *testing.T, text string) {
		info, err := linux.ParseMeminfo(text)
		require.Equal(t, err == nil, info != nil)
		for name, n := range info {
			require.NotEmpty(t, name)
			require.GreaterOrEqual(t, n, 0)
		}
		require.GreaterOrEqual(t, info.FileCache(), 0)
		h, _ := info.Headroom(1 << 30)
		require.GreaterOrEqual(t, h.Available, 0)
	})
}

// MemAvailable takes the page cache for reclaimable, pinned or not.
func TestPinnedFilePagesAreNotAvailableOnTheHost(t *testing.T) {
	t.Parallel()
	info, err := linux.ReadMeminfo(captured(t, "cgroup-v2-pinned-file"))
	require.NoError(t, err)
	for _, tc := range []struct{ pinned, want int }{
		{0, 28 * gib},
		{12 * gib, 16 * gib},
		{100 * gib, 14 * gib}, // all of the page cache, and no more
	} {
		h, ok := info.Headroom(tc.pinned)
		require.True(t, ok)
		assert.Equal(t, linux.Headroom{Available: tc.want, Total: 32 * gib, Source: "/proc/meminfo MemAvailable"}, h, "%d", tc.pinned)
	}
	info, err = linux.ReadMeminfo(captured(t, "container-cgroup-v1"))
	require.NoError(t, err)
	_, ok := info.Headroom(0)
	assert.False(t, ok, "a kernel that does not report MemAvailable")
}

func TestHeadroomText(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "3.10 GiB of 8 GiB (/job memory.max)", linux.Headroom{Available: 3_330_000_000, Total: 8 * gib, Source: "/job memory.max"}.String())
}
