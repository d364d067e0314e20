package main

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/bench"
	"github.com/gopinned/pinned/internal/child"
)

// asProgram makes the test binary the program itself.
const asProgram = "PINCHECK_TEST_MAIN"

func TestMain(m *testing.M) {
	child.Serve(bench.Children()) // experiments start this executable again
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// A closed pipe is reported, with its own exit code, and is not the end by a signal.
func TestClosedPipe(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("pipes of Windows have other errors")
	}
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	args := []string{os.Args[0], "version"}
	if runner := os.Getenv("PINNED_TEST_EXEC"); runner != "" {
		args = append([]string{runner}, args...)
	}
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	var stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), asProgram+"=1"), w, &stderr
	err = cmd.Run()
	require.NoError(t, w.Close())
	require.ErrorAs(t, err, new(*exec.ExitError))
	assert.Equal(t, exitOutput, cmd.ProcessState.ExitCode())
	assert.Contains(t, stderr.String(), "broken pipe")
}
