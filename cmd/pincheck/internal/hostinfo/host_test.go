package hostinfo_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

const gib = 1 << 30

func captured(t *testing.T, name string, environ ...string) *hostinfo.Host {
	t.Helper()
	fsys, err := hosttest.Load(filepath.Join("..", "..", "..", "..", "testdata", "hosts", name+".txtar"))
	require.NoError(t, err)
	return hostinfo.Read(fsys, environ)
}

func finite(t *testing.T, l hostinfo.Limit) int {
	t.Helper()
	n, ok := l.Finite()
	require.True(t, ok, "limit %+v is not a number", l)
	return n
}

func TestH200VM(t *testing.T) {
	t.Parallel()
	h := captured(t, "h200-vm")
	assert.Equal(t, "6.18.0", h.Kernel.Release)
	assert.Equal(t, hostinfo.Distro{ID: "ubuntu", Version: "24.04", Name: "Ubuntu 24.04.3 LTS"}, h.Distro)
	assert.Equal(t, hostinfo.Libc{Kind: "glibc", Version: "2.39", Loader: "/lib64/ld-linux-x86-64.so.2"}, h.Libc)
	assert.True(t, h.Virt.VM)
	assert.Empty(t, h.Virt.Container)
	assert.Equal(t, 16, h.CPU.Threads)
	assert.Equal(t, 16, h.CPU.Cores)
	assert.Equal(t, 1, h.CPU.Sockets)
	assert.Equal(t, 16, h.CPU.AllowedCount)
	assert.InDelta(t, 16, h.CPU.Usable(), 0)
	assert.True(t, h.MemLock.Unlimited)
	require.Len(t, h.NUMA, 1)

	assert.Equal(t, "580.159.04", h.NVIDIA.DriverVersion)
	assert.True(t, h.NVIDIA.OpenModule)
	assert.True(t, h.NVIDIA.HasGPUNode())
	assert.True(t, h.NVIDIA.HasNode("/dev/nvidia-uvm"))
	assert.False(t, h.NVIDIA.HasNode("/dev/null"), "a node of something else is left out")
	assert.Equal(t, []string{"nvidia_uvm", "nvidia"}, h.NVIDIA.Modules)
	require.Len(t, h.NVIDIA.Boards, 1)
	assert.Equal(t, "NVIDIA H200", h.NVIDIA.Boards[0].Model)
	assert.Equal(t, "GPU-00000000-1111-2222-3333-444444444444", h.NVIDIA.Boards[0].UUID)

	require.Len(t, h.GPUs, 1)
	gpu := h.GPUs[0]
	assert.Equal(t, "0000:00:06.0", gpu.Address)
	assert.Equal(t, "0x030200", gpu.Class)
	assert.Equal(t, "nvidia", gpu.Driver)
	assert.Nil(t, gpu.NUMANode, "-1 is unknown, not node -1")
	assert.Empty(t, gpu.Upstream)
	assert.InDelta(t, 63.0, gpu.Link.Now().Rate(), 0.05)
	assert.InDelta(t, 63.0, gpu.Link.Best().Rate(), 0.05)
	// On this kernel the root group has neither memory.max nor memory.current.
	assert.Equal(t, hostinfo.Cgroup{}, h.Cgroup)

	found, ok := h.GPU("00000000:00:06.0")
	assert.True(t, ok, "nvidia-smi's form of the address")
	assert.Equal(t, gpu, found)
	_, ok = h.GPU("0000:00:07.0")
	assert.False(t, ok)
}

func TestDualEPYCInCgroupV2(t *testing.T) {
	t.Parallel()
	h := captured(t, "epyc-dual-cgroup-v2", "CUDA_VISIBLE_DEVICES=1", "HOME=/root", "CUDA_VISIBLE_DEVICES=0")
	assert.Equal(t, "docker", h.Virt.Container)
	assert.False(t, h.Virt.VM)
	assert.Equal(t, "AMD EPYC 9354 32-Core Processor", h.CPU.Model)
	assert.Equal(t, 2, h.CPU.Sockets)
	assert.Equal(t, 128, h.CPU.Threads)
	assert.Equal(t, 3, h.CPU.Cores, "the capture holds four of the CPUs, two of them one core's")
	assert.Equal(t, 64, h.CPU.AllowedCount)
	assert.InDelta(t, 12, h.CPU.Quota, 0)
	assert.InDelta(t, 12, h.CPU.Usable(), 0)
	assert.Equal(t, "0-1", h.CPU.AllowedMems)

	assert.Equal(t, 2, h.Cgroup.Version)
	assert.Equal(t, "/sys/fs/cgroup", h.Cgroup.Path)
	assert.Equal(t, 64*gib, finite(t, h.Cgroup.MemoryLimit))
	assert.Equal(t, 20*gib, finite(t, h.Cgroup.MemoryUsed))
	assert.Equal(t, 8*gib, h.Cgroup.FileCache, "tmpfs counts as file, but cannot be dropped")
	assert.Equal(t, 52*gib, finite(t, h.Cgroup.Headroom))
	assert.Equal(t, 65536, finite(t, h.MemLock))

	require.Len(t, h.NUMA, 2)
	assert.Equal(t, "32-63,96-127", h.NUMA[1].CPUs)
	assert.Equal(t, []int{32, 10}, h.NUMA[1].Distances)
	assert.Equal(t, 395623680*1024, h.NUMA[1].Total)
	assert.Equal(t, []hostinfo.HugePool{{PageSize: 2 << 20, Total: 1024, Free: 768}}, h.NUMA[0].Huge)
	assert.Empty(t, h.NUMA[1].Huge)
	assert.Equal(t, 768, finite(t, h.Memory.HugeFree))
	assert.Equal(t, "always", h.Memory.THP.Enabled)
	assert.Equal(t, "madvise", h.Memory.THP.Defrag)
	require.NotNil(t, h.Memory.Overcommit)
	assert.Equal(t, 1, *h.Memory.Overcommit)

	var nodes []string
	for _, n := range h.NVIDIA.Nodes {
		nodes = append(nodes, n.Path)
	}
	assert.Equal(t, []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia10", "/dev/nvidia-uvm", "/dev/nvidiactl"}, nodes)
	assert.Equal(t, "550.163.01", h.NVIDIA.DriverVersion)
	assert.False(t, h.NVIDIA.OpenModule)

	require.Len(t, h.GPUs, 2, "the audio function is no GPU")
	h100, l40s := h.GPUs[0], h.GPUs[1]
	require.NotNil(t, h100.NUMANode)
	assert.Equal(t, 0, *h100.NUMANode)
	assert.Equal(t, "nvidia", h100.Driver)
	assert.InDelta(t, 4.0, h100.Link.Now().Rate(), 0.01, "an idle GPU trains down")
	assert.InDelta(t, 63.0, h100.Link.Best().Rate(), 0.05)
	require.Len(t, h100.Upstream, 1)
	assert.Equal(t, "0000:00:01.1", h100.Upstream[0].Address)

	require.NotNil(t, l40s.NUMANode)
	assert.Equal(t, 1, *l40s.NUMANode)
	assert.Empty(t, l40s.Driver)
	require.Len(t, l40s.Upstream, 2, "the bridge without a link is left out")
	assert.Equal(t, "0000:c1:00.0", l40s.Upstream[0].Address)
	assert.Equal(t, 8, l40s.Upstream[1].CurrentWidth)
	assert.InDelta(t, 15.75, l40s.Upstream[1].Now().Rate(), 0.01)

	assert.Equal(t, map[string]string{"CUDA_VISIBLE_DEVICES": "0"}, h.Env, "the last one counts, others stay out")
}

func TestContainerInCgroupV1(t *testing.T) {
	t.Parallel()
	h := captured(t, "container-cgroup-v1")
	assert.Equal(t, hostinfo.Libc{Kind: "glibc", Version: "2.17", Loader: "/lib64/ld-linux-x86-64.so.2"}, h.Libc)
	assert.Equal(t, hostinfo.Distro{ID: "centos", Version: "7", Name: "CentOS Linux 7 (Core)"}, h.Distro)
	assert.Equal(t, "Google Google Compute Engine", h.Virt.Hypervisor)
	assert.Equal(t, 1, h.Cgroup.Version)
	assert.Equal(t, "/sys/fs/cgroup/memory", h.Cgroup.Path)
	assert.Equal(t, 2*gib, finite(t, h.Cgroup.MemoryLimit))
	assert.Equal(t, gib+gib/4, h.Cgroup.FileCache)
	assert.Equal(t, 2*gib-(1879048192-(gib+gib/4)), finite(t, h.Cgroup.Headroom))
	assert.InDelta(t, 0.5, h.CPU.Quota, 0)
	assert.InDelta(t, 0.5, h.CPU.Usable(), 0)
	assert.Zero(t, h.Memory.Available, "unknown before Linux 3.14, and where it is hidden")
	require.Len(t, h.GPUs, 1)
	assert.Nil(t, h.GPUs[0].NUMANode)
	assert.InDelta(t, 7.88, h.GPUs[0].Link.Now().Rate(), 0.01)
	assert.InDelta(t, 15.75, h.GPUs[0].Link.Best().Rate(), 0.01)
}

func TestWSL(t *testing.T) {
	t.Parallel()
	h := captured(t, "wsl2")
	assert.True(t, h.Virt.WSL)
	assert.True(t, h.Virt.VM)
	assert.Equal(t, "wsl", h.Virt.Hypervisor)
	assert.True(t, h.NVIDIA.HasGPUNode(), "/dev/dxg is the GPU's node there")
	assert.Empty(t, h.NVIDIA.DriverVersion)
	assert.Empty(t, h.GPUs)
	assert.Equal(t, "never", h.Memory.THP.Enabled)
	assert.Equal(t, 2, h.Cgroup.Version)
	assert.Equal(t, "/sys/fs/cgroup/init.scope", h.Cgroup.Path)
	assert.True(t, h.Cgroup.MemoryLimit.Unlimited)
	assert.True(t, h.Cgroup.Headroom.Unlimited)
}

func TestAlpine(t *testing.T) {
	t.Parallel()
	h := captured(t, "alpine-musl")
	assert.Equal(t, "musl", h.Libc.Kind, "gcompat's loader is not glibc")
	assert.Equal(t, "/lib/ld-musl-x86_64.so.1", h.Libc.Loader)
	assert.Equal(t, "3.20.3", h.Distro.Version)
	assert.Equal(t, "kubernetes", h.Virt.Container, "detected by the mounted group's root")
	assert.Equal(t, "580.65.06", h.NVIDIA.DriverVersion)
	assert.Zero(t, finite(t, h.Cgroup.Headroom), "never negative")
}

func TestHostWithoutGPU(t *testing.T) {
	t.Parallel()
	h := captured(t, "no-gpu-cgroup-v1")
	assert.False(t, h.NVIDIA.HasGPUNode())
	assert.Empty(t, h.NVIDIA.Nodes)
	assert.Empty(t, h.NVIDIA.DriverVersion)
	assert.Empty(t, h.GPUs)
	assert.Equal(t, 6, h.PCICount, "the bus can be seen, and has none")
	assert.Equal(t, 2, h.CPU.AllowedCount)
	assert.Zero(t, h.CPU.Quota, "-1 is no quota")
	assert.Equal(t, "2.36", h.Libc.Version)
	assert.Equal(t, 1, h.Cgroup.Version, "version 2 is mounted too, without the memory controller")
	assert.Equal(t, "/sys/fs/cgroup/memory/sandbox/891fcb9f", h.Cgroup.Path)
	assert.True(t, h.Cgroup.MemoryLimit.Unlimited)
	assert.Equal(t, 8388608, finite(t, h.MemLock))
	assert.Equal(t, 24682416*1024, h.Memory.Total)
	assert.NotEqual(t, h.Memory.Total, h.NUMA[0].Total, "the node has less than the host")
}

// Package hostmem tests its guard on the same hosts: both must return the same.
func TestTheGroupThatBinds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		host, path            string
		limit, used, headroom int
	}{
		{"cgroup-v2-high", "/sys/fs/cgroup/kubepods.slice/pod1/ctr", 60 << 20, 40 << 20, 30 << 20},
		{"cgroup-v2-nested", "/sys/fs/cgroup/slurm/job_7", 8 * gib, 7*gib + gib/2, gib + gib/2},
	} {
		h := captured(t, tc.host)
		assert.Equal(t, tc.path, h.Cgroup.Path)
		assert.Equal(t, 2, h.Cgroup.Version)
		assert.Equal(t, tc.limit, finite(t, h.Cgroup.MemoryLimit), tc.host)
		assert.Equal(t, tc.used, finite(t, h.Cgroup.MemoryUsed), tc.host)
		assert.Equal(t, tc.headroom, finite(t, h.Cgroup.Headroom), tc.host)
	}
}

func TestTheSmallestCPUQuota(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{}
	put := func(name, text string) { fsys[name] = &fstest.MapFile{Data: []byte(text)} }
	put("proc/self/cgroup", "0::/outer/middle/inner\n")
	put("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	put("sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
	put("sys/fs/cgroup/outer/middle/cpu.max", "250000 100000\n")
	put("sys/fs/cgroup/outer/middle/inner/cpu.max", "max 100000\n")
	h := hostinfo.Read(fsys, nil)
	assert.InDelta(t, 1.5, h.Cgroup.CPUQuota, 0)
	assert.Zero(t, h.Cgroup.Version, "no group has a memory account")
}

// GPUs at the same bus and device of two PCI domains are two GPUs.
func TestGPUsOfTwoPCIDomains(t *testing.T) {
	t.Parallel()
	h := captured(t, "vmd-cxl")
	require.Len(t, h.GPUs, 2)
	for address, node := range map[string]int{"0000:01:00.0": 0, "00000000:01:00.0": 0, "10000:01:00.0": 1, "00010000:01:00.0": 1} {
		d, ok := h.GPU(address)
		require.True(t, ok, address)
		require.NotNil(t, d.NUMANode)
		assert.Equal(t, node, *d.NUMANode, address)
		assert.Equal(t, h.NUMA[node].CPUs, d.CPUs, address)
	}
	_, ok := h.GPU("01:00.0")
	assert.False(t, ok, "not a whole address")
	require.Len(t, h.NUMA, 3)
	assert.Empty(t, h.NUMA[2].CPUs, "it has memory alone")
	assert.Equal(t, 128*gib, h.NUMA[2].Total)
}

// What is damaged is unknown.
func TestDamagedFilesAreUnknown(t *testing.T) {
	t.Parallel()
	h := captured(t, "damaged")
	assert.Zero(t, h.Memory)
	assert.Zero(t, h.Cgroup)
	assert.Zero(t, h.CPU)
	assert.Equal(t, []hostinfo.NUMANode{{ID: 0}}, h.NUMA)
	assert.Equal(t, "experimental", h.Kernel.Release)
}

// refusing is a host of which no file can be read.
type refusing struct{ err error }

func (r refusing) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: r.err}
}

func TestNothingReadableIsUnknown(t *testing.T) {
	t.Parallel()
	empty := hostinfo.Read(fstest.MapFS{}, nil)
	assert.Equal(t, &hostinfo.Host{}, empty)
	assert.Equal(t, empty, hostinfo.Read(refusing{errors.New("input/output error")}, nil))
	assert.NotPanics(t, func() { hostinfo.Read(refusing{fs.ErrPermission}, nil) })
	assert.Zero(t, empty.CPU.Usable())
}

func TestHostJSONRoundTrip(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "..", "testdata", "hosts", "*.txtar"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(files), 6)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		h := captured(t, name)
		b, err := json.Marshal(h)
		require.NoError(t, err)
		again := new(hostinfo.Host)
		require.NoError(t, json.Unmarshal(b, again))
		assert.Equal(t, h, again, name)
	}
}

// This host's numbers are read whole, also those of /proc/sys, which give only as much as the first read asks for.
func TestRootReadsWholeFiles(t *testing.T) {
	t.Parallel()
	const name = "proc/sys/vm/max_map_count"
	want, err := os.ReadFile("/" + name)
	if err != nil {
		t.Skip(err)
	}
	got, err := fs.ReadFile(hostinfo.Root(), name)
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got))
	n, err := strconv.Atoi(strings.TrimSpace(string(want)))
	require.NoError(t, err)
	assert.Equal(t, n, hostinfo.Read(hostinfo.Root(), nil).Memory.MaxMappings.N)
}
