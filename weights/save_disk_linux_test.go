package weights

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// smallDisk mounts a file system of 8 MiB.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("mount: %v (the test needs the right to mount)", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// fillUp writes a file until there is no space.
func fillUp(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, unix.ENOSPC)
}

// ways are the ways that bytes take to a file, as tensors and options: from the host, through the ring and by a
// snapshot.
func ways(t *testing.T, fill byte, size int) map[string]func() ([]SavedTensor, SaveOptions) {
	t.Helper()
	dev := testgpu.Device(t)
	host := bytes.Repeat([]byte{fill}, size)
	ptr := testgpu.ToDevice(t, dev, host)
	p, err := pool.New(dev, pool.Options{})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.Empty(t, p.Outstanding())
		require.NoError(t, p.Close())
	})
	one := func(host []byte, dev *cudart.Device, ptr cudart.DevPtr) []SavedTensor {
		s := SavedTensor{Name: "w", DType: U8, Shape: []int{size}, Host: host}
		if dev != nil {
			s.Memory = Memory{Device: dev, Ptr: ptr, Bytes: size}
		}
		return []SavedTensor{s}
	}
	return map[string]func() ([]SavedTensor, SaveOptions){
		"host":     func() ([]SavedTensor, SaveOptions) { return one(host, nil, 0), SaveOptions{} },
		"ring":     func() ([]SavedTensor, SaveOptions) { return one(nil, dev, ptr), SaveOptions{} },
		"snapshot": func() ([]SavedTensor, SaveOptions) { return one(nil, dev, ptr), SaveOptions{Snapshot: p} },
	}
}

// saveWith saves with a function that is called after each change.
func saveWith(t *testing.T, path string, tensors []SavedTensor, o SaveOptions, changed func(change) error) error {
	t.Helper()
	s := &Saving{path: path, o: o, changed: inTurn(changed)}
	if err := s.begin(t.Context(), tensors); err != nil {
		return err
	}
	return s.Wait(t.Context())
}

// A disk that others fill while a model is written leaves the model before, and so does one that cannot be written.
func TestFullAndReadOnlyDisks(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t)
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, saveAs(path, tensorsOf('a', 1000, 1000), 1, nothing))
	old, err := contents(path)
	require.NoError(t, err)
	requireOld := func(what string, others ...string) {
		t.Helper()
		now, err := contents(path)
		require.NoError(t, err, what)
		require.Equal(t, old, now, what)
		require.Len(t, filesIn(t, dir), 1+len(others), what)
	}
	const size = 5 << 20
	for name, way := range ways(t, 7, size) {
		tensors, o := way()
		filler := filepath.Join(dir, "filler")
		err := saveWith(t, path, tensors, o, func(c change) error {
			if c.call == "create" {
				fillUp(t, filler)
			}
			return nil
		})
		require.ErrorIs(t, err, unix.ENOSPC, name)
		require.ErrorContains(t, err, `tensor "w", at offset `, name)
		require.ErrorContains(t, err, dir+"/.model.", name)
		requireOld(name, filler)
		// The space is checked before.
		err = saveWith(t, path, tensors, o, nothing)
		require.ErrorIs(t, err, unix.ENOSPC, name)
		require.ErrorContains(t, err, "bytes free", name)
		requireOld(name, filler)
		require.NoError(t, os.Remove(filler))
	}
	require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	for name, way := range ways(t, 7, size) {
		tensors, o := way()
		err := saveWith(t, path, tensors, o, nothing)
		require.ErrorIs(t, err, unix.EROFS, name)
		require.ErrorContains(t, err, "weights: save "+path, name)
		requireOld(name)
	}
	require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=8m"))
	for name, way := range ways(t, 7, 2<<20) {
		tensors, o := way()
		require.NoError(t, saveWith(t, path, tensors, o, nothing), name)
		require.NoError(t, Verify(t.Context(), path), name)
	}
}

// An error at any write of a tensor's bytes leaves the model before, and names the tensor, the place and the file.
func TestInputOutputErrors(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{t.TempDir(), smallDisk(t)} {
		path := filepath.Join(dir, "model.safetensors")
		require.NoError(t, saveAs(path, tensorsOf('a', 1000, 1000), 1, nothing))
		old, err := contents(path)
		require.NoError(t, err)
		for name, way := range ways(t, 7, 3<<20+5) {
			for _, direct := range []bool{false, true} {
				for at := 1; ; at++ {
					tensors, o := way()
					o.DirectIO = direct
					writes := 0
					err := saveWith(t, path, tensors, o, func(c change) error {
						if c.call == "write" {
							writes++
						}
						if c.call == "write" && writes == at {
							return &os.PathError{Op: "write", Path: c.path, Err: unix.EIO}
						}
						return nil
					})
					if writes < at {
						require.NoError(t, err, name)
						require.Greater(t, at, 4, name) // with the header
						break
					}
					require.ErrorIs(t, err, unix.EIO, name)
					require.ErrorContains(t, err, dir+"/.model.", name)
					if at < writes || !strings.Contains(err.Error(), path+": "+dir) { // which is the header's
						require.ErrorContains(t, err, `tensor "w", at offset `, name)
					}
					now, err := contents(path)
					require.NoError(t, err, name)
					require.Equal(t, old, now, name)
					require.Len(t, filesIn(t, dir), 1, name)
				}
				require.NoError(t, saveAs(path, tensorsOf('a', 1000, 1000), 1, nothing))
			}
		}
	}
}

// quotaEnv makes the test binary a process that may write files of so many bytes, and saves a model.
const quotaEnv = "PINNED_TEST_SAVES_QUOTA"

// A limit of the size of files, which a process has as it may have a quota, leaves the model before.
func TestQuota(t *testing.T) {
	if dir := os.Getenv(quotaEnv); dir != "" {
		limit := unix.Rlimit{Cur: 100_000, Max: 100_000}
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &limit))
		fmt.Println(saveAs(filepath.Join(dir, "model.safetensors"), tensorsOf('A', 60_000, 60_000), 1, nothing))
		os.Exit(0)
	}
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, saveAs(path, tensorsOf('a', 1000), 1, nothing))
	old, err := contents(path)
	require.NoError(t, err)
	child := hosttest.Command(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), quotaEnv+"="+dir)
	out, err := child.CombinedOutput()
	var exit *exec.ExitError
	require.False(t, errors.As(err, &exit), "%s", out)
	require.NoError(t, err)
	assert.Contains(t, string(out), "file too large")
	assert.Contains(t, string(out), path+": "+dir+"/.model.")
	now, err := contents(path)
	require.NoError(t, err)
	assert.Equal(t, old, now)
	assert.Len(t, filesIn(t, dir), 1)
	assert.False(t, strings.Contains(string(out), "left behind"))
}
