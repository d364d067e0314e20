package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// long is a time limit that no test reaches.
const long = 5 * time.Minute

var funcs = map[string]Func{
	"add": Handle(func(_ context.Context, terms []int) (sum int, err error) {
		for _, n := range terms {
			sum += n
		}
		return sum, nil
	}),
	"fail":     Handle(func(_ context.Context, what string) (int, error) { return 0, errors.New(what) }),
	"old":      Handle(func(context.Context, int) (int, error) { return 0, fmt.Errorf("old: %w", errors.ErrUnsupported) }),
	"panic":    Handle(func(context.Context, int) (int, error) { panic("at the disco") }),
	"hang":     Handle(func(context.Context, int) (int, error) { select {} }),
	"exit":     Handle(func(context.Context, int) (int, error) { os.Exit(7); return 0, nil }),
	"chatter":  Handle(func(context.Context, int) (int, error) { fmt.Println("hello"); return 1, nil }),
	"noanswer": Handle(func(context.Context, int) (func(), error) { return nil, nil }),
	"count": HandleStream(func(_ context.Context, n int, _ <-chan struct{}, send func(int)) (int, error) {
		for i := range n {
			send(i)
		}
		return n, nil
	}),
	"turn": HandleStream(func(_ context.Context, n int, turn <-chan struct{}, send func(int)) (int, error) {
		select {
		case <-turn:
			return 0, errors.New("it is not its turn yet")
		default:
		}
		send(n)
		<-turn
		return n + 1, nil
	}),
	"count and hang": HandleStream(func(_ context.Context, n int, _ <-chan struct{}, send func(int)) (int, error) {
		send(n)
		select {}
	}),
	"count and crash": HandleStream(func(_ context.Context, n int, _ <-chan struct{}, send func(int)) (int, error) {
		send(n)
		p, _ := os.FindProcess(os.Getpid())
		_ = p.Kill()
		select {}
	}),
	"signals": Handle(func(context.Context, int) (string, error) {
		signalSelf(syscall.SIGINT, syscall.SIGTERM)
		return "still here", nil
	}),
	"count and end by a signal": HandleStream(func(_ context.Context, n int, _ <-chan struct{}, send func(int)) (int, error) {
		send(n)
		// As before Serve. Others may be ignored from the start, as under nohup.
		signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM)
		signal.Reset(syscall.SIGTERM)
		signalSelf(syscall.SIGTERM)
		select {}
	}),
	"variable": Handle(func(context.Context, int) (string, error) { return os.Getenv(variable), nil }),
}

func signalSelf(signals ...syscall.Signal) {
	p, _ := os.FindProcess(os.Getpid())
	for _, s := range signals {
		_ = p.Signal(s)
	}
}

func TestMain(m *testing.M) {
	Serve(funcs)
	os.Exit(m.Run())
}

// do is Run, where programs of this architecture can be started.
func do[Reply any](t *testing.T, ctx context.Context, limit time.Duration, name string, request any) (Reply, error) {
	t.Helper()
	hosttest.StartsPrograms(t)
	return Run[Reply](ctx, limit, name, request)
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	sum, err := do[int](t, t.Context(), long, "add", []int{1, 2, 39})
	require.NoError(t, err)
	assert.Equal(t, 42, sum)
	none, err := do[string](t, t.Context(), long, "variable", 0)
	require.NoError(t, err)
	assert.Empty(t, none, "children of the child are no children of ours")
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"fail":     "child: fail: what",
		"old":      "child: old: old: unsupported operation",
		"panic":    "child: panic: the process ended early: exit status 2: panic: at the disco",
		"exit":     "child: exit: the process ended early: exit status 7",
		"chatter":  `child: chatter: answer "hello\n`,
		"noanswer": "child: noanswer: answer: json: unsupported type: func()",
		"unknown":  `child: unknown: there is no function "unknown" here`,
	} {
		request := any(0)
		if name == "fail" {
			request = "what"
		}
		_, err := do[int](t, t.Context(), long, name, request)
		require.ErrorContains(t, err, want)
		assert.Equal(t, name == "old", errors.Is(err, errors.ErrUnsupported), name)
	}
	_, err := do[int](t, t.Context(), long, "add", "text")
	require.ErrorContains(t, err, "child: add: request: json: cannot unmarshal string")
	_, err = do[string](t, t.Context(), long, "add", []int{1})
	require.ErrorContains(t, err, `child: add: answer "1": json: cannot unmarshal number`)
	_, err = Run[int](t.Context(), long, "add", func() {})
	require.ErrorContains(t, err, "request: json: unsupported type")
}

// Ctrl-C, a service manager and timeout(1) signal all of a process group: what a process was
// started for ends by the context of its parent, and did not crash, whichever comes first.
func TestSignalsToAProcessGroup(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no such signals")
	}
	result, err := do[string](t, t.Context(), long, "signals", 0)
	require.NoError(t, err)
	assert.Equal(t, "still here", result)

	stop := errors.New("stop")
	ctx, cancel := context.WithCancelCause(t.Context())
	last, err := Stream(ctx, long, "count and end by a signal", 3, nil, func(int) {
		time.AfterFunc(100*time.Millisecond, func() { cancel(stop) })
	})
	require.ErrorIs(t, err, stop)
	assert.Equal(t, 3, last)

	_, err = Run[int](t.Context(), long, "count and end by a signal", 3)
	require.ErrorAs(t, err, new(*exec.ExitError), "no context has ended")
	require.ErrorContains(t, err, "signal: terminated")
}

// A process that hangs is killed at its limit, and when ctx ends.
func TestHangs(t *testing.T) {
	t.Parallel()
	_, err := do[int](t, t.Context(), 50*time.Millisecond, "hang", 0)
	require.ErrorIs(t, err, ErrTimeout)
	assert.ErrorContains(t, err, "child: hang: no answer within the time limit of 50ms")

	stop := errors.New("stop")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(50*time.Millisecond, func() { cancel(stop) })
	_, err = do[int](t, ctx, long, "hang", 0)
	require.ErrorIs(t, err, stop)
	_, err = do[int](t, ctx, long, "add", []int{1})
	require.ErrorIs(t, err, stop, "nothing is started")
}

// What a process sends arrives in order, and before the end.
func TestStream(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	var got []int
	last, err := Stream(t.Context(), long, "count", 4, nil, func(n int) { got = append(got, n) })
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1, 2, 3}, got)
	assert.Equal(t, 4, last)

	_, err = Stream(t.Context(), long, "count", 4, nil, func(string) {})
	require.ErrorContains(t, err, `child: count: answer "0": json: cannot unmarshal number`)
}

// What a process has sent is there although it hangs or crashes then.
func TestStreamOfAProcessThatFails(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	ctx, cancel := context.WithCancel(t.Context())
	got, err := Stream(ctx, long, "count and hang", 7, nil, func(int) { cancel() })
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, 7, got)

	got, err = Stream(t.Context(), long, "count and crash", 8, nil, func(int) {})
	require.ErrorContains(t, err, "the process ended early: signal: killed")
	assert.ErrorAs(t, err, new(*exec.ExitError))
	assert.Equal(t, 8, got)
}

// A process that hangs ends when its standard input does, which is when this process
// has ended, however that was.
func TestEndsWithItsParent(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	path, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), variable+"=hang")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = in.Write([]byte("0\n"))
	require.NoError(t, err)
	require.NoError(t, in.Close()) // as the end of this process would
	text, err := io.ReadAll(out)
	require.NoError(t, err)
	assert.Equal(t, begunLine, string(text), "no answer")
	assert.Error(t, cmd.Wait())
}

// begunLine is what each process writes first.
const begunLine = `{"more":true,"begun":true}` + "\n"

func TestServeWithoutARequest(t *testing.T) {
	t.Parallel()
	never := func() { t.Error("orphaned") }
	for in, want := range map[string]string{"": "request: EOF", "{": "request: unexpected EOF", "x": "request: invalid character"} {
		var out bytes.Buffer
		require.NoError(t, serve(funcs["add"], "add", strings.NewReader(in), &out, never))
		assert.Contains(t, out.String(), want)
	}
}

func TestOrphaned(t *testing.T) {
	t.Parallel()
	orphaned := make(chan struct{})
	var out bytes.Buffer
	require.NoError(t, serve(Handle(func(context.Context, int) (int, error) { <-orphaned; return 1, nil }), "wait", strings.NewReader("0\n"), &out, func() { close(orphaned) }))
	assert.Equal(t, begunLine+`{"answer":1}`+"\n", out.String())
}

func TestOutputIsLimited(t *testing.T) {
	t.Parallel()
	var l limited
	for range 3 {
		n, err := l.Write(bytes.Repeat([]byte("x"), maxText/2+1))
		require.NoError(t, err)
		assert.Equal(t, maxText/2+1, n)
	}
	assert.Equal(t, maxText, l.Len())
	assert.Len(t, l.quote(), 302)
}

// Otherwise an executable that does not call Serve would start itself again and again.
func TestRunInAProcessThatDoesNotServe(t *testing.T) {
	t.Setenv(variable, "add")
	_, err := Run[int](t.Context(), long, "add", []int{1})
	require.ErrorContains(t, err, "does not call Serve")
}

// A process goes on when it is its turn, not before, and one whose turn does not come can be ended.
func TestTurns(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	turn := make(chan struct{})
	waits := 0
	result, err := Stream(t.Context(), long, "turn", 7, turn, func(n int) {
		waits++
		assert.Equal(t, 7, n)
		close(turn)
	})
	require.NoError(t, err)
	assert.Equal(t, 8, result)
	assert.Equal(t, 1, waits)

	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	result, err = Stream(ctx, long, "turn", 7, make(chan struct{}), func(int) { cancel(stop) })
	require.ErrorIs(t, err, stop)
	assert.Equal(t, 7, result)
}

// A process that never reaches Serve is no crash of the function: what was started, and how it ended, is in the error.
func TestAProcessThatDoesNotStart(t *testing.T) {
	hosttest.StartsPrograms(t)
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(text), mode))
		return file
	}
	own := executable
	defer func() { executable = own }()
	for path, says := range map[string]string{
		filepath.Join(dir, "gone"):                                      "no such file",
		write("closed", "", 0o600):                                      "permission denied",
		write("another-machine", "\x7fELF of another machine", 0o700):   "exec format error",
		write("loader", "#!/bin/sh\necho usage >&2\nexit 127\n", 0o700): "exit status 127: usage",
		write("emulator", "#!/bin/sh\necho usage\n", 0o700):             "usage",
		write("silent", "#!/bin/sh\n", 0o700):                           "without an answer",
		write("broken", "#!/bin/sh\nkill -SEGV $$\n", 0o700):            "segmentation fault",
	} {
		executable = func() (string, error) { return path, nil }
		_, err := Run[int](t.Context(), long, "add", []int{1})
		failed := (*StartError)(nil)
		require.ErrorAs(t, err, &failed, path)
		assert.Equal(t, path, failed.Path)
		assert.ErrorContains(t, err, says)
	}
	executable = func() (string, error) { return write("killed", "#!/bin/sh\nkill -KILL $$\n", 0o700), nil }
	_, err := Run[int](t.Context(), long, "add", []int{1})
	failed := (*StartError)(nil)
	assert.False(t, errors.As(err, &failed), "somebody ended it: %v", err)
	executable = func() (string, error) { return "", errors.New("no /proc") }
	_, err = Run[int](t.Context(), long, "add", []int{1})
	assert.ErrorAs(t, err, &failed)
}
