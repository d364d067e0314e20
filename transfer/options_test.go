package transfer

import (
	"context"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

func TestBadInput(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	for option, all := range map[string][]Options{
		"Workers": {{Workers: -1}, {Workers: maxWorkers + 1}, {Workers: math.MaxInt}, {Workers: math.MinInt}},
	} {
		for _, o := range all {
			_, err := NewCopier(t.Context(), dev, o)
			require.ErrorContains(t, err, "transfer: new copier on device 0", "%+v", o)
			require.ErrorContains(t, err, "Options."+option, "%+v", o)
		}
	}
	r := fixtureOn(t, dev, Options{Workers: 1})
	mem := r.device(1)
	_, err := r.c.UploadFrom(t.Context(), mem, strings.NewReader(""), 0, -1)
	require.ErrorContains(t, err, "transfer: upload -1 bytes from offset 0 of *strings.Reader: -1 bytes: must not be negative")
	for _, off := range []int64{-1, math.MinInt64, math.MaxInt64, math.MaxInt64 - 9} {
		_, err = r.c.UploadFrom(t.Context(), mem, strings.NewReader(""), off, 10)
		require.ErrorContains(t, err, fmt.Sprintf("offset %d: must not be negative", off))
		_, err = r.c.DownloadTo(t.Context(), hooked{}, off, mem, 10)
		require.ErrorContains(t, err, fmt.Sprintf("offset %d: must not be negative", off))
	}
	require.Zero(t, r.c.Stats().Copies)
}

// What is nil is an error, and never a panic.
func TestNilInput(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	_, err := NewCopier(t.Context(), nil, Options{})
	require.ErrorContains(t, err, "transfer: new copier on no device: the device is nil")
	var none context.Context
	_, err = NewCopier(none, dev, Options{})
	require.ErrorContains(t, err, "the context is nil")

	r := fixtureOn(t, dev, Options{Workers: 1})
	mem := r.device(1)
	one, parts := []byte{1}, []Part{{mem, []byte{1}}}
	for name, call := range map[string]func(ctx context.Context) error{
		"Upload":      func(ctx context.Context) error { return r.c.Upload(ctx, mem, one) },
		"Download":    func(ctx context.Context) error { return r.c.Download(ctx, one, mem) },
		"UploadAll":   func(ctx context.Context) error { return r.c.UploadAll(ctx, parts) },
		"DownloadAll": func(ctx context.Context) error { return r.c.DownloadAll(ctx, parts) },
		"UploadReader": func(ctx context.Context) error {
			_, err := r.c.UploadReader(ctx, mem, strings.NewReader("x"), 1)
			return err
		},
		"Close": r.c.CloseContext,
	} {
		require.ErrorContains(t, call(none), "the context is nil", name)
	}
	var f *os.File
	for name, call := range map[string]func() (int, error){
		"UploadFrom":          func() (int, error) { return r.c.UploadFrom(t.Context(), mem, nil, 0, 1) },
		"UploadReader":        func() (int, error) { return r.c.UploadReader(t.Context(), mem, nil, 1) },
		"DownloadTo":          func() (int, error) { return r.c.DownloadTo(t.Context(), nil, 0, mem, 1) },
		"DownloadWriter":      func() (int, error) { return r.c.DownloadWriter(t.Context(), nil, mem, 1) },
		"UploadFrom file":     func() (int, error) { return r.c.UploadFrom(t.Context(), mem, f, 0, 1) },
		"UploadReader file":   func() (int, error) { return r.c.UploadReader(t.Context(), mem, f, 0) },
		"DownloadTo file":     func() (int, error) { return r.c.DownloadTo(t.Context(), f, 0, mem, 1) },
		"DownloadWriter file": func() (int, error) { return r.c.DownloadWriter(t.Context(), f, mem, 1) },
	} {
		done, err := call()
		require.ErrorContains(t, err, "the reader or writer is nil", name)
		require.Zero(t, done, name)
	}
	require.NoError(t, r.c.Upload(t.Context(), mem, one), "nothing is lost")
}

// Copies of nothing succeed, and make no calls.
func TestNothingToDo(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 1})
	mem := r.device(1)
	require.NoError(t, r.c.Upload(t.Context(), mem, nil))
	require.NoError(t, r.c.Download(t.Context(), nil, mem))
	require.NoError(t, r.c.UploadAll(t.Context(), nil))
	require.NoError(t, r.c.DownloadAll(t.Context(), []Part{{}, {Device: mem}}))
	require.Zero(t, r.c.Stats().Copies)
}
