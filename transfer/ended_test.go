package transfer

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A context that has ended is an error of every method, which answers errors.Is for the
// context's error and for its cause.
func TestContextsThatHaveEnded(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	devs := rt.Devices()
	r := fixtureOn(t, devs[0], Options{})
	f, err := NewFanout(t.Context(), devs, Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	const n = mib
	mem, host, s := r.device(n), make([]byte, n), r.stream()
	dsts := []cudart.DevPtr{mem, (&fixture{TB: t, dev: devs[1]}).device(n)}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(assert.AnError)
	other := fixtureOn(t, devs[0], Options{})
	require.NoError(t, blockedQueue(t, other, s))
	count := func(_ int, err error) error { return err }
	for name, call := range map[string]func() error{
		"NewCopier":           func() error { _, err := NewCopier(ctx, devs[1], Options{}); return err },
		"NewFanout":           func() error { _, err := NewFanout(ctx, devs, Options{}); return err },
		"Upload":              func() error { return r.c.Upload(ctx, mem, host) },
		"Upload on a stream":  func() error { return r.c.With(Call{Stream: s}).Upload(ctx, mem, host) },
		"UploadFrom":          func() error { return count(r.c.UploadFrom(ctx, mem, bytes.NewReader(host), 0, n)) },
		"UploadReader":        func() error { return count(r.c.UploadReader(ctx, mem, strings.NewReader("x"), 1)) },
		"UploadAll":           func() error { return r.c.UploadAll(ctx, []Part{{mem, host}}) },
		"Download":            func() error { return r.c.Download(ctx, host, mem) },
		"DownloadTo":          func() error { return count(r.c.DownloadTo(ctx, hooked{host, func() {}}, 0, mem, n)) },
		"DownloadWriter":      func() error { return count(r.c.DownloadWriter(ctx, io.Discard, mem, n)) },
		"DownloadAll":         func() error { return r.c.DownloadAll(ctx, []Part{{mem, host}}) },
		"Reader.Read":         func() error { return count(r.c.NewReader(ctx, mem, n).Read(host)) },
		"Writer.Write":        func() error { return count(r.c.NewWriter(ctx, mem, n).Write(host)) },
		"Fanout.Upload":       func() error { return f.Upload(ctx, dsts, host) },
		"Fanout.UploadFrom":   func() error { return count(f.UploadFrom(ctx, dsts, bytes.NewReader(host), 0, n)) },
		"Fanout.UploadReader": func() error { return count(f.UploadReader(ctx, dsts, bytes.NewReader(host), n)) },
		"Fanout.UploadPieces": func() error {
			return count(f.UploadPieces(ctx, bytes.NewReader(host), 0, n, []Piece{{N: n, Dsts: dsts}}))
		},
	} {
		err := call()
		require.ErrorIs(t, err, context.Canceled, name)
		require.ErrorIs(t, err, assert.AnError, name)
		require.NotErrorIs(t, err, ErrUnderWay, name)
	}
	require.ErrorIs(t, other.c.CloseContext(ctx), context.Canceled, "it waits")
}

// blockedQueue queues a copy of r on a stream that goes on when the test ends.
func blockedQueue(t *testing.T, r *fixture, s *cudart.Stream) error {
	mem := r.device(1)
	blocked(t, s)
	return r.c.With(Call{Stream: s}).Upload(t.Context(), mem, []byte{1})
}

// A wait within a copy, for a stream, a reader or the ring's memory, ends with the context's
// error and its cause.
func TestContextsThatEndMeanwhile(t *testing.T) {
	t.Parallel()
	r := newSimFixture(t, Options{})
	const n = 5 * mib
	mem, host, s := r.device(n), make([]byte, n), r.stream()
	open := blocked(t, s)
	for name, call := range map[string]func(ctx context.Context, end func()) error{
		"stream": func(ctx context.Context, end func()) error {
			go end()
			return r.c.With(Call{Stream: s}).Upload(ctx, mem, host)
		},
		"reader": func(ctx context.Context, end func()) error {
			_, err := r.c.UploadReader(ctx, mem, readerFunc(func([]byte) (int, error) { end(); <-ctx.Done(); return 0, nil }), n)
			return err
		},
		"reader that blocks": func(ctx context.Context, end func()) error {
			free := make(chan struct{})
			defer close(free)
			_, err := r.c.UploadReader(ctx, mem, readerFunc(func([]byte) (int, error) { end(); <-free; return 0, nil }), n)
			return err
		},
		"end of a reader": func(ctx context.Context, end func()) error {
			free := make(chan struct{})
			defer close(free)
			source := io.MultiReader(bytes.NewReader(host), readerFunc(func([]byte) (int, error) { end(); <-free; return 0, nil }))
			_, err := r.c.NewWriter(ctx, mem, n).ReadFrom(source)
			return err
		},
		"writer": func(ctx context.Context, end func()) error {
			free := make(chan struct{})
			defer close(free)
			_, err := r.c.DownloadWriter(ctx, writerFunc(func([]byte) (int, error) { end(); <-free; return 0, nil }), mem, n)
			return err
		},
		"progress of pinned memory": func(ctx context.Context, end func()) error {
			free := make(chan struct{})
			defer close(free)
			buf, err := hostmem.Alloc(t.Context(), r.dev, n, hostmem.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, buf.Close()) }()
			return r.c.With(Call{Progress: func(int, int) { end(); <-free }}).Upload(ctx, mem, buf.Bytes())
		},
		"progress": func(ctx context.Context, end func()) error {
			free := make(chan struct{})
			defer close(free)
			return r.c.With(Call{Progress: func(int, int) { end(); <-free }}).Upload(ctx, mem, host)
		},
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		err := call(ctx, func() { cancel(assert.AnError) })
		require.ErrorIs(t, err, context.Canceled, name)
		require.ErrorIs(t, err, assert.AnError, name)
		require.NotErrorIs(t, err, ErrUnderWay, name)
	}
	open()
}
