//go:build linux

package findlib

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// makeTree makes a host's files below a new root: "/a/b" is a file, "/a/b/" a
// directory, "/a/b -> c" a link and "/a/b = text" a file with contents. Links to
// absolute paths stay inside the root.
func makeTree(t *testing.T, entries ...string) (root string) {
	t.Helper()
	root = t.TempDir()
	for _, entry := range entries {
		name, target, isLink := strings.Cut(entry, " -> ")
		name, text, _ := strings.Cut(name, " = ")
		file := root + name
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		switch {
		case isLink && strings.HasPrefix(target, "/"):
			require.NoError(t, os.Symlink(root+target, file))
		case isLink:
			require.NoError(t, os.Symlink(target, file))
		case strings.HasSuffix(name, "/"):
			require.NoError(t, os.MkdirAll(file, 0o755))
		default:
			require.NoError(t, os.WriteFile(file, []byte(text), 0o755))
		}
	}
	return root
}

// fakeHost is a tree of files, seen by a process with that environment and maps.
func fakeHost(root string, env map[string]string, maps string) Host {
	return Host{
		root: root,
		arch: "amd64",
		env:  func(name string) string { return env[name] },
		home: "/home/gopher",
		maps: func() ([]linux.Mapping, error) { return linux.ParseMaps(maps) },
	}
}

// The loader is asked on every host.
var fromLoader = []Candidate{
	{"libcudart.so.13", "loader path", Version{13, 0}},
	{"libcudart.so.12", "loader path", Version{12, 0}},
	{"libcudart.so.11.0", "loader path", Version{11, 0}},
}

func TestFind(t *testing.T) {
	t.Parallel()
	type env = map[string]string
	for name, tt := range map[string]struct {
		tree     []string
		env      env
		maps     string
		before   []Candidate // ahead of the loader's
		after    []Candidate
		searched []string // must be among the places searched at
	}{
		"nothing at all": {
			searched: []string{
				"libraries loaded already (/proc/self/maps)",
				"$VIRTUAL_ENV (not set)",
				"$CONDA_PREFIX (not set)",
				"python3 (not on $PATH)",
				"/home/gopher/.local/lib/python3*/{site,dist}-packages/{nvidia/cu*,torch}/lib",
				"/usr/lib/python3*/{site,dist}-packages/{nvidia/cu*,torch}/lib",
				"$LD_LIBRARY_PATH (no absolute directory in it)",
				"the loader's own path, for libcudart.so.13, libcudart.so.12, libcudart.so.11.0",
				"$CUDA_PATH (not set)",
				"$CUDA_HOME (not set)",
				"/usr/local/cuda/{lib64,lib,targets/*/lib}",
				"/usr/local/cuda-* (none)",
				"/opt/cuda/{lib64,lib,targets/*/lib}",
				"/usr/lib/x86_64-linux-gnu",
				"/usr/lib/wsl/lib",
			},
		},
		"PyTorch's CUDA 13 wheel in a virtualenv": {
			tree: []string{
				"/app/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13",
				"/app/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublas.so.13",
				"/app/venv/lib/python3.12/site-packages/nvidia_cuda_runtime-13.0.96.dist-info/",
				"/app/venv/lib64 -> lib",
			},
			env:      env{"VIRTUAL_ENV": "/app/venv/"},
			before:   []Candidate{{"/app/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13", "wheel in $VIRTUAL_ENV", Version{13, 0}}},
			searched: []string{"$VIRTUAL_ENV = /app/venv/lib/python3*/{site,dist}-packages/{nvidia/cu*,torch}/lib"},
		},
		"cuda_runtime wheel, its minor version from the wheel's description": {
			tree: []string{
				"/app/venv/lib/python3.11/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
				"/app/venv/lib/python3.11/site-packages/nvidia_cuda_runtime_cu11-11.8.89.dist-info/",
				"/app/venv/lib/python3.11/site-packages/nvidia_cuda_runtime_cu12-12.8.90.dist-info/",
			},
			env:    env{"VIRTUAL_ENV": "/app/venv"},
			before: []Candidate{{"/app/venv/lib/python3.11/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12", "wheel in $VIRTUAL_ENV", Version{12, 8}}},
		},
		"old PyTorch with a renamed copy, user and system packages": {
			tree: []string{
				"/home/gopher/.local/lib/python3.9/site-packages/torch/lib/libcudart-d0da41ae.so.11.0",
				"/usr/local/lib/python3.11/dist-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
				"/usr/lib/python3/dist-packages/nvidia/cu13/lib/libcudart.so.13",
			},
			before: []Candidate{
				{"/home/gopher/.local/lib/python3.9/site-packages/torch/lib/libcudart-d0da41ae.so.11.0", "wheel in ~/.local", Version{11, 0}},
				{"/usr/local/lib/python3.11/dist-packages/nvidia/cuda_runtime/lib/libcudart.so.12", "wheel in /usr/local", Version{12, 0}},
				{"/usr/lib/python3/dist-packages/nvidia/cu13/lib/libcudart.so.13", "wheel in /usr", Version{13, 0}},
			},
		},
		"packages of the first python3 on PATH and of the one it was made from": {
			tree: []string{
				"/empty/",
				"/broken/python3 -> nowhere",
				"/srv/env/bin/python3 -> /opt/py/bin/python3.12",
				"/srv/env/pyvenv.cfg = home = /opt/copied/bin\nversion = 3.12.1\n",
				"/opt/py/bin/python3.12",
				"/usr/bin/python3",
				"/srv/env/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13",
				"/opt/py/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
				"/opt/copied/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.11.0",
			},
			env: env{"PATH": ":relative:/empty:/broken:/srv/env/bin:/usr/bin"},
			before: []Candidate{
				{"/srv/env/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13", "wheel of /srv/env/bin/python3", Version{13, 0}},
				{"/opt/py/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12", "wheel of /srv/env/bin/python3", Version{12, 0}},
				{"/opt/copied/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.11.0", "wheel of /srv/env/bin/python3", Version{11, 0}},
			},
			searched: []string{"wheels of /srv/env/bin/python3 (/srv/env, /opt/py, /opt/copied)"},
		},
		"conda: one file behind links in two directories, and a wheel": {
			tree: []string{
				"/conda/envs/x/targets/x86_64-linux/lib/libcudart.so.12.4.127",
				"/conda/envs/x/lib/libcudart.so.12.4.127 -> ../targets/x86_64-linux/lib/libcudart.so.12.4.127",
				"/conda/envs/x/lib/libcudart.so.12 -> libcudart.so.12.4.127",
				"/conda/envs/x/lib/libcudart.so -> libcudart.so.12.4.127",
				"/conda/envs/x/lib/python3.10/site-packages/nvidia/cu13/lib/libcudart.so.13",
			},
			env: env{"CONDA_PREFIX": "/conda/envs/x"},
			before: []Candidate{
				{"/conda/envs/x/lib/python3.10/site-packages/nvidia/cu13/lib/libcudart.so.13", "wheel in $CONDA_PREFIX", Version{13, 0}},
				{"/conda/envs/x/lib/libcudart.so.12.4.127", "$CONDA_PREFIX", Version{12, 4}},
			},
		},
		"several toolkits, one the default through two links": {
			tree: []string{
				"/usr/local/cuda-11.8/targets/x86_64-linux/lib/libcudart.so.11.8.89",
				"/usr/local/cuda-11.8/lib64 -> targets/x86_64-linux/lib",
				"/usr/local/cuda-12.4/targets/x86_64-linux/lib/libcudart.so.12.4.127",
				"/usr/local/cuda-12.4/targets/x86_64-linux/lib/libcudart.so.12 -> libcudart.so.12.4.127",
				"/usr/local/cuda-12.4/targets/x86_64-linux/lib/libcudart.so -> libcudart.so.12",
				"/usr/local/cuda-12.4/targets/sbsa-linux/lib/libcudart.so.12.4.127",
				"/usr/local/cuda-12.4/lib64 -> targets/x86_64-linux/lib",
				"/usr/local/cuda-13.0/lib64/libcudart.so.13.0.96",
				"/etc/alternatives/cuda -> /usr/local/cuda-12.4",
				"/usr/local/cuda -> /etc/alternatives/cuda",
				"/opt/cuda/lib64/libcudart.so.13.1.80",
			},
			after: []Candidate{
				{"/usr/local/cuda/lib64/libcudart.so.12.4.127", "/usr/local/cuda", Version{12, 4}},
				{"/usr/local/cuda-11.8/lib64/libcudart.so.11.8.89", "/usr/local/cuda-11.8", Version{11, 8}},
				{"/usr/local/cuda-13.0/lib64/libcudart.so.13.0.96", "/usr/local/cuda-13.0", Version{13, 0}},
				{"/opt/cuda/lib64/libcudart.so.13.1.80", "/opt/cuda", Version{13, 1}},
			},
			searched: []string{"/usr/local/cuda-12.4/{lib64,lib,targets/*/lib}"},
		},
		"CUDA_PATH before CUDA_HOME, and characters that mean something to a glob": {
			tree: []string{
				"/opt/[a]*/lib64/libcudart.so.12",
				"/opt/home/lib/libcudart.so.11.0",
			},
			env: env{"CUDA_HOME": "/opt/home", "CUDA_PATH": "/opt/[a]*", "CONDA_PREFIX": "envs/x"},
			after: []Candidate{
				{"/opt/[a]*/lib64/libcudart.so.12", "$CUDA_PATH", Version{12, 0}},
				{"/opt/home/lib/libcudart.so.11.0", "$CUDA_HOME", Version{11, 0}},
			},
			searched: []string{"$CONDA_PREFIX (not an absolute path: envs/x)"},
		},
		"LD_LIBRARY_PATH with empty and relative entries, twice the same": {
			tree: []string{
				"/a/libcudart.so.12.2.140",
				"/b/libcudart.so.13",
				"/link -> /a",
				"/libcudart.so.11.0",
			},
			env: env{"LD_LIBRARY_PATH": ":/a/::lib:/link;/b:"},
			before: []Candidate{
				{"/a/libcudart.so.12.2.140", "$LD_LIBRARY_PATH", Version{12, 2}},
				{"/b/libcudart.so.13", "$LD_LIBRARY_PATH", Version{13, 0}},
			},
			searched: []string{"$LD_LIBRARY_PATH = /a:/link:/b"},
		},
		"Debian's two versions side by side, WSL": {
			tree: []string{
				"/usr/lib/x86_64-linux-gnu/libcudart.so.11.8.89",
				"/usr/lib/x86_64-linux-gnu/libcudart.so.11.0 -> libcudart.so.11.8.89",
				"/usr/lib/x86_64-linux-gnu/libcudart.so.12.4.127",
				"/usr/lib/x86_64-linux-gnu/libcudart.so.12 -> libcudart.so.12.4.127",
				"/usr/lib/x86_64-linux-gnu/libcudart_static.a",
				"/usr/lib/aarch64-linux-gnu/libcudart.so.12.4.127",
				"/usr/lib/wsl/lib/libcudart.so.12",
			},
			after: []Candidate{
				{"/usr/lib/x86_64-linux-gnu/libcudart.so.12.4.127", "/usr/lib/x86_64-linux-gnu", Version{12, 4}},
				{"/usr/lib/x86_64-linux-gnu/libcudart.so.11.8.89", "/usr/lib/x86_64-linux-gnu", Version{11, 8}},
				{"/usr/lib/wsl/lib/libcudart.so.12", "/usr/lib/wsl/lib", Version{12, 0}},
			},
		},
		"broken links, a directory named as the library, a loop instead of a directory": {
			tree: []string{
				"/usr/local/cuda/lib64/libcudart.so -> libcudart.so.12",
				"/usr/local/cuda/lib64/libcudart.so.13/",
				"/opt/cuda/lib64 -> lib64",
				"/opt/cuda/lib",
			},
			searched: []string{
				"/usr/local/cuda/{lib64,lib,targets/*/lib} (/usr/local/cuda/lib64/libcudart.so.13: not a file; /usr/local/cuda/lib64/libcudart.so: broken link)",
				"/opt/cuda/{lib64,lib,targets/*/lib} (/opt/cuda/lib64: too many levels of symbolic links)",
			},
		},
		"loaded already, the same file as a toolkit's": {
			tree: []string{
				"/usr/local/cuda-12.4/lib64/libcudart.so.12.4.127",
				"/usr/local/cuda -> cuda-12.4",
			},
			maps: "7f00-7f10 r-xp 00000000 08:01 42    /usr/local/cuda-12.4/lib64/libcudart.so.12.4.127\n" +
				"7f10-7f20 r--p 00010000 08:01 42    /usr/local/cuda-12.4/lib64/libcudart.so.12.4.127\n",
			before: []Candidate{{"/usr/local/cuda-12.4/lib64/libcudart.so.12.4.127", "loaded already", Version{12, 4}}},
		},
		"loaded already, then replaced by an upgrade": {
			tree: []string{"/usr/local/cuda/lib64/libcudart.so.13"},
			maps: "7f00-7f10 r-xp 00000000 08:01 42    /usr/local/cuda/lib64/libcudart.so.13 (deleted)\n" +
				"7f20-7f30 r-xp 00000000 08:01 43    /old/libcudart.so.10.2 (deleted)\n",
			before: []Candidate{{"libcudart.so.13", "loaded already, its file deleted since", Version{13, 0}}},
			after:  []Candidate{{"/usr/local/cuda/lib64/libcudart.so.13", "/usr/local/cuda", Version{13, 0}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list, searched := fakeHost(makeTree(t, tt.tree...), tt.env, tt.maps).Find(libcudart)
			want := append([]Candidate{}, tt.before...)
			for _, c := range fromLoader {
				if len(tt.before) == 0 || tt.before[0].Path != c.Path {
					want = append(want, c)
				}
			}
			assert.Equal(t, append(want, tt.after...), list)
			for _, l := range tt.searched {
				assert.Contains(t, searched, l)
			}
			assert.Len(t, slices.Compact(slices.Sorted(slices.Values(searched))), len(searched), "no place twice")
		})
	}
}

func TestFindOnArm64(t *testing.T) {
	t.Parallel()
	f := fakeHost(makeTree(t,
		"/usr/local/cuda/targets/sbsa-linux/lib/libcudart.so.13.0.96",
		"/usr/local/cuda/targets/x86_64-linux/lib/libcudart.so.13.0.96",
		"/opt/cuda/targets/aarch64-linux/lib/libcudart.so.12.6.68",
		"/usr/lib/aarch64-linux-gnu/libcudart.so.12.4.127",
		"/usr/lib/x86_64-linux-gnu/libcudart.so.12.4.127",
	), nil, "")
	f.arch = "arm64"
	list, _ := f.Find(libcudart)
	assert.Equal(t, append(append([]Candidate{}, fromLoader...),
		Candidate{"/usr/local/cuda/targets/sbsa-linux/lib/libcudart.so.13.0.96", "/usr/local/cuda", Version{13, 0}},
		Candidate{"/opt/cuda/targets/aarch64-linux/lib/libcudart.so.12.6.68", "/opt/cuda", Version{12, 6}},
		Candidate{"/usr/lib/aarch64-linux-gnu/libcudart.so.12.4.127", "/usr/lib/aarch64-linux-gnu", Version{12, 4}},
	), list)
}

func TestFindOtherLibraries(t *testing.T) {
	t.Parallel()
	h := fakeHost(makeTree(t,
		"/app/venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
		"/app/venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"/app/venv/lib/python3.12/site-packages/nvidia_cuda_runtime_cu12-12.8.90.dist-info/",
		"/app/venv/lib/python3.12/site-packages/nvidia_cublas_cu12-12.4.5.8.dist-info/",
		"/app/venv/lib/python3.12/site-packages/torch/lib/libcublas.so.11",
		"/usr/local/cuda/lib64/libcublas.so.13.0.0.19",
		"/usr/local/cuda/lib64/stubs/libnvidia-ml.so",
		"/usr/local/cuda/lib64/libnvidia-ml.so.1",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> libnvidia-ml.so.580.159.04",
		"/usr/local/nvidia/lib64/libnvidia-ml.so.1",
	), map[string]string{"VIRTUAL_ENV": "/app/venv"}, "")

	list, searched := h.Find(libcublas)
	assert.Equal(t, []Candidate{
		{"/app/venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12", "wheel in $VIRTUAL_ENV", Version{12, 4}},
		{"libcublas.so.13", "loader path", Version{13, 0}},
		{"libcublas.so.12", "loader path", Version{12, 0}},
		{"/usr/local/cuda/lib64/libcublas.so.13.0.0.19", "/usr/local/cuda", Version{13, 0}},
	}, list)
	assert.Contains(t, searched, "$VIRTUAL_ENV = /app/venv/lib/python3*/{site,dist}-packages/{nvidia/cu*}/lib")

	list, searched = h.Find(nvml)
	assert.Equal(t, []Candidate{
		{"libnvidia-ml.so.1", "loader path", Version{1, 0}},
		{"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04", "/usr/lib/x86_64-linux-gnu", Version{580, 159}},
		{"/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/local/nvidia/lib64", Version{1, 0}},
	}, list)
	assert.Equal(t, []string{
		"libraries loaded already (/proc/self/maps)",
		"$LD_LIBRARY_PATH (no absolute directory in it)",
		"the loader's own path, for libnvidia-ml.so.1",
		"/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib", "/usr/lib64", "/usr/lib",
		"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/.singularity.d/libs", "/run/opengl-driver/lib",
	}, searched, "a library of the driver is in no wheel and no toolkit")
}

func TestVersionOfOneFile(t *testing.T) {
	t.Parallel()
	h := fakeHost(makeTree(t,
		"/lib/libcudart.so.12.4.127",
		"/lib/libcudart.so -> libcudart.so.12.4.127",
		"/v/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
		"/v/site-packages/nvidia_cuda_runtime_cu12-12.8.90.dist-info/",
	), nil, "")
	for p, want := range map[string]Version{
		"/lib/libcudart.so": {12, 4},
		"/v/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12": {12, 8},
		"libcudart.so.11.0":            {11, 0},
		"/absent/libcudart.so.13.1.80": {13, 1},
		"/lib/libc.so.6":               {},
	} {
		assert.Equal(t, want, h.Version(libcudart, p), p)
	}
}

// A place that cannot be read may be why nothing was found.
func TestUnreadablePlacesAreReported(t *testing.T) {
	t.Parallel()
	root := makeTree(t, "/opt/cuda/lib64/libcudart.so.12")
	require.NoError(t, os.Chmod(root+"/opt/cuda/lib64", 0))
	t.Cleanup(func() { _ = os.Chmod(root+"/opt/cuda/lib64", 0o755) })
	f := fakeHost(root, nil, "")
	f.maps = func() ([]linux.Mapping, error) {
		return nil, &fs.PathError{Op: "open", Path: "/proc/self/maps", Err: fs.ErrPermission}
	}
	list, searched := f.Find(libcudart)
	assert.Contains(t, searched, "libraries loaded already (/proc/self/maps) (permission denied)")
	if os.Geteuid() == 0 { // root reads it all the same
		assert.Contains(t, list, Candidate{"/opt/cuda/lib64/libcudart.so.12", "/opt/cuda", Version{12, 0}})
		return
	}
	assert.Equal(t, fromLoader, list)
	assert.Contains(t, searched, "/opt/cuda/{lib64,lib,targets/*/lib} (/opt/cuda/lib64: permission denied)")
}

// A user without a home, as in many containers, is no reason to look in /.local.
func TestNoHomeMeansNoUserPackages(t *testing.T) {
	t.Parallel()
	f := fakeHost(makeTree(t, "/.local/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13"), nil, "")
	f.home = ""
	list, searched := f.Find(libcudart)
	assert.Equal(t, fromLoader, list)
	assert.NotContains(t, strings.Join(searched, "\n"), "/.local")
}

func TestFindOnThisHost(t *testing.T) {
	t.Parallel()
	list, searched := This().Find(libcudart)
	assert.NotEmpty(t, searched)
	seen := map[string]bool{}
	for _, c := range list {
		assert.NotEmpty(t, c.Found, c.Path)
		assert.False(t, seen[c.Path], c.Path)
		seen[c.Path] = true
		if !filepath.IsAbs(c.Path) {
			assert.Contains(t, libcudart.Sonames, c.Path)
			continue
		}
		info, err := os.Stat(c.Path)
		require.NoError(t, err)
		assert.True(t, info.Mode().IsRegular(), c.Path)
	}
	for _, c := range fromLoader {
		assert.True(t, seen[c.Path], c.Path)
	}
}

func TestCauseLeavesOutThePath(t *testing.T) {
	t.Parallel()
	assert.Equal(t, fs.ErrPermission, cause(&fs.PathError{Op: "open", Path: "/x", Err: fs.ErrPermission}))
	assert.EqualError(t, cause(errors.New("odd")), "odd")
}
