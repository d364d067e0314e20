package hostinfo_test

import (
	"encoding/hex"
	"fmt"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttext"
)

// reread reads a host, and its recording, which must have the same.
func reread(t *testing.T, host fstest.MapFS) *hostinfo.Host {
	t.Helper()
	rec := hostinfo.Record(host)
	live := hostinfo.Read(rec, nil)
	again, err := hosttext.Parse(hosttext.Format("", rec.Host()))
	require.NoError(t, err)
	require.Equal(t, live, hostinfo.Read(again, nil))
	return live
}

func TestModulesOnDisk(t *testing.T) {
	t.Parallel()
	host := fstest.MapFS{
		"proc/sys/kernel/osrelease":                                     file("6.8.0-45-generic\n"),
		"lib/modules/6.8.0-45-generic/kernel/nvidia-580-open/nvidia.ko": file(""),
		"lib/modules/6.8.0-31-generic/updates/dkms/nvidia.ko.zst":       file(""),
		"lib/modules/6.8.0-30-generic/modules.dep":                      file(""),
		"var/lib/dkms/nvidia/580.95.05/6.8.0-31-generic/x86_64/log":     file(""),
		"var/lib/dkms/nvidia/580.95.05/source":                          file(""),
		"var/lib/dkms/nvidia/590.44.01/build/make.log":                  file(""),
		"var/lib/dkms/zfs/2.2.0/source":                                 file(""),
		"lib/firmware/nvidia/580.95.05/gsp_ga10x.bin":                   file(""),
		"lib/firmware/nvidia/ga102/gsp/x.bin":                           file(""),
		"etc/modprobe.d/secret.conf":                                    file("options wl secret=1\n blacklist\tnvidia \n"),
		"etc/modprobe.d/old.conf.bak":                                   file("alias nvidia off\n"),
	}
	n := reread(t, host).NVIDIA
	assert.Equal(t, hostinfo.InstalledModule{
		ModuleFile: "/lib/modules/6.8.0-45-generic/kernel/nvidia-580-open/nvidia.ko",
		ModuleBuilds: []hostinfo.ModuleBuild{
			{Path: "/lib/modules/6.8.0-31-generic/updates/dkms/nvidia.ko.zst", Kernel: "6.8.0-31-generic"},
			{Path: "/var/lib/dkms/nvidia/580.95.05", Kernel: "6.8.0-31-generic", Version: "580.95.05"},
			{Path: "/var/lib/dkms/nvidia/590.44.01", Version: "590.44.01"},
		},
		ModuleBlocked: "/etc/modprobe.d/secret.conf: blacklist nvidia",
		ModulesShown:  true,
		Firmware:      []string{"580.95.05"},
	}, n.InstalledModule)
	assert.Equal(t, hostinfo.InstalledModule{}, reread(t, fstest.MapFS{"proc/sys/kernel/osrelease": file("../../etc\n")}).NVIDIA.InstalledModule)
	for i := range 100 { // a capture may have any number
		host[fmt.Sprintf("lib/modules/%d/extra/nvidia.ko", i)] = file("")
	}
	assert.LessOrEqual(t, len(hostinfo.Read(host, nil).NVIDIA.ModuleBuilds), 64)
}

func TestWindowOfAGPU(t *testing.T) {
	t.Parallel()
	const dir = "sys/bus/pci/devices/0000:01:00.0/"
	for text, want := range map[string]hostinfo.PCIDevice{
		"0xa4000000 0xa4ffffff 0x40200\n0x6000000000 0x67ffffffff 0x14220c\n": {MemoryWindow: hostinfo.MemoryWindow{Window: 32 << 30}},
		"0xa4000000 0xa4ffffff 0x40200\n0x0 0x7ffffffff 0x2014220c\n":         {MemoryWindow: hostinfo.MemoryWindow{Window: 32 << 30, NoWindow: true}},
		"0x0 0xffffff 0x20040200\n0x0 0x7ffffffff 0x2014220c\n":               {MemoryWindow: hostinfo.MemoryWindow{Window: 32 << 30, NoWindow: true}},
		"0xa4000000 0xa4ffffff 0x40200\n0x0 0x0 0x0\n":                        {MemoryWindow: hostinfo.MemoryWindow{NoWindow: true}},
		"0x0 0x0 0x0\n0x0 0x0 0x0\n":                                          {},
		"0xa4000000 0xa4ffffff 0x40200\n":                                     {},
		"0xa4000000 0xa4ffffff 0x40200\n0x9 0x1 0x0\n":                        {},
		"0xa4000000 0xa4ffffff 0x40200\n0x0 0xffffffffffffffff 0x0\n":         {},
		"junk": {},
	} {
		h := reread(t, fstest.MapFS{dir + "vendor": file("0x10de\n"), dir + "class": file("0x030000\n"), dir + "resource": file(text)})
		require.Len(t, h.GPUs, 1)
		assert.Equal(t, want.Window, h.GPUs[0].Window, text)
		assert.Equal(t, want.NoWindow, h.GPUs[0].NoWindow, text)
	}
}

// The target speed is at the end of a list of capabilities, which may be cut off, or a loop.
func TestTargetSpeed(t *testing.T) {
	t.Parallel()
	const dir = "sys/bus/pci/devices/0000:01:00.0/"
	config := func(change func(c []byte)) string {
		c := make([]byte, 256)
		c[0], c[1], c[0x34], c[0x40], c[0x41], c[0x60], c[0x90] = 0xde, 0x10, 0x40, 1, 0x60, 0x10, 0x24
		change(c)
		return string(c)
	}
	for name, c := range map[string]struct {
		config string
		want   float64
	}{
		"generation 4": {config(func([]byte) {}), 16},
		"none":         {config(func(c []byte) { c[0x90] = 0 }), 0},
		"a loop":       {config(func(c []byte) { c[0x60], c[0x61] = 5, 0x40 }), 0},
		"no list":      {config(func(c []byte) { c[0x34] = 0 }), 0},
		"its end":      {config(func(c []byte) { c[0x41] = 0xf0; c[0xf0] = 0x10 }), 0},
		"a user's":     {config(func([]byte) {})[:64], 0},
		"recorded":     {"config " + hex.EncodeToString([]byte(config(func([]byte) {}))) + "\n", 16},
		"damaged":      {"config 1x\n", 0},
	} {
		h := hostinfo.Read(fstest.MapFS{dir + "vendor": file("0x10de\n"), dir + "class": file("0x030000\n"), dir + "config": file(c.config)}, nil)
		assert.InDelta(t, c.want, h.GPUs[0].Link.TargetSpeed, 0, name)
	}
	h := reread(t, fstest.MapFS{dir + "vendor": file("0x10de\n"), dir + "class": file("0x030000\n"), dir + "config": file(config(func([]byte) {})),
		dir + "link/l1_aspm": file("1\n"), dir + "link/l0s_aspm": file("0\n")})
	assert.InDelta(t, 16.0, h.GPUs[0].Link.TargetSpeed, 0)
	assert.True(t, *h.GPUs[0].Link.Sleeps)
}

func TestPower(t *testing.T) {
	t.Parallel()
	on, off := true, false
	const dir = "sys/class/power_supply/"
	battery := fstest.MapFS{dir + "BAT0/type": file("Battery\n"), dir + "BAT0/status": file("Discharging\n")}
	with := func(more fstest.MapFS) fstest.MapFS {
		for name, f := range battery {
			more[name] = f
		}
		return more
	}
	for name, c := range map[string]struct {
		host fstest.MapFS
		want hostinfo.Power
	}{
		"desktop":     {fstest.MapFS{"sys/class/dmi/id/chassis_type": file("3\n"), dir + "mouse/type": file("Battery\n"), dir + "mouse/scope": file("Device\n")}, hostinfo.Power{}},
		"unplugged":   {with(fstest.MapFS{dir + "AC/type": file("Mains\n"), dir + "AC/online": file("0\n")}), hostinfo.Power{Laptop: true, OnBattery: &on}},
		"plugged in":  {with(fstest.MapFS{dir + "AC/type": file("Mains\n"), dir + "AC/online": file("1\n")}), hostinfo.Power{Laptop: true, OnBattery: &off}},
		"no mains":    {with(fstest.MapFS{}), hostinfo.Power{Laptop: true, OnBattery: &on}},
		"no supplies": {fstest.MapFS{"sys/class/dmi/id/chassis_type": file("10\n"), "sys/module/pcie_aspm/parameters/policy": file("default [powersave]\n")}, hostinfo.Power{Laptop: true, ASPM: "powersave"}},
	} {
		assert.Equal(t, c.want, reread(t, c.host).Power, name)
	}
}

func TestMemoryForOneUse(t *testing.T) {
	t.Parallel()
	const zones = "Node 0, zone   Normal\n  pages free     7\n        managed  1000\nNode 1, zone  Movable\n  pages free     9\n        managed  3000\n"
	m := reread(t, fstest.MapFS{
		"proc/meminfo":  file("MemTotal: 4096 kB\nMemFree: 9 kB\nShmem: 5 kB\nCmaTotal: 0 kB\nCmaFree: 64 kB\n"),
		"proc/zoneinfo": file(zones),
		"sys/bus/virtio/drivers/virtio_balloon/virtio3": file(""),
		"sys/bus/virtio/drivers/virtio_balloon/bind":    file(""),
	}).Memory
	assert.Equal(t, 3<<20, m.Movable)
	assert.Equal(t, 64<<10, m.CMA)
	assert.Equal(t, 5<<10, finite(t, m.Shared))
	assert.Equal(t, "virtio_balloon", m.Balloon)
	m = reread(t, fstest.MapFS{
		"proc/meminfo":  file("MemTotal: 4096 kB\n"),
		"proc/zoneinfo": file("Node 0, zone Movable\nmanaged 99999999999999999999\nmanaged -1\n"),
		"sys/bus/virtio/drivers/virtio_balloon/bind": file(""), // it drives no device
	}).Memory
	assert.Equal(t, hostinfo.Placed{}, m.Placed)
}

func TestLimitsAndClocks(t *testing.T) {
	t.Parallel()
	h := reread(t, fstest.MapFS{
		"proc/self/limits": file("Limit Soft Hard Units\nMax data size             4096  unlimited  bytes\n"),
		"sys/devices/system/clocksource/clocksource0/current_clocksource": file("hpet\n"),
		"proc/self/cgroup":                 file("0::/job\n"),
		"proc/self/mountinfo":              file("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n24 20 0:54 / /dev/shm rw - tmpfs shm rw,size=65536k\n25 20 0:55 / /data rw - tmpfs x rw,size=10%\n"),
		"sys/fs/cgroup/cgroup.controllers": file("cpu memory\n"),
		"sys/fs/cgroup/job/cpu.max":        file("200000 100000\n"),
		"sys/fs/cgroup/job/cpu.stat":       file("usage_usec 5\nnr_periods 400\nnr_throttled 300\n"),
	})
	assert.Equal(t, 4096, finite(t, h.DataSize))
	assert.Equal(t, "hpet", h.Kernel.ClockSource)
	assert.Equal(t, []int{400, 300}, []int{h.Cgroup.Periods, h.Cgroup.Throttled})
	require.Len(t, h.Mounts, 2)
	assert.Equal(t, 64<<20, finite(t, h.Mounts[0].Size))
	assert.False(t, h.Mounts[1].Size.Known)
}

// The driver's libraries are also where a container runtime mounts them, and where Colab has them.
func TestLibrariesOutsideTheUsualDirectories(t *testing.T) {
	t.Parallel()
	h := reread(t, fstest.MapFS{
		"proc/self/mountinfo":                   file("24 20 0:54 /lib/libcuda.so.580.95.05 /opt/driver/lib/libcuda.so.580.95.05 ro - ext4 /dev/sda rw\n25 20 0:54 / /../libcuda.so.1 ro - ext4 /dev/sda rw\n"),
		"opt/driver/lib/libcuda.so.580.95.05":   file(""),
		"usr/lib64-nvidia/libcuda.so.550.54.15": file(""),
	})
	var paths []string
	for _, l := range h.NVIDIA.Libraries {
		paths = append(paths, l.Path)
	}
	assert.ElementsMatch(t, []string{"/opt/driver/lib/libcuda.so.580.95.05", "/usr/lib64-nvidia/libcuda.so.550.54.15"}, paths)
}
