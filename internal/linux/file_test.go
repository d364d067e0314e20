package linux_test

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// captured returns the root of a captured host.
func captured(tb testing.TB, name string) fstest.MapFS {
	tb.Helper()
	fsys, err := hosttest.Load(filepath.Join("..", "..", "testdata", "hosts", name+".txtar"))
	require.NoError(tb, err)
	return fsys
}

// host is a root with these files.
func host(files map[string]string) fstest.MapFS {
	fsys := fstest.MapFS{}
	for name, text := range files {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return fsys
}

// readers are all readers, by the file that a damaged one is in.
var readers = map[string]func(fs.FS) error{
	"/proc/meminfo:2":                                                          func(f fs.FS) error { _, err := linux.ReadMeminfo(f); return err },
	"/proc/vmstat:2":                                                           func(f fs.FS) error { _, err := linux.ReadVMStat(f); return err },
	"/proc/thread-self/maps:2":                                                 func(f fs.FS) error { _, err := linux.ReadMaps(f); return err },
	"/proc/thread-self/smaps:2":                                                func(f fs.FS) error { _, err := linux.ReadSMaps(f, 0x400000, 1); return err },
	"/proc/sys/kernel/osrelease:1":                                             func(f fs.FS) error { _, err := linux.ReadRelease(f); return err },
	"/sys/bus/pci/devices/0000:01:00.0/numa_node:1":                            func(f fs.FS) error { _, err := linux.PCIAddress{Bus: 1}.NUMANode(f); return err },
	"/sys/devices/system/cpu/online:1":                                         func(f fs.FS) error { _, err := linux.ReadCPUList(f, "sys/devices/system/cpu/online"); return err },
	"/sys/devices/system/node/has_memory:1":                                    func(f fs.FS) error { _, err := linux.ReadMemoryNodes(f); return err },
	"/sys/devices/system/node/node0/cpulist:1":                                 func(f fs.FS) error { _, err := linux.NUMANode(0).CPUs(f); return err },
	"/sys/devices/system/node/node0/distance:1":                                func(f fs.FS) error { _, err := linux.NUMANode(0).Distances(f); return err },
	"/sys/devices/system/node/node0/meminfo:2":                                 func(f fs.FS) error { _, err := linux.NUMANode(0).Meminfo(f); return err },
	"/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages:1": func(f fs.FS) error { _, err := linux.NUMANode(0).HugetlbPool(f, 2*mib); return err },
	"/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages:1":               func(f fs.FS) error { _, err := linux.ReadHugetlbPool(f, 2*mib); return err },
	"/sys/kernel/mm/transparent_hugepage/enabled:1":                            func(f fs.FS) error { _, err := linux.ReadTransparentHugePages(f); return err },
	"/sys/fs/cgroup/job/memory.current:1":                                      func(f fs.FS) error { _, err := linux.ReadCgroupMemory(f); return err },
	"/sys/fs/cgroup/job/cpu.max:1": func(f fs.FS) error {
		_, err := linux.Cgroup{Version: 2, Dir: "sys/fs/cgroup/job"}.CPUQuota(f)
		return err
	},
	"/proc/thread-self/maps:2: ": func(f fs.FS) error {
		maps, err := linux.OpenMaps(f)
		if err != nil {
			return err
		}
		_, _, err = maps.Find(0x500000)
		return errors.Join(err, maps.Close())
	},
}

// Each reader gives the same two errors: one names the file and the line that are
// malformed, the other is that of a missing file.
func TestErrors(t *testing.T) {
	t.Parallel()
	damaged := captured(t, "damaged")
	for where, read := range readers {
		err := read(damaged)
		var syntax *linux.SyntaxError
		require.ErrorAs(t, err, &syntax, where)
		assert.NotErrorIs(t, err, fs.ErrNotExist, where)
		assert.Contains(t, err.Error(), where)
		assert.Contains(t, err.Error(), " is not ", where)

		err = read(fstest.MapFS{})
		require.ErrorIs(t, err, fs.ErrNotExist, where)
		var path *fs.PathError
		if assert.ErrorAs(t, err, &path, where) {
			assert.True(t, strings.HasPrefix(path.Path, "/"), "%s: %v", where, err)
		}

		err = read(refusing{})
		require.ErrorIs(t, err, fs.ErrPermission, where)
	}
}

// refusing is a host on which no file may be opened.
type refusing struct{}

func (refusing) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
}

func TestSyntaxErrorText(t *testing.T) {
	t.Parallel()
	_, err := linux.ReadMeminfo(captured(t, "damaged"))
	assert.EqualError(t, err, `/proc/meminfo:2: "MemAvailable:   many kB" is not "Name: number kB"`)
	_, err = linux.ParseMeminfo("MemTotal: 5 kB\n?\n")
	assert.EqualError(t, err, `line 2: "?" is not "Name: number kB"`)
	_, err = linux.ParsePCIAddress("6")
	assert.EqualError(t, err, `"6" is not a PCI address, such as 0000:c3:00.0`)
	long := (&linux.SyntaxError{Line: 1, Text: strings.Repeat("x", 1<<20), Want: "short"}).Error()
	assert.Less(t, len(long), 300, "a damaged file must not fill a log")
}

func TestReadInt(t *testing.T) {
	t.Parallel()
	fsys := host(map[string]string{"one": "-1\n", "empty": "", "two": "1 2\n", "lines": "1\n2\n"})
	n, err := linux.ReadInt(fsys, "one")
	require.NoError(t, err)
	assert.Equal(t, -1, n)
	for _, name := range []string{"empty", "two", "lines"} {
		_, err := linux.ReadInt(fsys, name)
		require.ErrorContains(t, err, "/"+name+":1: ")
	}
}

func TestParseCounters(t *testing.T) {
	t.Parallel()
	got, err := linux.ParseCounters("nr_free_pages 17\ncompact_stall 0\nhierarchical_memory_limit 9223372036854771712\n")
	require.NoError(t, err)
	assert.Equal(t, linux.Counters{"nr_free_pages": 17, "compact_stall": 0, "hierarchical_memory_limit": 9223372036854771712}, got)
	for _, text := range []string{"a", "a b", "a -1", " 1", "a 1 2", "a 1\n\n"} {
		_, err := linux.ParseCounters(text)
		assert.Error(t, err, "%q", text)
	}
}

func FuzzParseCounters(f *testing.F) {
	f.Add("nr_free_pages 17\ncompact_stall 0\n")
	f.Add("a 18446744073709551615\n")
	f.Fuzz(func(t *testing.T, text string) {
		counters, err := linux.ParseCounters(text)
		require.Equal(t, err == nil, counters != nil)
		for name, n := range counters {
			require.GreaterOrEqual(t, n, 0)
			require.Contains(t, text, name+" ")
		}
	})
}

func TestParseChoice(t *testing.T) {
	t.Parallel()
	for _, want := range []string{"always [madvise] never", "[madvise]\n", "always within_size [madvise] deny force\n"} {
		got, err := linux.ParseChoice(want)
		require.NoError(t, err)
		assert.Equal(t, "madvise", got)
	}
	for _, text := range []string{"", "always madvise never", "always [madvise never", "][", "[]", "[a b]"} {
		_, err := linux.ParseChoice(text)
		assert.Error(t, err, "%q", text)
	}
}

func FuzzParseChoice(f *testing.F) {
	f.Add("always [madvise] never")
	f.Add("]a[")
	f.Fuzz(func(t *testing.T, text string) {
		chosen, err := linux.ParseChoice(text)
		if err == nil {
			require.Contains(t, text, "["+chosen+"]")
			require.NotEmpty(t, chosen)
		}
	})
}
