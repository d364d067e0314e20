//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestFoldersOfTheLoadersConfiguration(t *testing.T) {
	t.Parallel()
	f := fakeFinder(makeTree(t,
		"/etc/ld.so.conf = # top\ninclude ld.so.conf.d/*.conf\n/opt/last/lib # told here\nhwcap 0 nosegneg\nrelative\n",
		"/etc/ld.so.conf.d/000_cuda.conf = /opt/cuda-12.9/lib/\n\n",
		"/etc/ld.so.conf.d/loop.conf = include /etc/ld.so.conf /etc/ld.so.conf.d/loop.conf /etc/nothing.conf",
		"/etc/ld.so.conf.d/README = /not/this",
		"/opt/cuda-12.9/lib/libcudart.so.12.9.79",
		"/opt/cuda-12.9/lib/libcudart.so.12 -> libcudart.so.12.9.79",
	), nil, "")
	assert.Equal(t, []string{"/opt/cuda-12.9/lib", "/opt/last/lib"}, f.ldsoDirs())
	list, _ := f.candidates()
	assert.Equal(t, append([]candidate{{"/opt/cuda-12.9/lib/libcudart.so.12.9.79", "loader path", 12090}}, fromLoader...), list)
}
