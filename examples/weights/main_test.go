package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

func TestWeights(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weights")
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("weights ", 1<<20)), 0o600))
	var out strings.Builder
	err := run(t.Context(), path, options{check: true, direct: true, sim: !testgpu.Real()}, &out)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, out.String(), "8388608 bytes on device 0")
	require.Contains(t, out.String(), "the same bytes")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, path, options{sim: !testgpu.Real()}, &out), context.Canceled)
}
