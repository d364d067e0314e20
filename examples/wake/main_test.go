//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"os"
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
