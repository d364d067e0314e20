//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

var twoDevices = cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}

func TestThreadsHaveTheirOwnDeviceAndError(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaSetDevice", 5))
	for range 50 { // thread ids of the kernel repeat
		onFreshThread(func() {
			assert.EqualValues(t, 0, get[int32](l, "cudaGetDevice"))
			assert.Equal(t, cudart.Code(0), l.call("cudaPeekAtLastError"))
			assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaSetDevice", 6))
			l.ok("cudaSetDevice", 1)
			assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaGetLastError"))
			assert.Equal(t, cudart.Code(0), l.call("cudaGetLastError"))
		})
	}
	assert.EqualValues(t, 1, get[int32](l, "cudaGetDevice"))
	assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaPeekAtLastError"))
	assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaGetLastError"))
	assert.Equal(t, cudart.Code(0), l.call("cudaGetLastError"))
}

func TestSetDeviceMakesAContextFrom12(t *testing.T) {
	t.Parallel()
	for v, want := range map[cudart.Version][]int{11080: nil, 12040: {1}, 13000: {1}} {
		onFreshThread(func() {
			l := open(t, cudasim.Config{Version: v, Devices: twoDevices.Devices})
			l.ok("cudaSetDevice", 1)
			assert.Equal(t, want, l.Contexts(), v)
		})
	}
}

// The trap that a goroutine on the wrong thread falls into.
func TestForeignStreamMakesAStrayContext(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	h, d, s := l.pinned(64), l.device(64), l.stream()
	assert.Equal(t, []int{1}, l.Contexts())
	assert.Empty(t, wrongDevice(l.Sim))
	onFreshThread(func() {
		l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
		assert.Equal(t, []int{0, 1}, l.Contexts())
		e := get[uintptr](l, "cudaEventCreateWithFlags", 0)
		assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaEventRecord", e, s))
		l.ok("cudaEventDestroy", e)
	})
	l.ok("cudaStreamSynchronize", s)
	wrong := wrongDevice(l.Sim)
	require.Len(t, wrong, 2)
	for i, fn := range []string{"cudaMemcpyAsync", "cudaEventRecord"} {
		assert.Equal(t, "wrong device", wrong[i].Kind)
		assert.Equal(t, fn, wrong[i].Call)
		assert.Equal(t, 0, wrong[i].Current)
		assert.Equal(t, 1, wrong[i].Want)
	}
	assert.Equal(t, wrong, l.Misuses())
	assert.ErrorContains(t, l.Check(), "wrong device: cudaMemcpyAsync: stream")
}

func TestWrongDeviceForMemory(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	p, h := get[uintptr](l, "cudaMalloc", 64), l.pinned(64)
	l.ok("cudaSetDevice", 0)
	l.ok("cudaMemcpy", p, addr(&h[0]), 64, h2d)
	l.ok("cudaMemset", p, 0, 64)
	q := l.device(64)
	l.ok("cudaMemcpy", p, q, 64, d2d) // between devices: one of them is current
	l.ok("cudaFree", p)
	var calls []string
	for _, m := range wrongDevice(l.Sim) {
		calls = append(calls, m.Call)
	}
	assert.Equal(t, []string{"cudaMemcpy", "cudaMemset", "cudaFree"}, calls)
	l.ok("cudaSetDevice", 1)
}

// wrongDevice returns the misuses of that kind.
func wrongDevice(sim *cudasim.Sim) []cudasim.Misuse {
	return slices.DeleteFunc(sim.Misuses(), func(m cudasim.Misuse) bool { return m.Kind != "wrong device" })
}
