package bench

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

// fakePython is a program that answers as torch.py does. $3, $4 and $5 are the way, the size and the count.
func fakePython(t *testing.T, script string) string {
	t.Helper()
	if _, err := os.Stat("/bin/sh"); err != nil {
		t.Skip("needs a shell: ", err)
	}
	name := filepath.Join(t.TempDir(), "python")
	require.NoError(t, os.WriteFile(name, []byte("#!/bin/sh\n"+script), 0o777))
	return name
}

func TestMemoryOfPyTorch(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	_, devices := simulatedDevices(t, cudasim.Config{})
	const n = 64<<20 + 1
	env := measure.Env{Devices: devices, Options: measure.Options{Quick: true, Sizes: []int{n}, Python: fakePython(t, `
test "$1" = -c || exit 3
case "$3 $5" in
"pytorch 0") echo "a library greets" ; echo '{}';;
"pytorch 1") echo "{\"retained\": $((2 * $4 - 2))}";;
*) echo '{"missing": "No module named deepspeed"}';;
esac
`)}}
	b, err := measure.Run(t.Context(), memory, env, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	s := find(t, b, retainedName, byTorch, n)
	assert.InDelta(t, 2, s.Median, 1e-6)
	assert.True(t, s.Verified)
	assert.Nil(t, b.Find(retainedName, result.Label{Key: result.Method, Value: byDeepSpeed}))
	assert.Contains(t, strings.Join(b.Notes, "\n"), "deepspeed: not measured: "+env.Python+": No module named deepspeed")
	assert.Contains(t, b.Figures[0].Columns, "PyTorch")

	// Without one that was named, none is started.
	env.Python = ""
	groups, err := planMemory(env)
	require.NoError(t, err)
	assert.Len(t, groups, len(allocators))
}

func TestPythonThatFails(t *testing.T) {
	t.Parallel()
	for script, says := range map[string]string{
		"echo '{\"error\": \"RuntimeError: CUDA error\"}'": "python: RuntimeError: CUDA error",
		"echo Segmentation >&2; exit 139":                  "exit status 139: Segmentation",
		"echo 7":                                           `answer "7`,
		"":                                                 "answer",
	} {
		_, err := inPython(fakePython(t, script))(t.Context(), time.Minute, keepRequest{Allocator: byTorch})
		require.ErrorContains(t, err, says)
	}
	reply, err := inPython(fakePython(t, `echo '{"retained": 7, "mismatch": "other bytes"}'`))(t.Context(), time.Minute, keepRequest{})
	require.NoError(t, err)
	assert.Equal(t, keepReply{Retained: 7, Mismatch: "other bytes"}, reply)

	hangs := inPython(fakePython(t, "exec sleep 1000"))
	_, err = hangs(t.Context(), time.Millisecond, keepRequest{})
	require.ErrorContains(t, err, "no answer within 1ms")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = hangs(ctx, time.Minute, keepRequest{})
	require.ErrorIs(t, err, context.Canceled)
}
