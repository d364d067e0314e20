package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/weights"
)

// A child of a test is the program itself.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "-serve" {
		main()
		return
	}
	os.Exit(m.Run())
}

// saves is a process with three tensors, which stand for those of PyTorch, and a save that fails between two that do not.
const saves = `
import ctypes, os, sys, types
import save
class Runtime:
    def cudaHostRegister(self, address, size, flags): return flags
    def cudaHostUnregister(self, address): return 0
class Saver(save.Saver):
    def _copy(self, tensors, placed):
        for t, p in zip(tensors.values(), placed):
            assert p["bytes"] == len(t.data)
            ctypes.memmove(self._memory._address + p["offset"], t.data, len(t.data))
def tensor(dtype, layout, data, *shape):
    n = 1
    for s in shape: n *= s
    return types.SimpleNamespace(dtype="torch." + dtype, layout="torch." + layout, data=data, shape=shape, numel=lambda: n, element_size=lambda: len(data) // n if n else 4)
def tensors(fill, n):
    return {"w": tensor("bfloat16", "strided", bytes([fill]) * (2 * n), n, 1), "scalar": tensor("int64", "strided", b"12345678"), "none": tensor("float32", "strided", b"", 0, 3)}
with Saver(sys.argv[1], Runtime()) as s:
    first = s.save(tensors(1, 100), sys.argv[2])
    print(first.wait(), first.wait(), first.seconds > 0)
    wrong = s.save(tensors(2, 50), os.path.join(os.path.dirname(sys.argv[2]), "none", "m.safetensors"))
    for _ in range(2):
        try: wrong.wait()
        except save.SaveError as err: print("no such file or directory" in str(err))
    for dtype, layout in ("quint4x2", "strided"), ("float32", "sparse_coo"):
        try: s.save({"x": tensor(dtype, layout, b"1234", 1)}, sys.argv[2])
        except save.SaveError as err: print(err)
    s.save(tensors(3, 3_000_000), sys.argv[2])
    last = s.save(tensors(4, 40), sys.argv[2])
print(last.bytes)
try: s.save(tensors(4, 40), sys.argv[2])
except save.SaveError as err: print(err)
try: save.Saver("/nowhere/weights")
except save.SaveError as err: print(err)
`

func TestPythonSavesItsTensors(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("memory is shared on Linux only")
	}
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not installed: examples/pytorch/save.py is not tried")
	}
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	hosttest.StartsPrograms(t)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	cmd := exec.Command("python3", "-c", saves, self, path)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join("..", "pytorch"), "PYTHONDONTWRITEBYTECODE=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Equal(t, `208 208 True
True
True
tensor 'x': safetensors has no torch.quint4x2
tensor 'x': safetensors has no torch.sparse_coo
88
the program that saves has ended, with status 0
/nowhere/weights does not start: No such file or directory; go build -o weights ./examples/weights makes it
`, string(out))

	require.NoError(t, weights.Verify(t.Context(), path))
	m, err := weights.OpenModel(path)
	require.NoError(t, err)
	defer m.Close()
	saved := map[string]string{}
	for tensor := range m.Tensors() {
		b, err := io.ReadAll(io.NewSectionReader(tensor.File.Reader(), tensor.Offset, int64(tensor.Size)))
		require.NoError(t, err)
		saved[tensor.Name] = string(b)
	}
	assert.Equal(t, map[string]string{"w": strings.Repeat("\x04", 80), "scalar": "12345678", "none": ""}, saved)
}

func TestRequestsThatAreWrong(t *testing.T) {
	ask := func(lines ...string) (answers []answer, err error) {
		var out bytes.Buffer
		err = serve(t.Context(), strings.NewReader(strings.Join(lines, "\n")), &out)
		for d := json.NewDecoder(&out); d.More(); {
			var a answer
			require.NoError(t, d.Decode(&a))
			answers = append(answers, a)
		}
		return answers, err
	}
	answers, err := ask(`{"path": "m.safetensors"}`)
	require.NoError(t, err)
	require.Len(t, answers, 1)
	assert.Contains(t, answers[0].Error, "no memory was allocated")

	_, err = ask(`saved?`)
	require.ErrorContains(t, err, "read a request: invalid character")

	ctx, cancel := context.WithCancel(t.Context())
	in, _ := io.Pipe() // nobody writes to it
	cancel()
	require.ErrorIs(t, serve(ctx, in, io.Discard), context.Canceled)
	if runtime.GOOS != "linux" {
		return
	}
	path := filepath.Join(t.TempDir(), "m.safetensors")
	for _, place := range []string{`"offset": -1`, `"bytes": -1`, `"offset": 5000, "bytes": 1`, `"offset": 1, "bytes": 9223372036854775807`} {
		answers, err := ask(`{"allocate": 4096}`, `{"path": "`+path+`", "tensors": [{"name": "a", "dtype": "U8", "shape": [1], `+place+`}]}`)
		require.NoError(t, err)
		require.Len(t, answers, 2)
		assert.Contains(t, answers[1].Error, `tensor "a"`, place)
		assert.Contains(t, answers[1].Error, "not within the 4096 bytes", place)
	}
	assert.NoFileExists(t, path)
}
