//go:build linux

package findlib

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDirectoriesOfTheLoadersConfiguration(t *testing.T) {
	t.Parallel()
	h := fakeHost(makeTree(t,
		"/etc/ld.so.conf = # top\ninclude ld.so.conf.d/*.conf\n/opt/last/lib # named here\nhwcap 0 nosegneg\nrelative\n",
		"/etc/ld.so.conf.d/000_cuda.conf = /opt/cuda-12.9/lib/\n\n",
		"/etc/ld.so.conf.d/loop.conf = include /etc/ld.so.conf /etc/ld.so.conf.d/loop.conf /etc/nothing.conf",
		"/etc/ld.so.conf.d/README = /not/this",
		"/opt/cuda-12.9/lib/libcudart.so.12.9.79",
		"/opt/cuda-12.9/lib/libcudart.so.12 -> libcudart.so.12.9.79",
	), nil, "")
	assert.Equal(t, []string{"/opt/cuda-12.9/lib", "/opt/last/lib"}, h.loaderConfigDirs())
	h.env = func(name string) string { return map[string]string{"LD_LIBRARY_PATH": "/first:rel;/second/"}[name] }
	assert.Equal(t, append([]string{"/first", "/second", "/opt/cuda-12.9/lib", "/opt/last/lib"}, h.systemDirs()...), h.loaderDirs())
	list, _ := h.Find(libcudart)
	assert.Equal(t, append([]Candidate{{"/opt/cuda-12.9/lib/libcudart.so.12.9.79", "loader path", Version{12, 9}}}, fromLoader...), list)
}
