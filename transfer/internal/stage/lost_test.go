package stage

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Memory of a ring that another device may be reading holds up no copies but
// those that need it, which fail, until that device is done.
func TestARingHeldByALostDeviceDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	var over []*Stage
	var mems []cudart.DevPtr
	for _, dev := range rt.Devices() {
		s, err := Acquire(t.Context(), dev)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Release(context.Background())) })
		over, mems = append(over, s), append(mems, device(t, dev, 64*mib))
	}
	src := random(64*mib, 1)
	both := func(ctx context.Context) error {
		_, err := over[0].Run(ctx, Copy{N: len(src), Host: from(src), Stages: over, Groups: [][]int{{0}, {1}}, MaxChunk: ringUnit, // no unit is left
			Queue: func(on *cudart.Stream, to int, mem []byte, off int) error {
				return on.CopyToDevice(mems[to]+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
			}})
		return err
	}
	blocked := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(blocked) })
	t.Cleanup(goOn)
	require.NoError(t, over[1].link(toDevice, false).stream.LaunchHostFunc(func() { <-blocked }))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // ends it when all of the ring is taken, after which nothing is queued
		r := over[0].ring
		for full := false; !full; runtime.Gosched() {
			r.mu.Lock()
			full = len(r.waiters) > 0 && len(r.inFlight) == r.units
			r.mu.Unlock()
		}
		cancel()
	}()
	err := both(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, ErrUnderWay)
	require.ErrorContains(t, err, "of device 1 (")

	_, err = upload(t.Context(), over[0], mems[0], src)
	require.ErrorIs(t, err, errLost)
	goOn()
	for err != nil {
		require.ErrorIs(t, err, errLost)
		_, err = upload(t.Context(), over[0], mems[0], src)
	}
	back := make([]byte, len(src))
	_, err = download(t.Context(), over[0], back, mems[0])
	require.NoError(t, err)
	require.True(t, bytes.Equal(src, back))
}
