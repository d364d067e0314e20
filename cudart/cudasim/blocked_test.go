//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// begin makes a call on an OS thread of its own. The channel receives its
// result.
func (l *lib) begin(fn string, args ...uintptr) <-chan cudart.Code {
	done := make(chan cudart.Code, 1)
	go onFreshThread(func() { done <- cudart.Code(int32(l.raw(fn, args...))) })
	return done
}

// awaitBlocked waits until n calls of a function are blocked.
func (l *lib) awaitBlocked(fn string, n int) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(l.t, l.AwaitBlocked(ctx, fn, n))
}

func handle(s uintptr) cudart.StreamHandle { return cudart.StreamHandle(s) }

func TestBlockedCallLetsOthersGoOn(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d := l.pinned(64), l.device(64)
	a, b, e := l.stream(), l.stream(), l.event()
	unblock := l.Block("cudaStreamQuery", cudasim.Fault{Stream: handle(a), Times: -1})
	first, second := l.begin("cudaStreamQuery", a), l.begin("cudaStreamQuery", a)
	l.awaitBlocked("cudaStreamQuery", 2)
	assert.Equal(t, map[string]int{"cudaStreamQuery": 2}, l.Blocked())
	for _, s := range []uintptr{a, b} { // the stream itself works on
		h[0] = 1
		l.ok("cudaMemsetAsync", d, 9, 64, s)
		l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
		l.ok("cudaEventRecord", e, s)
		l.ok("cudaStreamSynchronize", s)
		l.ok("cudaEventQuery", e)
		assert.EqualValues(t, 9, h[0])
	}
	l.ok("cudaStreamQuery", b)
	assert.Empty(t, first)
	assert.Empty(t, second)
	unblock()
	unblock()
	assert.Equal(t, cudart.Code(0), <-first)
	assert.Equal(t, cudart.Code(0), <-second)
	l.ok("cudaStreamQuery", a)
	assert.Empty(t, l.Blocked())
}

// A call blocks before its work, or with Late after it.
func TestBlockBeforeAndAfterTheWork(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d, s, e := l.pinned(64), l.device(64), l.stream(), l.event()
	m := mapped(t, 4096)
	tests := []struct {
		fn   string
		args []uintptr
		work func() int // of the call, 1 when it is done
	}{
		{"cudaMemcpyAsync", []uintptr{d, addr(&h[0]), 64, h2d, s}, func() int { return l.Outstanding().PendingOps }},
		{"cudaEventRecord", []uintptr{e, s}, func() int { return l.Outstanding().PendingOps }},
		{"cudaHostRegister", []uintptr{addr(&m[0]), 4096, 0}, func() int { return l.Outstanding().Registrations - 1 }},
	}
	for _, tt := range tests {
		for _, late := range []bool{false, true} {
			l.Hold()
			unblock := l.Block(tt.fn, cudasim.Fault{Late: late})
			done := l.begin(tt.fn, tt.args...)
			l.awaitBlocked(tt.fn, 1)
			want := 0
			if late {
				want = 1
			}
			assert.Equal(t, want, tt.work(), "%s, late %v", tt.fn, late)
			unblock()
			assert.Equal(t, cudart.Code(0), <-done, tt.fn)
			assert.Equal(t, 1, tt.work(), tt.fn)
			l.Release()
			l.ok("cudaStreamSynchronize", s)
			if tt.fn == "cudaHostRegister" {
				l.ok("cudaHostUnregister", addr(&m[0]))
			}
		}
	}
}

func TestBlockedCallCanFailAfterwards(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	for _, late := range []bool{false, true} {
		unblock := l.Block("cudaDeviceSynchronize", cudasim.Fault{Code: cudart.ErrLaunchTimeout, Late: late})
		done := l.begin("cudaDeviceSynchronize")
		l.awaitBlocked("cudaDeviceSynchronize", 1)
		unblock()
		assert.Equal(t, cudart.ErrLaunchTimeout, <-done)
	}
}

// A stream on which no call returns, and no query of an event recorded in it.
func TestBlockAllCallsOfOneStream(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d := l.pinned(64), l.device(64)
	a, b := l.stream(), l.stream()
	onA, onB, never := l.event(), l.event(), l.event()
	l.ok("cudaEventRecord", onA, a)
	l.ok("cudaEventRecord", onB, b)
	unblock := l.Block("", cudasim.Fault{Stream: handle(a), Times: -1})
	calls := []struct {
		fn   string
		args []uintptr
	}{
		{"cudaMemcpyAsync", []uintptr{d, addr(&h[0]), 64, h2d, a}},
		{"cudaMemsetAsync", []uintptr{d, 0, 64, a}},
		{"cudaEventRecord", []uintptr{never, a}},
		{"cudaStreamWaitEvent", []uintptr{a, onB, 0}},
		{"cudaEventQuery", []uintptr{onA}},
		{"cudaEventSynchronize", []uintptr{onA}},
		{"cudaStreamQuery", []uintptr{a}},
		{"cudaStreamSynchronize", []uintptr{a}},
	}
	var done []<-chan cudart.Code
	for _, c := range calls {
		done = append(done, l.begin(c.fn, c.args...))
	}
	l.awaitBlocked("", len(calls))
	for _, c := range calls {
		assert.Equal(t, 1, l.Blocked()[c.fn], c.fn)
	}
	l.ok("cudaStreamWaitEvent", b, onA, 0) // b's call, although a's event
	l.ok("cudaEventQuery", onB)
	l.ok("cudaEventQuery", never)
	l.ok("cudaStreamSynchronize", b)
	l.ok("cudaDeviceSynchronize")
	unblock()
	for i, c := range calls {
		code := <-done[i]
		if c.fn == "cudaStreamQuery" && code == cudart.ErrNotReady {
			continue // the others enqueue meanwhile
		}
		assert.Equal(t, cudart.Code(0), code, c.fn)
	}
	l.ok("cudaDeviceSynchronize")
}

// Each call of a run in turn does not return: the sweep of a program that
// promises to end in time.
func TestEveryCallCanBlock(t *testing.T) {
	t.Parallel()
	locked(t)
	first := open(t, cudasim.Config{})
	var names []string
	first.OnCall(func(fn string, _ int) { names = append(names, fn) })
	assert.False(t, work(first))
	require.Len(t, names, first.TotalCalls())
	for k, fn := range names {
		l := open(t, cudasim.Config{})
		unblock := l.Block("", cudasim.Fault{Nth: k + 1})
		failed := make(chan bool, 1)
		go onFreshThread(func() { failed <- work(l) })
		l.awaitBlocked(fn, 1)
		assert.Equal(t, k+1, l.TotalCalls(), "no call after it")
		unblock()
		assert.False(t, <-failed, fn)
		require.NoError(t, l.Check())
		require.NoError(t, l.Close())
	}
}

func TestResetFaultsUnblocks(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	unblock := l.Block("cudaDeviceSynchronize", cudasim.Fault{})
	done := l.begin("cudaDeviceSynchronize")
	l.awaitBlocked("cudaDeviceSynchronize", 1)
	l.ResetFaults()
	assert.Equal(t, cudart.Code(0), <-done)
	unblock()
	l.ok("cudaDeviceSynchronize")
}

// Not parallel: another Sim must not get the slot before the late calls.
func TestCloseEndsBlockedCalls(t *testing.T) {
	l := openDirty(t, cudasim.Config{QueueDepth: 1})
	s := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	e := get[uintptr](l, "cudaEventCreateWithFlags", 0)
	l.Hold()
	l.ok("cudaEventRecord", e, s)
	unblock := l.Block("cudaGetDevice", cudasim.Fault{})
	l.Block("cudaEventQuery", cudasim.Fault{Late: true})
	m := mapped(t, 8)
	calls := []<-chan cudart.Code{
		l.begin("cudaGetDevice", addr(&m[0])),
		l.begin("cudaEventQuery", e),
		l.begin("cudaEventRecord", e, s), // the stream is full
	}
	l.awaitBlocked("", len(calls))
	awaiting := make(chan error, 1)
	go func() { awaiting <- l.AwaitBlocked(context.Background(), "cudaMalloc", 1) }()
	err := l.Close()
	assert.ErrorContains(t, err, "not released: 1 stream, 1 event, 1 pending operation")
	assert.NotContains(t, err.Error(), "still running")
	for _, c := range calls {
		assert.Equal(t, cudart.ErrCudartUnloading, <-c)
	}
	assert.Empty(t, l.Blocked())
	assert.ErrorIs(t, <-awaiting, os.ErrClosed)
	unblock()
}

func TestAwaitBlockedErrors(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	unblock := l.Block("cudaDeviceSynchronize", cudasim.Fault{})
	done := l.begin("cudaDeviceSynchronize")
	l.awaitBlocked("cudaDeviceSynchronize", 1)
	ctx, cancel := context.WithCancel(context.Background())
	waiting := make(chan error, 1)
	go func() { waiting <- l.AwaitBlocked(ctx, "cudaDeviceSynchronize", 2) }()
	cancel()
	err := <-waiting
	assert.ErrorIs(t, err, context.Canceled)
	assert.ErrorContains(t, err, `AwaitBlocked("cudaDeviceSynchronize", 2): blocked are map[cudaDeviceSynchronize:1]`)
	assert.ErrorContains(t, l.AwaitBlocked(context.Background(), "cudaNoSuchFunction", 1), "no such function")
	var none context.Context
	assert.ErrorContains(t, l.AwaitBlocked(none, "", 1), "no context")
	assert.NoError(t, l.AwaitBlocked(ctx, "", 1), "what is so already needs no wait")
	unblock()
	assert.Equal(t, cudart.Code(0), <-done)
}

// An askedContext sends when it is asked for its error, which is just before a
// wait.
type askedContext struct {
	context.Context
	asked chan struct{}
}

func (c askedContext) Err() error {
	select {
	case c.asked <- struct{}{}:
	default: // asked before
	}
	return nil
}

func TestAwaitBlockedEndsWithTheSim(t *testing.T) {
	t.Parallel()
	l := openDirty(t, cudasim.Config{})
	ctx := askedContext{context.Background(), make(chan struct{}, 1)}
	waiting := make(chan error, 1)
	go func() { waiting <- l.AwaitBlocked(ctx, "", 1) }()
	<-ctx.asked
	require.NoError(t, l.Close())
	assert.ErrorIs(t, <-waiting, os.ErrClosed)
}

// Many calls can be blocked at once, each on a thread of its own.
func TestManyBlockedCalls(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	s := l.stream()
	unblock := l.Block("cudaStreamQuery", cudasim.Fault{Times: -1})
	calls := make([]<-chan cudart.Code, 100)
	for i := range calls {
		calls[i] = l.begin("cudaStreamQuery", s)
	}
	l.awaitBlocked("cudaStreamQuery", len(calls))
	l.ok("cudaStreamSynchronize", s)
	unblock()
	for _, c := range calls {
		assert.Equal(t, cudart.Code(0), <-c)
	}
}
