package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
)

func TestAColumnReachesTheGPUFromPinnedMemory(t *testing.T) {
	require.Contains(t, exampletest.Run(t, main, "-sim"), "4000000 bytes of pinned memory, on device 0")
}
