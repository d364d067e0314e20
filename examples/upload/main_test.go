package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBytesComeBackFromASimulatedGPU(t *testing.T) {
	t.Parallel()
	require.NoError(t, run(t.Context(), true))
}

func TestAnEndedContextIsReported(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, true), context.Canceled)
}
