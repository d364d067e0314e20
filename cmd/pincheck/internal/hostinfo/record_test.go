package hostinfo_test

import (
	"io/fs"
	"path"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttext"
)

// Devices in /sys are links to directories elsewhere: what is read through them, and what
// is read at their targets, must both be in the recording.
func TestRecordingThroughLinkedDirectories(t *testing.T) {
	host := fstest.MapFS{
		"sys/bus/pci/devices/0000:01:00.0":                                {Mode: fs.ModeSymlink | 0o777, Data: []byte("../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0")},
		"sys/devices/pci0000:00/0000:00:01.0/max_link_width":              {Data: []byte("16\n")},
		"sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/vendor":         {Data: []byte("0x10de\n")},
		"sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/max_link_width": {Data: []byte("8\n")},
	}
	rec := hostinfo.Record(host)
	read := func(fsys fs.FS) (text string) {
		for _, name := range []string{"sys/bus/pci/devices/0000:01:00.0/vendor", "sys/bus/pci/devices/0000:01:00.0/max_link_width", "sys/devices/pci0000:00/0000:00:01.0/max_link_width"} {
			b, err := fs.ReadFile(fsys, name)
			require.NoError(t, err, name)
			text += string(b)
		}
		target, err := fs.ReadLink(fsys, "sys/bus/pci/devices/0000:01:00.0")
		require.NoError(t, err)
		return text + target
	}
	live := read(rec)
	again, err := hosttext.Parse(hosttext.Format("a host", rec.Host()))
	require.NoError(t, err)
	assert.Equal(t, live, read(again))
}

// absoluteLinks is a host whose links to directories are absolute, as those of update-alternatives are.
type absoluteLinks struct{ fstest.MapFS }

func (a absoluteLinks) ReadLink(name string) (string, error) {
	target, err := a.MapFS.ReadLink(name)
	if strings.HasPrefix(target, "lib") {
		return target, err
	}
	return "/" + path.Join(path.Dir(name), target), err
}

// The driver's libraries below /usr/local/cuda, a link to a link, are where they were when the recording is read.
func TestRecordingThroughChainsOfLinks(t *testing.T) {
	t.Parallel()
	link := func(target string) *fstest.MapFile {
		return &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(target)}
	}
	relative := fstest.MapFS{
		"usr/local/cuda":                               link("../../etc/alternatives/cuda"),
		"usr/local/cuda-13":                            link("../../etc/alternatives/cuda-13"),
		"etc/alternatives/cuda":                        link("../../usr/local/cuda-13"),
		"etc/alternatives/cuda-13":                     link("../../usr/local/cuda-13.0"),
		"usr/local/cuda-13.0/compat/libcuda.so.590.10": {Data: []byte("a library\n")},
		"usr/local/cuda-13.0/compat/libcuda.so.1":      link("libcuda.so.590.10"),
		"usr/local/loop":                               link("loop"),
	}
	for _, host := range []fs.FS{relative, absoluteLinks{relative}} {
		rec := hostinfo.Record(host)
		live := hostinfo.Read(rec, nil).NVIDIA.Libraries
		require.Len(t, live, 3, "%v", live)
		again, err := hosttext.Parse(hosttext.Format("a host", rec.Host()))
		require.NoError(t, err)
		assert.Equal(t, live, hostinfo.Read(again, nil).NVIDIA.Libraries)
	}
}

// What is read through a Recorder is recorded; what is only listed is not.
func TestRecorder(t *testing.T) {
	t.Parallel()
	rec := hostinfo.Record(fstest.MapFS{
		"proc/self/status": {Data: []byte("Name:\tsecret\nCpus_allowed_list:\t0-3\n")},
		"lib/libc.so.6":    {Data: []byte("\x7fELF\x00GNU C Library (X) stable release version 2.39.\n\x00more")},
		"dev/nvidia0":      {Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666},
		"dev/sda":          {Mode: fs.ModeDevice | 0o600},
		"link":             {Mode: fs.ModeSymlink, Data: []byte("dev")},
	})
	all, err := fs.ReadFile(rec, "proc/self/status")
	require.NoError(t, err)
	assert.Contains(t, string(all), "secret", "the reader gets everything")
	_, err = fs.ReadFile(rec, "lib/libc.so.6")
	require.NoError(t, err)
	_, err = fs.ReadDir(rec, "dev")
	require.NoError(t, err)
	_, err = fs.Stat(rec, "dev/nvidia0")
	require.NoError(t, err)
	_, err = fs.ReadLink(rec, "link")
	require.NoError(t, err)
	_, err = rec.Open("missing")
	require.ErrorIs(t, err, fs.ErrNotExist)

	host := rec.Host()
	assert.Len(t, host, 4)
	assert.Equal(t, "Cpus_allowed_list:\t0-3\n", string(host["proc/self/status"].Data))
	assert.Equal(t, "GNU C Library (X) stable release version 2.39.\n", string(host["lib/libc.so.6"].Data))
	assert.NotZero(t, host["dev/nvidia0"].Mode&fs.ModeDevice)
	assert.NotContains(t, host, "dev/sda")
}

// Files that name hosts, or have bytes that no text has, are recorded as a reader reads them.
func TestRecordingsReadTheSameAgain(t *testing.T) {
	t.Parallel()
	const secureBoot = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
	host := fstest.MapFS{
		"etc/nvidia/gridd.conf":                  {Data: []byte("FeatureType=1\nServerAddress=licence.example.com\n")},
		secureBoot:                               {Data: []byte{6, 0, 0, 0, 1}},
		"proc/self/attr/current":                 {Data: []byte("system_u:system_r:container_t:s0:c1,c2\x00")},
		"proc/device-tree/model":                 {Data: []byte("NVIDIA Jetson AGX Thor Developer Kit\x00")},
		"proc/cmdline":                           {Data: []byte("root=/dev/secret nokaslr\n")},
		"proc/devices":                           {Data: []byte("Character devices:\n195 nvidia\n509 nvidia-uvm\n\nBlock devices:\n8 sd\n")},
		"proc/spl/kstat/zfs/arcstats":            {Data: []byte("13 1 0x01 147\nname type data\nhits 4 5\nsize 4 9000\nc_min 4 1000\n")},
		"proc/self/limits":                       {Data: []byte("Max address space         46000  unlimited  bytes\nMax open files            24  1048576  files\n")},
		"sys/power/suspend_stats/success":        {Data: []byte("3\n")},
		"sys/bus/pci/devices/0000:01:00.0/class": {Data: []byte("0x030000\n")},
	}
	rec := hostinfo.Record(host)
	live := hostinfo.Read(rec, nil)
	text := hosttext.Format("", rec.Host())
	for _, secret := range []string{"licence.example.com", "/dev/secret"} {
		assert.NotContains(t, text, secret)
	}
	again, err := hosttext.Parse(text)
	require.NoError(t, err)
	assert.Equal(t, live, hostinfo.Read(again, nil))

	assert.True(t, *live.Security.SecureBoot)
	assert.Equal(t, "container_t", live.Security.Confinement)
	assert.True(t, live.Virt.Tegra)
	assert.Equal(t, []string{"nokaslr"}, live.Kernel.Parameters)
	assert.Equal(t, map[string]int{"nvidia": 195, "nvidia-uvm": 509}, live.NVIDIA.Majors)
	assert.True(t, *live.NVIDIA.LicenceServer)
	assert.Equal(t, 9000, live.Memory.ZFSCache)
	assert.Equal(t, 8000, live.Memory.ZFSFree)
	assert.Equal(t, 24, live.OpenFiles.N)
	assert.Equal(t, 46000, live.AddressSpace.N)
	assert.Equal(t, 3, live.Kernel.Suspended.N)
}
