package hosttext_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hostinfo/hosttext"
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
	rec := hosttext.Record(host)
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
