package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
)

func TestAnEndedContextIsReported(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, true), context.Canceled)
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	require.Contains(t, exampletest.Run(t, main, "-sim"), "67108864 bytes there and back, equal")
}
