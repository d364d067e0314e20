package transfer

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// losing returns four simulated devices. Direct copies on these paths lose their bytes.
func losing(paths ...[2]int) cudasim.Config {
	return cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), LostPeerCopies: paths}
}

// All bytes arrive although direct copies of a pair are lost, in one direction or in both: the
// pair passes nothing on, the other devices do, and a note names the direction.
func TestNoByteTakesAPathThatLosesIt(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		lost   [][2]int
		groups [][]int
		notes  []string
	}{
		{nil, [][]int{{0, 1, 2, 3}}, nil},
		{[][2]int{{2, 0}}, [][]int{{0, 1, 3}, {2}}, []string{"copies from device 2 (Simulated GPU) to device 0 (Simulated GPU) do not arrive"}},
		{[][2]int{{0, 2}}, [][]int{{0, 1, 3}, {2}}, []string{"copies from device 0 (Simulated GPU) to device 2 (Simulated GPU) do not arrive"}},
		{[][2]int{{1, 0}, {0, 1}}, [][]int{{0, 2, 3}, {1}}, []string{"from device 1 ", "from device 0 "}},
	} {
		t.Run(fmt.Sprint(c.lost), func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, losing(c.lost...))
			r := newFanFixture(t, rt.Devices(), Options{})
			require.Equal(t, c.groups, r.f.groups)
			notes := r.f.Notes()
			require.Len(t, notes, len(c.notes))
			for i, want := range c.notes {
				assert.Contains(t, notes[i], want)
				assert.Contains(t, notes[i], "16384 of 16384 bytes were lost")
			}
			enabled := 0
			for _, group := range c.groups {
				enabled += len(group) * (len(group) - 1)
			}
			require.Equal(t, enabled, sim.Outstanding().PeerAccesses)
			n := 5*mib + 1
			mems, want := r.devices(n), bytesOf(9, n)
			for name, upload := range map[string]func() error{
				"Upload": func() error { return r.f.Upload(t.Context(), mems, want) },
				"UploadFrom": func() error {
					_, err := r.f.UploadFrom(t.Context(), mems, onlyReaderAt{bytes.NewReader(want)}, 0, n)
					return err
				},
			} {
				r.forget(mems, n)
				require.NoError(t, upload(), name)
				r.requireOn(mems, want, name)
			}
			require.NotZero(t, r.f.Stats().PeerBytes, "the other pairs are used")

			proofs := sim.Calls("cudaMalloc")
			again, err := NewFanout(t.Context(), rt.Devices(), Options{})
			require.NoError(t, err)
			require.Equal(t, notes, again.Notes())
			require.Equal(t, c.groups, again.groups)
			require.NoError(t, again.Close())
			require.Equal(t, proofs, sim.Calls("cudaMalloc"), "each path is proved once")
		})
	}
}

// The outcome of a proof belongs to its Runtime.
func TestARuntimeProvesItsOwnPaths(t *testing.T) {
	t.Parallel()
	var zero Fanout
	require.Nil(t, zero.Notes())
	for _, lost := range [][][2]int{nil, {{0, 1}}, nil} {
		_, rt := testgpu.Sim(t, losing(lost...))
		f, err := NewFanout(t.Context(), rt.Devices()[:2], Options{})
		require.NoError(t, err)
		require.Len(t, f.Notes(), len(lost))
		require.NoError(t, f.Close())
	}
}

// A proof is a few calls for each path, and memory and a stream for each device. A later Fanout
// makes none of them.
func TestTheCostOfProofs(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, losing())
	var mu sync.Mutex
	calls := make(map[string]int)
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	create := func(o Options) map[string]int {
		f, err := NewFanout(t.Context(), rt.Devices(), o)
		require.NoError(t, err)
		mu.Lock()
		made := maps.Clone(calls)
		mu.Unlock()
		require.NoError(t, f.Close())
		mu.Lock()
		defer mu.Unlock()
		clear(calls)
		return made
	}
	require.Zero(t, create(Options{NoPeers: true})["cudaMemcpyPeerAsync"])
	first, later := create(Options{}), create(Options{})
	const devices, paths = 4, 12
	for fn, most := range map[string]int{
		"cudaMemcpyPeerAsync": paths,
		"cudaMemcpyAsync":     2 * paths, // the pattern, and what it overwrites
		"cudaMemcpy":          paths,
		"cudaStreamWaitEvent": paths,
		"cudaMalloc":          devices,
		"cudaFree":            devices,
	} {
		assert.LessOrEqual(t, first[fn], most, fn)
		assert.Zero(t, later[fn], fn)
		delete(first, fn)
	}
	assert.Equal(t, devices, first["cudaStreamCreateWithPriority"]-later["cudaStreamCreateWithPriority"])
	for _, fn := range []string{"cudaStreamCreateWithPriority", "cudaStreamDestroy",
		// Of each call its device, and of waits as many as the wait happens to make; events are kept for later.
		"cudaGetDevice", "cudaSetDevice",
		"cudaEventQuery", "cudaStreamQuery", "cudaEventRecord", "cudaEventCreateWithFlags", "cudaGetLastError"} {
		delete(first, fn)
		delete(later, fn)
	}
	assert.Equal(t, later, first, "no other calls are made")
	require.Zero(t, sim.Outstanding().DeviceAllocs)
}

func TestPeersCanBeForbidden(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, losing([2]int{0, 1}))
	r := newFanFixture(t, rt.Devices(), Options{NoPeers: true})
	require.Equal(t, [][]int{{0}, {1}, {2}, {3}}, r.f.groups)
	require.Nil(t, r.f.Notes())
	const n = 3*mib + 7
	mems, want := r.devices(n), bytesOf(10, n)
	require.NoError(t, r.f.Upload(t.Context(), mems, want))
	r.requireOn(mems, want, "forbidden")
	for _, fn := range []string{"cudaDeviceCanAccessPeer", "cudaDeviceEnablePeerAccess", "cudaMemcpyPeerAsync"} {
		require.Zero(t, sim.Calls(fn), fn)
	}
	_, err := NewFanout(t.Context(), nil, Options{NoPeers: true})
	require.ErrorContains(t, err, "no devices")
}

// A device without memory for a proof uses its own link, until a later Fanout can prove its paths.
func TestAProofWithoutDeviceMemory(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, losing())
	sim.Fail("cudaMalloc", cudasim.Fault{Nth: 2, Code: cudart.ErrMemoryAllocation})
	f, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	require.Len(t, f.Notes(), 1)
	require.Contains(t, f.Notes()[0], "prove copies from device 1 (Simulated GPU) to device 0 (Simulated GPU): no device memory for the proof: cudaMalloc")
	require.Len(t, f.groups, 2)
	require.NoError(t, f.Close())
	sim.ResetFaults()
	f, err = NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	require.Nil(t, f.Notes())
	require.Len(t, f.groups, 1)
	require.NoError(t, f.Close())
}

// A proof whose copies fail is an error, which names the path and the way without.
func TestAProofThatFails(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, losing())
	sim.Fail("cudaMemcpyPeerAsync", cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidValue})
	_, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorContains(t, err, "transfer: new fanout on 4 devices: prove copies from device 0 (Simulated GPU) to device 1 (Simulated GPU): cudaMemcpyPeerAsync: ")
	require.ErrorContains(t, err, "(Options.NoPeers forbids copies between devices)")
	o := sim.Outstanding()
	require.Zero(t, o.DeviceAllocs+o.Streams+o.PeerAccesses+o.Registrations)
}

// A proof whose copies do not end keeps NewFanout no longer than its context. When they do end,
// everything is released, and later Fanouts work.
func TestAProofThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, losing([2]int{3, 1}))
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	sim.OnCall(func(fn string, _ int) {
		if fn == "cudaMemcpyPeerAsync" && ctx.Err() == nil {
			sim.Hold()
			time.AfterFunc(10*time.Millisecond, func() { cancel(assert.AnError) })
		}
	})
	_, err := NewFanout(ctx, rt.Devices(), Options{})
	require.ErrorIs(t, err, assert.AnError)
	require.NotContains(t, err.Error(), "NoPeers")
	require.NotZero(t, sim.Outstanding().DeviceAllocs, "the device may write it")
	require.NotZero(t, sim.Outstanding().PeerAccesses)
	sim.OnCall(nil)
	sim.Release()
	require.Eventually(t, func() bool {
		o := sim.Outstanding()
		return o.DeviceAllocs+o.Streams+o.PeerAccesses+o.Registrations == 0
	}, time.Minute, time.Millisecond)
	f, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	require.Len(t, f.Notes(), 1)
	require.NoError(t, f.Close())
}

// The proofs of the machine's GPUs: how long they take, and that every note is about a path that
// CUDA reports.
func TestProofsOfTheMachine(t *testing.T) {
	devs := devicesOf(t, 8)
	if len(devs) < 2 {
		t.Skip("needs two GPUs")
	}
	create := func(what string, o Options) time.Duration {
		began := time.Now()
		f, err := NewFanout(t.Context(), devs, o)
		took := time.Since(began)
		require.NoError(t, err)
		t.Logf("%s on %d devices: %v; groups %v, notes:\n%s", what, len(devs), took, f.groups, strings.Join(f.Notes(), "\n"))
		require.NoError(t, f.Close())
		return took
	}
	rings, err := NewFanout(t.Context(), devs, Options{NoPeers: true}) // contexts and rings are no part of it
	require.NoError(t, err)
	defer func() { require.NoError(t, rings.Close()) }()
	var enabled []func()
	for i, from := range devs { // nor is enabling the access
		for _, to := range slices.Concat(devs[:i], devs[i+1:]) {
			can, err := from.CanAccessPeer(to)
			require.NoError(t, err)
			if can {
				require.NoError(t, from.EnablePeerAccess(to))
				enabled = append(enabled, func() { require.NoError(t, from.DisablePeerAccess(to)) })
			}
		}
	}
	first := create("the first Fanout", Options{})
	later := create("a later one", Options{})
	if pairs := len(enabled) / 2; pairs > 0 {
		t.Logf("proofs: %v for each of %d pairs", (first-later)/time.Duration(pairs), pairs)
	}
	for _, disable := range enabled {
		disable()
	}
}
