package main

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestLoader(t *testing.T) {
	o := options{samples: 1000, batch: 64, workers: 128, epochs: 2, sim: !testgpu.Real()}
	var out strings.Builder
	err := run(t.Context(), o, &out)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, out.String(), "epoch 0: 1000 samples in 16 batches on device 0")
	require.Contains(t, out.String(), "epoch 1: 1000 samples in 16 batches on device 0")
	require.Contains(t, out.String(), "8200000 bytes by way of ")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, o, &out), context.Canceled)
	o.batch = 0
	require.ErrorContains(t, run(t.Context(), o, &out), "Options.BatchSize is 0: must be positive")
	o.epochs = -1
	require.EqualError(t, run(t.Context(), o, &out), "-epochs -1: must be positive")
}

func TestVectorsAreNormalised(t *testing.T) {
	v := vectors{n: 10}
	sample := [][]byte{make([]byte, v.Fields()[vector]), make([]byte, v.Fields()[label])}
	require.NoError(t, v.Read(t.Context(), 3, sample))
	require.NoError(t, normalise(t.Context(), 3, sample))
	var sum, squares float64
	for _, x := range floats(sample[vector]) {
		sum += float64(x)
		squares += float64(x) * float64(x)
	}
	require.InDelta(t, 0, sum/width, 1e-5)
	require.InDelta(t, 1, math.Sqrt(squares/width), 1e-5)
	require.Equal(t, byte(3), sample[label][0])
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	out := exampletest.Run(t, main, "-sim", "-samples", "500", "-batch", "50", "-epochs", "1")
	require.Contains(t, out, "epoch 0: 500 samples in 10 batches on device 0")
}
