package hostinfo

import (
	"encoding/json"
	"testing"
	"testing/fstest"
)

// Every file of a host has the same fuzzed contents. Reading it must neither panic nor
// hang, and the result must have a JSON form.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		"", "0x10de", "0x030200", "-1", "16", "32.0 GT/s PCIe", "0-3,8", "max 100000", "150000 100000",
		"0::/a/b\n4:memory:/x\n", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n32 31 0:29 /x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,cpu\n",
		"MemTotal: 24682416 kB\n", "Node 0 MemTotal: 12 kB\n", "always [madvise] never",
		"Max locked memory         8388608              8388608              bytes\n",
		"NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  x\n", "processor\t: 0\nflags\t: hypervisor\n",
		"GNU C Library (x) stable release version 2.39", "ID=\"x\nVERSION_ID='\n", "9223372036854775807",
		"nvidia_uvm 1 2\n", "99999999999999999999999-1",
		"Node 0, zone   Normal      4      4      3      0      0      0      0      0      1      1    600 \n",
		"compact_stall 12\nthp_fault_fallback 9\n", "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t44\nCapEff:\t0\n", "c 195:* rw\n",
		"TOTAL_ERR_FATAL 3\n", "\xff\xff\xff\xff", "36 35 98:0 / /data rw - nfs4 host:/x rw\n",
	} {
		f.Add(seed)
	}
	files := []string{
		"dev/nvidia0", "etc/os-release", "lib64/ld-linux-x86-64.so.2", "lib64/libc.so.6",
		"proc/cpuinfo", "proc/meminfo", "proc/modules", "proc/driver/nvidia/version",
		"proc/driver/nvidia/gpus/0000:00:06.0/information",
		"proc/self/cgroup", "proc/self/limits", "proc/self/mountinfo", "proc/self/status",
		"proc/sys/kernel/osrelease", "proc/sys/vm/overcommit_memory",
		"sys/bus/pci/devices/0000:00:06.0/current_link_speed", "sys/bus/pci/devices/0000:00:06.0/current_link_width",
		"sys/bus/pci/devices/0000:00:06.0/numa_node", "sys/devices/system/cpu/online",
		"sys/devices/system/node/node0/meminfo", "sys/devices/system/node/node0/distance",
		"sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",
		"sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.high", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/cpu.max",
		"sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes",
		"sys/fs/cgroup/memory/cpu.cfs_quota_us", "sys/fs/cgroup/memory/cpu.cfs_period_us",
		"sys/kernel/mm/transparent_hugepage/enabled",
		"proc/buddyinfo", "proc/vmstat", "proc/sys/vm/max_map_count", "sys/class/bdi/0:28/read_ahead_kb",
		"sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "sys/fs/cgroup/memory/devices.list",
		"sys/bus/pci/devices/0000:00:06.0/config", "sys/bus/pci/devices/0000:00:06.0/aer_dev_fatal", "sys/bus/pci/devices/0000:00:06.0/iommu_group/type",
		"sys/bus/pci/devices/0000:00:06.0/driver_override", "proc/driver/nvidia/params", "proc/cmdline", "etc/modprobe.d/nvidia.conf",
	}
	f.Fuzz(func(t *testing.T, text string) {
		host := fstest.MapFS{
			"sys/bus/pci/devices/0000:00:06.0/vendor": {Data: []byte("0x10de")},
			"sys/bus/pci/devices/0000:00:06.0/class":  {Data: []byte("0x030200")},
		}
		for _, name := range files {
			host[name] = &fstest.MapFile{Data: []byte(text)}
		}
		check(t, host)
		// The same with valid groups and mounts, so that the files after them are
		// read.
		host["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("0::/\n")}
		host["proc/self/mountinfo"] = &fstest.MapFile{Data: []byte("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")}
		check(t, host)
		host["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("2:memory,cpu:/\n")}
		host["proc/self/mountinfo"] = &fstest.MapFile{Data: []byte("31 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,cpu\n")}
		check(t, host)
	})
}

func check(t *testing.T, host fstest.MapFS) {
	t.Helper()
	h := Read(host, nil)
	if _, err := json.Marshal(h); err != nil {
		t.Fatal(err)
	}
	if n, ok := h.Cgroup.Headroom.Finite(); ok && n < 0 {
		t.Fatalf("headroom %d", n)
	}
	for _, g := range h.GPUs {
		if r := g.Link.Now().Rate(); r < 0 || r != r {
			t.Fatalf("link rate %v", r)
		}
	}
}
