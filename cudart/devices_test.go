//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// usedMemory returns the bytes of a GPU's memory in use, as nvidia-smi reports them:
// cudaMemGetInfo would make a context.
func usedMemory(tb testing.TB, dev *cudart.Device) int {
	tb.Helper()
	out, err := exec.Command("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", dev.PCIBusID()).Output()
	require.NoError(tb, err)
	mib, err := strconv.Atoi(strings.TrimSpace(string(out)))
	require.NoError(tb, err)
	return mib << 20
}

// The same on a real host with several GPUs: work on device 1 alone makes no context
// on device 0, whose free memory stays as it was.
func TestRealDevicesStayApart(t *testing.T) {
	if !testgpu.Real() {
		t.Skip("needs PINNED_TEST_GPU=1: the simulated form is TestEveryCallRunsOnItsDevice")
	}
	rt := testgpu.Device(t).Runtime()
	if rt.DeviceCount() < 2 {
		t.Skip("needs two GPUs")
	}
	dev, err := rt.Device(1)
	require.NoError(t, err)
	before := usedMemory(t, rt.Devices()[0])
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			runtime.LockOSThread() // a fresh thread for each
			assert.NoError(t, useDevice(context.Background(), dev))
		})
	}
	wg.Wait()
	assert.InDelta(t, before, usedMemory(t, rt.Devices()[0]), 64<<20, "bytes used on device 0")
}
