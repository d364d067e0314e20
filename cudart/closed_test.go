package cudart_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// After Close no work begins, and everything can still be released.
func TestClosedRuntime(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	e, err := dev.NewEvent()
	require.NoError(t, err)
	mem, err := dev.Malloc(64)
	require.NoError(t, err)
	host, err := dev.HostAlloc(64, 0)
	require.NoError(t, err)
	managed, err := dev.MallocManaged(64)
	require.NoError(t, err)
	require.NoError(t, s.CopyToDevice(mem, host, 64))
	require.NoError(t, s.Record(e))
	point := s.Point()
	require.NoError(t, rt.Close())
	require.NoError(t, rt.Close(), "a second Close does nothing")

	ctx := context.Background()
	var batch cudart.CopyBatch
	batch.ToDevice(mem, host, 1)
	for what, do := range map[string]func() error{
		"device":      func() error { _, err := rt.Device(0); return err },
		"malloc":      func() error { _, err := dev.Malloc(64); return err },
		"host alloc":  func() error { _, err := dev.HostAlloc(64, 0); return err },
		"managed":     func() error { _, err := dev.MallocManaged(64); return err },
		"register":    func() error { return dev.HostRegister(host, 64, 0) },
		"stream":      func() error { _, err := dev.NewStream(cudart.StreamOptions{}); return err },
		"event":       func() error { _, err := dev.NewEvent(); return err },
		"copy":        func() error { return s.CopyToDevice(mem, host, 64) },
		"batch":       func() error { return s.CopyBatch(&batch) },
		"sync copy":   func() error { return dev.CopyToDevice(mem, host, 64) },
		"memset":      func() error { return s.Memset(mem, 0, 64) },
		"wait event":  func() error { return raw.WaitEvent(s, e) },
		"host func":   func() error { return s.LaunchHostFunc(func() {}) },
		"synchronize": func() error { return dev.Synchronize(ctx) },
		"memory":      func() error { _, _, err := dev.MemInfo(); return err },
	} {
		err := do()
		assert.ErrorIs(t, err, cudart.ErrClosed, what)
		assert.ErrorIs(t, err, os.ErrClosed, what)
	}
	require.Eventually(t, func() bool { return point.Done(ctx) }, 20*time.Second, time.Millisecond, "queries work on")
	require.NoError(t, point.Wait(ctx), "what is known needs no waiting")
	require.NoError(t, dev.Free(mem))
	require.NoError(t, dev.Free(cudart.DevPtr(uintptr(managed))))
	require.NoError(t, dev.FreeHost(host))
	require.NoError(t, e.Close())
	require.NoError(t, s.Close())
}

// An event that is made while Close destroys those of the Runtime is destroyed too.
func TestCloseWhileAnEventIsMade(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]cudart.Code{"": cudart.Code(0), "destroying it reports an error of earlier work": cudart.ErrMemoryAllocation} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			s := stream(t, dev)
			require.NoError(t, s.LaunchHostFunc(func() {}))
			unblock := sim.Block("cudaEventCreateWithFlags", cudasim.Fault{Late: true})
			points := make(chan cudart.Point)
			go func() { points <- s.Point() }()
			require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaEventCreateWithFlags", 1))
			require.NoError(t, rt.Close())
			sim.Fail("cudaEventDestroy", cudasim.Fault{Code: code})
			unblock()
			<-points
			assert.Zero(t, sim.Outstanding().Events)
		})
	}
}

// A nil context, stream or event is an error in every method.
func TestNilArguments(t *testing.T) {
	dev := testgpu.Device(t)
	s := stream(t, dev)
	timed := event(t, dev)
	var none context.Context
	open := gate(t, s) // so that the point is not reached
	point := s.Timeline().End()
	for what, err := range map[string]error{
		"stream":  s.Synchronize(none),
		"device":  dev.Synchronize(none),
		"point":   point.Wait(none),
		"record":  s.Record(nil),
		"host fn": s.LaunchHostFunc(nil),
	} {
		assert.ErrorContains(t, err, "is nil", what)
	}
	_, err := timed.Since(nil)
	assert.ErrorContains(t, err, "is nil")
	assert.False(t, point.Done(none))
	open()
	require.NoError(t, s.Synchronize(t.Context()))
}

// An error of cudaGetDevice or cudaSetDevice is reported as theirs.
func TestFailedSelectionIsNamed(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := rt.Device(1)
	require.NoError(t, err)
	for _, fn := range []string{"cudaGetDevice", "cudaSetDevice"} {
		sim.Fail(fn, cudasim.Fault{Code: cudart.ErrMemoryAllocation, Times: -1})
		_, err = dev.Malloc(64)
		sim.ResetFaults()
		var call *cudart.Error
		if !assert.ErrorAs(t, err, &call, fn) {
			continue
		}
		assert.Equal(t, fn, call.Op)
		assert.Equal(t, cudart.ErrMemoryAllocation, call.Code)
		assert.Contains(t, call.Detail, "for cudaMalloc: 64 bytes")
	}
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
}
