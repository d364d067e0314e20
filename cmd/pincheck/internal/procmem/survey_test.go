package procmem

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const surveyMaps = "7e1000000000-7e1000400000 r-xp 00000000 00:01 7 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n" +
	"7e1100000000-7e1100400000 r-xp 00000000 00:01 8 /opt/venv/torch/lib/libtorch_cuda.so\n" +
	"7e2000000000-7e2080000000 rw-s 00000000 00:01 9 /dev/zero (deleted)\n" +
	"7e3000000000-7e3080000000 r--p 00000000 00:02 10 /models/a b/model-1.safetensors\n" +
	"7e3080000000-7e30c0000000 r--p 80000000 00:02 10 /models/a b/model-1.safetensors\n"

func TestSurvey(t *testing.T) {
	t.Parallel()
	fsys := fstest.MapFS{
		"proc/7/maps":   {Data: []byte(surveyMaps)},
		"proc/7/status": {Data: []byte(status)},
		"proc/8/maps":   {Data: []byte("7e2000000000-7e2080000000 rw-s 00000000 00:01 9 /dev/zero (deleted)\n")},
		"proc/9/maps":   {Data: []byte(surveyMaps)},
		"proc/10/maps":  {Data: []byte("not maps\n")},
		"proc/meminfo":  {},
	}
	found := Survey(fsys, 9)
	require.Len(t, found, 1, "8 does not use the driver, 9 asks, 10 cannot be read")
	s := found[0]
	assert.Equal(t, 7, s.PID)
	assert.Equal(t, "python3", s.Name)
	assert.Equal(t, 5, s.Mappings)
	assert.Equal(t, 2<<30, s.HostAllocated)
	require.Len(t, s.Frameworks, 1)
	assert.Equal(t, "PyTorch", s.Frameworks[0].Name)
	assert.Equal(t, []MappedFile{{"/models/a b/model-1.safetensors", 3 << 30}}, s.Weights)
	bytes, blocks, likely := s.Rounded()
	assert.Equal(t, 2<<30, bytes)
	assert.Equal(t, 1, blocks)
	assert.True(t, likely)
	assert.Empty(t, Survey(fstest.MapFS{}, 1))
}
