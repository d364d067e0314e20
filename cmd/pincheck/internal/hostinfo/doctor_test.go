package hostinfo_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/linux"
)

func file(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }

func device(mode fs.FileMode, uid, gid int) *fstest.MapFile {
	return &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | mode, Sys: linux.Owner{UID: uid, GID: gid}}
}

func TestMemoryThatNoProgramOwns(t *testing.T) {
	t.Parallel()
	const meminfo = "MemTotal: 100 kB\nMemFree: 10 kB\nBuffers: 1 kB\nCached: 20 kB\nAnonPages: 30 kB\nSlab: 5 kB\nPercpu: 1 kB\nHugetlb: 3 kB\n" +
		"SwapFree: 7 kB\nCommitLimit: 50 kB\nCommitted_AS: 40 kB\n"
	m := hostinfo.Read(fstest.MapFS{"proc/meminfo": file(meminfo), "proc/sys/vm/max_map_count": file("65530\n")}, nil).Memory
	assert.Equal(t, 30<<10, finite(t, m.Unowned))
	assert.Equal(t, 7<<10, finite(t, m.SwapFree))
	assert.Equal(t, 50<<10, finite(t, m.CommitLimit))
	assert.Equal(t, 40<<10, finite(t, m.Committed))
	assert.Equal(t, 65530, finite(t, m.MaxMappings))
	// More counted than there is: fields overlap on some kernels.
	m = hostinfo.Read(fstest.MapFS{"proc/meminfo": file("MemTotal: 10 kB\nMemFree: 9 kB\nAnonPages: 9 kB\nSlab: 1 kB\nPercpu: 1 kB\n")}, nil).Memory
	assert.Zero(t, finite(t, m.Unowned))
	// An old kernel does not say enough.
	assert.False(t, hostinfo.Read(fstest.MapFS{"proc/meminfo": file("MemTotal: 10 kB\nMemFree: 9 kB\n")}, nil).Memory.Unowned.Known)
}

func TestFragmentation(t *testing.T) {
	t.Parallel()
	m := hostinfo.Read(fstest.MapFS{
		"proc/buddyinfo": file("Node 1, zone   Normal     10      0      0      0      0      0      0      0      0      2      1 \n"),
		"proc/vmstat":    file("nr_free_pages 1\ncompact_stall 4\ncompact_fail 3\nthp_fault_alloc 2\nthp_fault_fallback 1\n"),
	}, nil).Memory
	assert.Equal(t, []hostinfo.FreeZone{{Node: 1, Zone: "Normal", Pages: 10 + 2048, Huge: 2048}}, m.Free)
	assert.Equal(t, &hostinfo.Stalls{Compact: 4, CompactFail: 3, HugeFaults: 2, HugeFallback: 1}, m.Stalls)
	assert.Nil(t, hostinfo.Read(fstest.MapFS{}, nil).Memory.Stalls)
}

func TestWhoMayOpenTheNodes(t *testing.T) {
	t.Parallel()
	status := "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t44 \nCapEff:\t0000000000800000\n"
	host := fstest.MapFS{
		"proc/self/status": file(status),
		"dev/nvidia0":      device(0o660, 0, 44),
		"dev/nvidia1":      device(0o660, 0, 0),
		"dev/nvidiactl":    device(0o666, 0, 0),
	}
	h := hostinfo.Read(host, nil)
	assert.Equal(t, &hostinfo.User{UID: 1000, GID: 1000, Groups: []int{44}, SysNice: true}, h.User)
	closed := map[string]bool{}
	for _, n := range h.NVIDIA.Nodes {
		closed[n.Path] = n.Closed
	}
	assert.Equal(t, map[string]bool{"/dev/nvidia0": false, "/dev/nvidia1": true, "/dev/nvidiactl": false}, closed)
	delete(host, "proc/self/status")
	h = hostinfo.Read(host, nil)
	assert.Nil(t, h.User)
	for _, n := range h.NVIDIA.Nodes {
		assert.False(t, n.Closed, "unknown is not closed")
	}
}

func TestMounts(t *testing.T) {
	t.Parallel()
	h := hostinfo.Read(fstest.MapFS{
		"proc/self/mountinfo": file("20 1 0:20 / / rw - overlay overlay rw\n" +
			"21 20 0:52 / /models rw - nfs4 10.0.0.7:/secret rw\n" +
			"22 20 0:53 / /models/cache rw - ext4 /dev/sda rw\n" +
			"23 20 0:5 / /dev rw - devtmpfs udev rw\n24 23 0:54 / /dev/shm rw - tmpfs shm rw\n" +
			"25 20 0:6 / /run/x rw - tmpfs x rw\n26 20 0:7 / /s3 rw - fuse.mount-s3 bucket rw\n"),
		"sys/class/bdi/0:52/read_ahead_kb": file("128\n"),
	}, nil)
	assert.Equal(t, []hostinfo.Mount{
		{Point: "/", Type: "overlay"},
		{Point: "/models", Type: "nfs4", Network: true, ReadAhead: hostinfo.Limit{Known: true, N: 128 << 10}},
		{Point: "/models/cache", Type: "ext4"},
		{Point: "/dev/shm", Type: "tmpfs"},
		{Point: "/s3", Type: "fuse.mount-s3", Network: true},
	}, h.Mounts, "no sources: they name hosts")
	for path, point := range map[string]string{"/models/a": "/models", "/models/cache/a": "/models/cache", "/modelsx": "/", "/models": "/models", "/dev/shm/a": "/dev/shm"} {
		m, ok := h.Mount(path)
		require.True(t, ok, path)
		assert.Equal(t, point, m.Point, path)
	}
	_, ok := (&hostinfo.Host{}).Mount("/x")
	assert.False(t, ok)
}

func TestTroubleOfACard(t *testing.T) {
	t.Parallel()
	const dir = "sys/bus/pci/devices/0000:01:00.0/"
	host := fstest.MapFS{
		dir + "vendor": file("0x10de\n"), dir + "class": file("0x030200\n"), dir + "config": file("\xde\x10\x35\x23rest"),
		dir + "aer_dev_correctable":                        file("RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7\n"),
		dir + "aer_dev_nonfatal":                           file("Undefined 0\nTOTAL_ERR_NONFATAL 1\n"),
		dir + "aer_dev_fatal":                              file("TOTAL_ERR_FATAL 2\n"),
		dir + "iommu_group/type":                           file("DMA-FQ\n"),
		"sys/module/nvidia_uvm/parameters/uvm_disable_hmm": file("N\n"),
		"usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04":   file(""),
		"usr/lib/x86_64-linux-gnu/libcuda.so.1":            file(""),
		"usr/local/cuda/compat/libcuda.so.590.10":          file(""),
		"sys/class/infiniband/mlx5_0/node_type":            file("1: CA\n"),
		"proc/self/cgroup":                                 file("5:devices:/docker/x\n"),
		"proc/self/mountinfo":                              file("31 23 0:28 /docker/x /sys/fs/cgroup/devices ro - cgroup cgroup rw,devices\n"),
		"sys/fs/cgroup/devices/devices.list":               file("c 1:3 rwm\nc 195:* rw\n"),
	}
	h := hostinfo.Read(host, nil)
	require.Len(t, h.GPUs, 1)
	assert.Equal(t, &hostinfo.LinkErrors{Correctable: 7, NonFatal: 1, Fatal: 2}, h.GPUs[0].Errors)
	assert.Equal(t, "DMA-FQ", h.GPUs[0].IOMMU)
	assert.False(t, h.GPUs[0].OffBus)
	require.NotNil(t, h.NVIDIA.HMMDisabled)
	assert.False(t, *h.NVIDIA.HMMDisabled)
	assert.Equal(t, []hostinfo.DriverLibrary{{Path: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", Version: "580.159.04"},
		{Path: "/usr/local/cuda/compat/libcuda.so.590.10", Version: "590.10"}}, h.NVIDIA.Libraries)
	assert.Equal(t, 1, h.InfiniBand)
	assert.Equal(t, []string{"c 1:3 rwm", "c 195:* rw"}, h.Cgroup.DevicesAllowed)

	host[dir+"config"] = file("\xff\xff\xff\xff\xff\xff\xff\xff")
	delete(host, dir+"aer_dev_correctable")
	delete(host, dir+"aer_dev_nonfatal")
	delete(host, dir+"aer_dev_fatal")
	h = hostinfo.Read(host, nil)
	assert.True(t, h.GPUs[0].OffBus)
	assert.Nil(t, h.GPUs[0].Errors)
}

func TestCPUsAndMemoryThatAreAllowed(t *testing.T) {
	t.Parallel()
	c := hostinfo.CPU{Allowed: "0-3,8", AllowedMems: "0-1"}
	n, ok := c.AllowedIn("2-9")
	assert.True(t, ok)
	assert.Equal(t, 3, n)
	_, ok = c.AllowedIn("")
	assert.False(t, ok)
	_, ok = hostinfo.CPU{}.AllowedIn("0")
	assert.False(t, ok)
	may, ok := c.MemoryFrom(2)
	assert.True(t, ok)
	assert.False(t, may)
	may, _ = c.MemoryFrom(1)
	assert.True(t, may)
	_, ok = hostinfo.CPU{}.MemoryFrom(0)
	assert.False(t, ok)
}

// What keeps a GPU from CUDA on purpose: where it is written, and in which form.
func TestGPUsThatAreLeftOutOnPurpose(t *testing.T) {
	t.Parallel()
	const dir = "sys/bus/pci/devices/0000:01:00.0/"
	host := fstest.MapFS{
		dir + "vendor": file("0x10de\n"), dir + "class": file("0x030200\n"), dir + "driver_override": file("(null)\n"),
		"proc/driver/nvidia/params":   file("Mobile: 4294967295\nExcludedGpus: \"GPU-1,GPU-2\"\nGpuBlacklist: \"\"\n"),
		"etc/modprobe.d/nvidia.conf":  file("# options nvidia NVreg_AssignGpus=0:09:00.0\noptions nvidia NVreg_Mobile=1 NVreg_AssignGpus=\"0:4:00.0,81:00\"\n"),
		"etc/modprobe.d/secrets.conf": file("options wifi key=secret\n"),
	}
	h := hostinfo.Read(host, nil)
	require.Len(t, h.GPUs, 1)
	assert.Empty(t, h.GPUs[0].Override)
	assert.False(t, h.GPUs[0].VirtualFunction)
	assert.Equal(t, []string{"GPU-1", "GPU-2"}, h.NVIDIA.ExcludedGPUs)
	assert.Equal(t, []string{"0000:04:00.0", "0000:81:00.0"}, h.NVIDIA.AssignedGPUs)

	recorder := hostinfo.Record(host)
	assert.Equal(t, h, hostinfo.Read(recorder, nil))
	recorded := recorder.Host()
	assert.Equal(t, h, hostinfo.Read(recorded, nil), "a recording shows the same")
	assert.Empty(t, string(recorded["etc/modprobe.d/secrets.conf"].Data), "what is of no GPU stays out")

	host[dir+"driver_override"] = file("vfio-pci\n")
	host[dir+"physfn"] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte("../0000:01:00.4")}
	h = hostinfo.Read(host, nil)
	assert.Equal(t, "vfio-pci", h.GPUs[0].Override)
	assert.True(t, h.GPUs[0].VirtualFunction)
}
