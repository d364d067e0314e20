//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestPeerAccessRules(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12040, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := openDirty(t, cudasim.Config{Version: v, Devices: make([]cudasim.DeviceConfig, 3), NoPeerAccess: [][2]int{{2, 0}}})
			enable := func(peer, flags uintptr) cudart.Code { return l.call("cudaDeviceEnablePeerAccess", peer, flags) }
			disable := func(peer uintptr) cudart.Code { return l.call("cudaDeviceDisablePeerAccess", peer) }
			can := map[[2]uintptr]int32{}
			for _, pair := range [][2]uintptr{{0, 0}, {0, 1}, {1, 0}, {0, 2}, {2, 0}, {1, 2}, {2, 1}} {
				can[pair] = get[int32](l, "cudaDeviceCanAccessPeer", pair[0], pair[1])
			}
			assert.Equal(t, map[[2]uintptr]int32{{0, 0}: 0, {0, 1}: 1, {1, 0}: 1, {0, 2}: 0, {2, 0}: 0, {1, 2}: 1, {2, 1}: 1}, can)
			assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaDeviceCanAccessPeer", addr(new(int32)), 0, 3))

			assert.Equal(t, cudart.ErrInvalidDevice, enable(0, 0), "itself")
			assert.Equal(t, cudart.ErrInvalidDevice, enable(3, 0), "no such device")
			assert.Equal(t, cudart.ErrInvalidValue, enable(1, 1), "flags")
			assert.Equal(t, cudart.ErrPeerAccessUnsupported, enable(2, 0))
			assert.Equal(t, cudart.ErrPeerAccessNotEnabled, disable(1))
			assert.Equal(t, cudart.ErrInvalidDevice, disable(0), "itself")
			assert.Equal(t, cudart.ErrInvalidDevice, disable(3), "no such device")
			assert.Zero(t, l.Outstanding())

			assert.Equal(t, cudart.Code(0), enable(1, 0))
			assert.Equal(t, []int{0, 1}, l.Contexts(), "the peer gets a context")
			assert.Equal(t, cudart.Code(704), enable(1, 0))
			assert.Equal(t, cudart.Code(704), l.call("cudaGetLastError"))
			l.ok("cudaSetDevice", 1)
			assert.Equal(t, cudart.ErrPeerAccessNotEnabled, disable(0), "one direction only")
			assert.Equal(t, cudart.Code(0), enable(0, 0))
			assert.Equal(t, cudart.Code(0), enable(2, 0))
			assert.Equal(t, cudasim.Outstanding{PeerAccesses: 3}, l.Outstanding())
			assert.ErrorContains(t, l.Check(), "not released: 3 enabled peers")
			assert.Equal(t, cudart.Code(0), disable(2))
			assert.Equal(t, cudart.ErrPeerAccessNotEnabled, disable(2))
			l.ok("cudaDeviceReset") // ends access from the device and to it
			assert.NoError(t, l.Check())
			l.ok("cudaSetDevice", 0)
			assert.Equal(t, cudart.Code(0), enable(1, 0))
			assert.Equal(t, cudart.Code(0), disable(1))
			assert.NoError(t, l.Check())
		})
	}
}

// Copies between devices are direct with peer access in either direction, and
// staged through the host at the speed of the slower link without.
func TestPeerCopies(t *testing.T) {
	t.Parallel()
	locked(t)
	const n = mib
	speed := func(ms int) cudasim.Speed {
		return cudasim.Speed{Rate: 1e6, Latency: time.Duration(ms) * time.Millisecond}
	}
	l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{
		{Link: cudasim.Link{Peer: speed(1), HostToDevice: speed(2), DeviceToHost: speed(3)}},
		{Link: cudasim.Link{Peer: speed(1), HostToDevice: speed(4), DeviceToHost: speed(5)}},
	}})
	l.ok("cudaSetDevice", 1)
	there := get[uintptr](l, "cudaMalloc", n)
	l.ok("cudaSetDevice", 0)
	here, h, s := l.device(n), l.pinned(n), l.stream()
	forms := map[string]func(dst, to, src, from uintptr){
		"cudaMemcpyPeerAsync": func(dst, to, src, from uintptr) { l.ok("cudaMemcpyPeerAsync", dst, to, src, from, n, s) },
		"device to device":    func(dst, _, src, _ uintptr) { l.ok("cudaMemcpyAsync", dst, src, n, d2d, s) },
		"default":             func(dst, _, src, _ uintptr) { l.ok("cudaMemcpyAsync", dst, src, n, 4, s) },
	}
	check := func(name string, out, back time.Duration) {
		t.Helper()
		for form, run := range forms {
			l.ok("cudaMemsetAsync", here, 7, n, s)
			assert.InDelta(t, out, elapsed(l, s, func() { run(there, 1, here, 0) }), float64(50*time.Microsecond), "%s: out by %s", name, form)
			l.ok("cudaMemsetAsync", here, 0, n, s)
			assert.InDelta(t, back, elapsed(l, s, func() { run(here, 0, there, 1) }), float64(50*time.Microsecond), "%s: back by %s", name, form)
			clear(h)
			l.ok("cudaMemcpyAsync", addr(&h[0]), here, n, d2h, s)
			l.ok("cudaStreamSynchronize", s)
			assert.EqualValues(t, 7, h[n-1], "%s: %s", name, form)
		}
	}
	check("staged", 4*time.Millisecond, 5*time.Millisecond)
	l.ok("cudaDeviceEnablePeerAccess", 1, 0)
	check("from 0 to 1", time.Millisecond, time.Millisecond)
	l.ok("cudaDeviceDisablePeerAccess", 1)
	check("staged again", 4*time.Millisecond, 5*time.Millisecond)
	l.ok("cudaSetDevice", 1)
	l.ok("cudaDeviceEnablePeerAccess", 0, 0)
	l.ok("cudaSetDevice", 0)
	check("from 1 to 0", time.Millisecond, time.Millisecond)
	l.ok("cudaSetDevice", 1)
	l.ok("cudaDeviceDisablePeerAccess", 0)
	l.ok("cudaFree", there)
	l.ok("cudaSetDevice", 0)
}

// Direct copies of a pair that loses them succeed, in the time that they take, and the
// destination keeps its bytes. Staged ones arrive, and so does the other direction.
func TestPeerCopiesThatAreLost(t *testing.T) {
	t.Parallel()
	locked(t)
	const n = 4096
	l := open(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), LostPeerCopies: [][2]int{{0, 1}}})
	l.ok("cudaSetDevice", 1)
	there := get[uintptr](l, "cudaMalloc", n)
	l.ok("cudaSetDevice", 0)
	here, h, s := l.device(n), l.pinned(n), l.stream()
	value := func(at uintptr) byte {
		l.ok("cudaMemcpyAsync", addr(&h[0]), at, n, d2h, s)
		l.ok("cudaStreamSynchronize", s)
		return h[n-1]
	}
	copies := map[string]func(dst, to, src, from uintptr){
		"cudaMemcpyPeerAsync": func(dst, to, src, from uintptr) { l.ok("cudaMemcpyPeerAsync", dst, to, src, from, n, s) },
		"device to device":    func(dst, _, src, _ uintptr) { l.ok("cudaMemcpyAsync", dst, src, n, d2d, s) },
	}
	for name, run := range copies {
		for _, direct := range []bool{false, true} {
			if direct {
				l.ok("cudaDeviceEnablePeerAccess", 1, 0)
			}
			l.ok("cudaMemsetAsync", here, 1, n, s)
			l.ok("cudaMemsetAsync", there, 2, n, s)
			run(there, 1, here, 0)
			l.ok("cudaStreamSynchronize", s)
			want := byte(1)
			if direct {
				want = 2
			}
			assert.Equal(t, want, value(there), "%s, direct: %v", name, direct)
			l.ok("cudaMemsetAsync", there, 3, n, s)
			run(here, 0, there, 1)
			assert.EqualValues(t, 3, value(here), "%s back, direct: %v", name, direct)
			if direct {
				l.ok("cudaDeviceDisablePeerAccess", 1)
			}
		}
	}
	l.ok("cudaSetDevice", 1)
	l.ok("cudaFree", there)
	l.ok("cudaSetDevice", 0)
}

func TestPeerCopyArguments(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	there := get[uintptr](l, "cudaMalloc", 64)
	l.ok("cudaSetDevice", 0)
	here, h, s := l.device(64), l.pinned(64), l.stream()
	managed := get[uintptr](l, "cudaMallocManaged", 64, 1)
	for name, tt := range map[string]struct {
		args []uintptr
		code cudart.Code
	}{
		"nothing":             {[]uintptr{0, 0, 0, 1, 0}, cudart.Code(0)},
		"within a device":     {[]uintptr{here, 0, here + 32, 0, 32}, cudart.Code(0)},
		"managed":             {[]uintptr{managed, 1, here, 0, 64}, cudart.Code(0)},
		"no device to":        {[]uintptr{here, 2, there, 1, 64}, cudart.ErrInvalidDevice},
		"no device from":      {[]uintptr{here, 0, there, ^uintptr(0), 64}, cudart.ErrInvalidDevice},
		"swapped":             {[]uintptr{here, 1, there, 0, 64}, cudart.ErrInvalidValue},
		"wrong source":        {[]uintptr{here, 0, there, 0, 64}, cudart.ErrInvalidValue},
		"pinned host memory":  {[]uintptr{addr(&h[0]), 0, there, 1, 64}, cudart.ErrInvalidValue},
		"other host memory":   {[]uintptr{here, 0, addr(&make([]byte, 64)[0]), 1, 64}, cudart.ErrInvalidValue},
		"beyond the end":      {[]uintptr{here, 0, there, 1, 65}, cudart.ErrInvalidValue},
		"an absurd number of": {[]uintptr{here, 0, there, 1, ^uintptr(0)}, cudart.ErrInvalidValue},
	} {
		assert.Equal(t, tt.code, l.call("cudaMemcpyPeerAsync", append(tt.args, s)...), name)
	}
	l.ok("cudaStreamSynchronize", s)
	l.ok("cudaFree", managed)
	l.ok("cudaSetDevice", 1)
	l.ok("cudaFree", there)
	l.ok("cudaSetDevice", 0)
}
