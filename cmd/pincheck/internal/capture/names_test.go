package capture_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
)

func TestWithoutNames(t *testing.T) {
	t.Parallel()
	a := &capture.Archive{
		Host: fstest.MapFS{
			"proc/self/mountinfo": {Data: []byte(`31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
40 23 0:50 / /home/alice/data rw - nfs4 nas7.example.com:/export/alice rw,vers=4.2,addr=10.1.2.3,clientaddr=10.1.2.4
41 23 0:51 / /mnt rw - nfs4 10.1.2.3:/x rw,addr=fd00:12::7
42 23 0:52 / /win rw - cifs //filer/share rw
`)},
			"proc/self/cgroup":                      {Data: []byte("0::/user.slice/job@gpu17\n4:memory:/x\n")},
			"proc/sys/kernel/osrelease":             {Data: []byte("5.15.153.1-microsoft-standard-WSL2\n")},
			"proc/driver/nvidia/version":            {Data: []byte("NVRM version: NVIDIA UNIX x86_64  580.159.04  (root@gpu17.example.com)\n")},
			"sys/bus/pci/devices/0000:00:06.0/numa": {Data: []byte("0000:00:06.0 00000000:06:00.0 96.00.cf.00.01 127.0.0.1 e4:1d:2d:aa:bb:cc e4:1d:2d:aa:bb:cc\n")},
			"dev/nvidia0":                           {Mode: fs.ModeDevice},
		},
		Environ: []string{"CUDA_VISIBLE_DEVICES=GPU-5d4c8b1e,GPU-5d4c8b1f", "LD_LIBRARY_PATH=/home/alice/lib:/home/bob/lib:/usr/lib"},
		Facts:   []byte(`{"uuid":"GPU-5d4c8b1e-0123-4567-89ab-0123456789ab","driver":"13.580.159.04","path":"/data/alice/x.so"}`),
	}
	got := a.WithoutNames(capture.Names{Hosts: []string{"gpu17.example.com"}, Users: []string{"alice", "root"}})
	text := func(name string) string { return string(got.Host[name].Data) }
	assert.JSONEq(t, `{"uuid":"GPU-00000001-0000-0000-0000-000000000000","driver":"13.580.159.04","path":"/data/user-1/x.so"}`, string(got.Facts))
	assert.Equal(t, `31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
40 23 0:50 / /home/user-1/data rw - nfs4 host-3:/export/user-1 rw,vers=4.2,addr=192.0.2.1,clientaddr=192.0.2.2
41 23 0:51 / /mnt rw - nfs4 192.0.2.1:/x rw,addr=2001:db8::1
42 23 0:52 / /win rw - cifs //host-4/share rw
`, text("proc/self/mountinfo"))
	assert.Equal(t, "0::/user.slice/job@host-2\n4:memory:/x\n", text("proc/self/cgroup"))
	assert.Equal(t, "5.15.153.1-microsoft-standard-WSL2\n", text("proc/sys/kernel/osrelease"), "a version")
	assert.Equal(t, "NVRM version: NVIDIA UNIX x86_64  580.159.04  (root@host-1)\n", text("proc/driver/nvidia/version"))
	assert.Equal(t, "0000:00:06.0 00000000:06:00.0 96.00.cf.00.01 127.0.0.1 00:00:5e:00:53:01 00:00:5e:00:53:01\n", text("sys/bus/pci/devices/0000:00:06.0/numa"))
	assert.Equal(t, []string{"CUDA_VISIBLE_DEVICES=GPU-00000001,GPU-00000002", "LD_LIBRARY_PATH=/home/user-1/lib:/home/user-2/lib:/usr/lib"}, got.Environ)
	assert.Equal(t, fs.ModeDevice, got.Host["dev/nvidia0"].Mode)
	assert.Contains(t, string(a.Facts), "5d4c8b1e", "the archive itself stays")

	assert.Nil(t, (&capture.Archive{}).WithoutNames(capture.Names{}).Facts)
}

// A host whose name is a word of the kernel's paths keeps them.
func TestNamesOfPathsStay(t *testing.T) {
	t.Parallel()
	a := &capture.Archive{Host: fstest.MapFS{"proc/sys/vm/max_map_count": {Data: []byte("65530\n")}}}
	for _, host := range []string{"vm", "VM", "sys", "proc", "gpu"} {
		assert.Contains(t, a.WithoutNames(capture.Names{Hosts: []string{host}}).Host, "proc/sys/vm/max_map_count", host)
	}
}
