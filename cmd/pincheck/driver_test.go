package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A host on which the driver alone is called is as healthy as one with a libcudart.
func TestDriverAloneIsHealthy(t *testing.T) {
	t.Parallel()
	needsSim(t)
	var codes []int
	for _, api := range []cudart.API{cudart.RuntimeAPI, cudart.DriverAPI} {
		sys := on(t, "h200-vm")
		sys.open = opening(t, cudasim.Config{API: api})
		got := call(t, sys)
		codes = append(codes, got.code)
		assert.Equal(t, api == cudart.DriverAPI, strings.Contains(got.stdout, "libcuda alone, CUDA 13.0"), got.stdout)
		assert.NotContains(t, got.stdout, "no_runtime_library")
	}
	assert.Equal(t, codes[0], codes[1])
}
