package findlib

import (
	"path"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

const mapsOfTwoLibraries = `55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 1311 /usr/bin/app
7f3c00000000-7f3c00021000 rw-p 00000000 00:00 0
7f3c10000000-7f3c10010000 rw-s 00000000 00:01 77                         /memfd:libcudart.so.12 (deleted)
7f3c20000000-7f3c20010000 rw-p 00000000 00:00 0                          [anon:x/libcudart.so.12]
7f3c30000000-7f3c30080000 r-xp 00000000 08:01 1400                       /opt/my libs/libcudart.so.12.4.127
7f3c30080000-7f3c30090000 r--p 00080000 08:01 1400                       /opt/my libs/libcudart.so.12.4.127
7f3c40000000-7f3c40080000 r-xp 00000000 08:01 1401                       /v/nvidia/cu13/lib/libcudart.so.13 (deleted)
7f3c50000000-7f3c50080000 r-xp 00000000 08:01 1402                       /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
`

var libcudartNames = Host{}.search(libcudart).file.MatchString

func withMaps(text string) Host {
	return Host{maps: func() ([]linux.Mapping, error) { return linux.ParseMaps(text) }}
}

func TestMapped(t *testing.T) {
	t.Parallel()
	files, note := withMaps(mapsOfTwoLibraries).mapped(libcudartNames)
	assert.Equal(t, []linux.MappedFile{
		{Path: "/opt/my libs/libcudart.so.12.4.127"},
		{Path: "/v/nvidia/cu13/lib/libcudart.so.13", Deleted: true},
	}, files)
	assert.Empty(t, note)
	files, note = withMaps("").mapped(libcudartNames)
	assert.Empty(t, files)
	assert.Empty(t, note)
	files, note = withMaps("/libcudart.so.12").mapped(libcudartNames)
	assert.Empty(t, files, "a line that is cut off is not a mapping")
	assert.Contains(t, note, "is not a mapping")
}

func FuzzMapped(f *testing.F) {
	f.Add(mapsOfTwoLibraries)
	f.Add("7f00-7f10 r-xp 0 08:01 1 /libcudart.so (deleted) (deleted)\n")
	f.Add(" /\n /libcudart.so.12\r\n\x00 /a/../libcudart.so.13")
	f.Fuzz(func(t *testing.T, text string) {
		files, note := withMaps(text).mapped(libcudartNames)
		_, err := linux.ParseMaps(text)
		require.Equal(t, err != nil, note != "")
		for _, m := range files {
			assert.True(t, libcudartNames(path.Base(m.Path)), "%q", m.Path)
		}
	})
}
