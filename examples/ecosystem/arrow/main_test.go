package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
)

func TestAColumnReachesTheGPUFromPinnedMemory(t *testing.T) {
	t.Parallel()
	require.NoError(t, run(t.Context(), true))
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	require.NotEmpty(t, exampletest.Run(t, main, "-sim"))
}
