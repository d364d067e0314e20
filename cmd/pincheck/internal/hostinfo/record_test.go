package hostinfo_test

import (
	"io/fs"
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
