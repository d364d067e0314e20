//go:build linux

package findlib

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDriver(t *testing.T) {
	t.Parallel()
	const version = "/proc/driver/nvidia/version = NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (bot@host)  Tue Mar 3 10:00:00 UTC 2026\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
	for name, tt := range map[string]struct {
		tree []string
		env  map[string]string
		maps string
		want Driver
	}{
		"no driver": {tree: []string{"/dev/null", "/usr/local/cuda/lib64/stubs/libcuda.so"}},
		"installed whole": {
			tree: []string{
				version, "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia11", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/nvidia-caps/",
				"/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.580.159.04",
				"/usr/lib/x86_64-linux-gnu/libcuda.so.1 -> nvidia/current/libcuda.so.580.159.04",
			},
			want: Driver{"/usr/lib/x86_64-linux-gnu/libcuda.so.1", "580.159.04",
				[]string{"/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia11", "/dev/nvidiactl"}},
		},
		"container with the module and nodes, but no library": {
			tree: []string{version, "/dev/nvidiactl", "/dev/nvidia3", "/usr/lib64/libcuda.so.1 -> gone"},
			want: Driver{"", "580.159.04", []string{"/dev/nvidia3", "/dev/nvidiactl"}},
		},
		"older module's wording, library from LD_LIBRARY_PATH": {
			tree: []string{
				"/proc/driver/nvidia/version = NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021",
				"/driver/libcuda.so.1", "/usr/lib64/libcuda.so.1",
			},
			env:  map[string]string{"LD_LIBRARY_PATH": "::/driver"},
			want: Driver{"/driver/libcuda.so.1", "470.57.02", nil},
		},
		"WSL": {
			tree: []string{"/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"},
			want: Driver{"/usr/lib/wsl/lib/libcuda.so.1", "", []string{"/dev/dxg"}},
		},
		"loaded already": {
			maps: mapsOfTwoLibraries,
			want: Driver{"/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "", nil},
		},
		"library in a directory of the loader's configuration": {
			tree: []string{"/etc/ld.so.conf = /usr/lib/nvidia-470\n", "/usr/lib/nvidia-470/libcuda.so.1"},
			want: Driver{"/usr/lib/nvidia-470/libcuda.so.1", "", nil},
		},
		"library directory of a container runtime": {
			tree: []string{"/usr/local/nvidia/lib64/libcuda.so.1", "/proc/driver/nvidia/version = unreadable words"},
			want: Driver{"/usr/local/nvidia/lib64/libcuda.so.1", "", nil},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, tt.want, fakeHost(makeTree(t, tt.tree...), tt.env, tt.maps).Driver())
		})
	}
}
