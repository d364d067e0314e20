//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/hostmem/shm"
)

func TestAModelSleepsAndWakes(t *testing.T) {
	dir, err := os.MkdirTemp(shm.DefaultDir, "pinned-test-")
	require.NoError(t, err)
	defer func() { assert.NoError(t, os.Remove(dir)) }()
	file := filepath.Join(t.TempDir(), "model.bin")
	require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("weights "), 400_001), 0o600))
	require.Contains(t, exampletest.Run(t, main, "-sim", "-dir", dir, "sleep", "m", file), "asleep: 3200008 bytes")
	require.Contains(t, exampletest.Run(t, main, "-dir", dir, "list"), "model.bin")
	require.Contains(t, exampletest.Run(t, main, "-sim", "-dir", dir, "wake", "m"), "model.bin on")
	require.Contains(t, exampletest.Run(t, main, "-sim", "-dir", dir, "sleep", "m", file), "asleep")

	o, out := shm.Options{Dir: dir}, &bytes.Buffer{}
	require.NoError(t, os.WriteFile(file, []byte("another"), 0o600))
	require.ErrorContains(t, run(t.Context(), out, true, o, []string{"sleep", "m", file}), "remove it")
	m, err := shm.Open(t.Context(), "m", o)
	require.NoError(t, err)
	require.NoError(t, m.Begin())
	require.ErrorContains(t, run(t.Context(), out, true, o, []string{"wake", "m"}), "not complete")
	m.Bytes()[5]++
	require.NoError(t, m.Complete("00000000 model.bin"))
	require.ErrorContains(t, run(t.Context(), out, true, o, []string{"wake", "m"}), "not those of")
	require.NoError(t, m.Close())
	exampletest.Run(t, main, "-dir", dir, "remove", "m")
	require.ErrorIs(t, run(t.Context(), out, true, o, []string{"wake", "m"}), os.ErrNotExist)
	require.ErrorContains(t, run(t.Context(), out, true, o, nil), "want sleep")
}

// opened opens the memory "m" of a directory by the file for PyTorch, with a runtime that registers nothing.
const opened = `
import ctypes, pinned, sys
class Runtime:
    def cudaHostRegister(self, address, size, flags): return 0 if flags == pinned.REGISTER_READ_ONLY else 1
    def cudaHostUnregister(self, address): return 0
m = pinned.Shared("m", directory=sys.argv[1], runtime=Runtime())
print(m.size, *m.content(), ctypes.string_at(m._address, m.size))
m.close()
`

func TestPythonOpensTheSameMemory(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not installed: examples/pytorch/pinned.py is not tried")
	}
	dir, err := os.MkdirTemp(shm.DefaultDir, "pinned-test-")
	require.NoError(t, err)
	defer func() { assert.NoError(t, os.Remove(dir)) }()
	m, err := shm.Create(t.Context(), "m", 7, shm.Options{Dir: dir})
	require.NoError(t, err)
	require.NoError(t, m.Begin())
	copy(m.Bytes(), "weights")
	require.NoError(t, m.Complete("model"))
	cmd := exec.Command("python3", "-c", opened, dir)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join("..", "pytorch"), "PYTHONDONTWRITEBYTECODE=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Equal(t, "7 2 True model b'weights'\n", string(out))
	require.FileExists(t, filepath.Join(dir, "m"), "this process has it open")
	require.NoError(t, m.Close())
}
