//go:build unix

package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Pipes, devices and directories are refused at once: nothing waits for the other end of a pipe.
func TestPipesAndDevicesAreNoFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	sys := failing(t, "h200-vm", errors.New("nothing is to be measured"))
	for _, c := range []struct{ name, text string }{
		{pipe, "is a pipe that no program writes to, not a file"},
		{dir, "is a directory, not a file"},
		{os.DevNull, "is a terminal, another device or a socket, not a file"},
		{filepath.Join(dir, "none"), "no such file or directory"},
	} {
		for command, prefix := range map[string]string{
			"--from F":                          "pincheck: --from F: ",
			"compare F F":                       "pincheck compare: F: ",
			"compare --reference F":             "pincheck compare: F: ",
			"report F --format html --output O": "pincheck report: F: ",
		} {
			with := strings.NewReplacer("F", c.name, "O", filepath.Join(dir, "page.html"))
			got := call(t, sys, strings.Fields(with.Replace(command))...)
			assert.Equal(t, exitUsage, got.code, command)
			assert.Contains(t, got.stderr, with.Replace(prefix)+c.text+"\n", command)
		}
	}
}

// A pipe that a program writes to, as that of <(command) in a shell, is read like a file.
func TestPipesWithAWriter(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	w, err := os.OpenFile(pipe, os.O_RDWR, 0) // for both, so that it does not wait
	require.NoError(t, err)
	_, err = w.WriteString(benchJSON("host-a", 50))
	require.NoError(t, err)
	got, err := readFile(pipe, nil, func(r io.Reader) (string, error) {
		err := w.Close()
		text, readErr := io.ReadAll(r)
		return string(text), errors.Join(err, readErr)
	})
	require.NoError(t, err)
	assert.Equal(t, benchJSON("host-a", 50), got)
}

// The reader of a pipe gets the whole output. A pipe without a reader is an error, which used to be a wait that no signal ended.
func TestOutputIntoAPipe(t *testing.T) {
	t.Parallel()
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	got := call(t, benches(t, none), "bench", "bandwidth", "--output", pipe)
	assert.Equal(t, exitOutput, got.code, got.stderr)
	assert.Contains(t, got.stderr, "--output: "+pipe+" is a pipe or a socket that no program reads\n")

	r, err := os.OpenFile(pipe, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer r.Close()
	got = call(t, benches(t, none), "bench", "bandwidth", "--output", pipe, "--format", "prometheus")
	assert.Equal(t, exitOK, got.code, got.stderr)
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Contains(t, string(text), `pincheck_verdict{verdict="measured"} 1`)
}
