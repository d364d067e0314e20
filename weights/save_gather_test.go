package weights_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// Many small tensors, apart in device memory, are copied by few launches of a kernel, and by copy engines without it, or
// where the pool has no room for its list.
func TestManySmallTensorsAreSaved(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls are counted on the simulated GPU")
	}
	const size, apart = 30_001, 30_208
	for what, c := range map[string]struct {
		fail   string
		max    int // bytes of the pool of a snapshot
		copies bool
	}{"through": {}, "snapshot": {max: 128 * mib}, "full pool": {max: 32 * mib, copies: true}, "no kernel": {fail: "cuModuleLoadDataEx", copies: true}, "no view": {fail: "cudaHostGetDevicePointer", copies: true}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			all := 9 * mib
			if c.max == 32*mib {
				all = 66 * mib // a piece fills the pool
			}
			m := memoryOf(t, dev, all/size*apart)
			content := make([]byte, m.Bytes)
			for i := range content {
				content[i] = byte(i ^ i>>8 ^ i>>16)
			}
			testgpu.CopyToDevice(t, dev, m.Ptr, content)
			s := &toSave{bytes: map[string][]byte{}}
			for i := range all / size {
				name := fmt.Sprint("t", i)
				s.tensors = append(s.tensors, weights.SavedTensor{
					Name: name, DType: weights.U8, Shape: []int{size}, Memory: weights.Memory{Device: dev, Ptr: m.Ptr + cudart.DevPtr(i*apart), Bytes: size},
				})
				s.bytes[name] = content[i*apart:][:size]
			}
			o := weights.SaveOptions{NoChecksums: true}
			if c.max > 0 {
				o.Snapshot = newPool(t, dev, pool.Options{MaxBytes: c.max})
			}
			if c.fail != "" {
				sim.Fail(c.fail, cudasim.Fault{Code: cudart.ErrInvalidValue, Times: -1})
			}
			before := sim.Calls("cudaMemcpyAsync")
			path := filepath.Join(t.TempDir(), "m.safetensors")
			require.NoError(t, save(t.Context(), path, s.tensors, o))
			assert.Equal(t, c.copies, sim.Calls("cudaMemcpyAsync")-before > 100)
			assert.Equal(t, c.fail == "", sim.Calls("cuLaunchKernel") > 0)
			assert.Equal(t, 1, sim.Calls("cuModuleLoadDataEx"))
			s.check(t, path)
		})
	}
}

// apart makes tensors of sizes, whose memory is not neighbouring.
func apart(t *testing.T, dev *cudart.Device, sizes ...int) (list []weights.SavedTensor) {
	t.Helper()
	const gap = 200
	all := 0
	for _, n := range sizes {
		all += n + gap
	}
	m := memoryOf(t, dev, all)
	for i, n := range sizes {
		list = append(list, weights.SavedTensor{
			Name: fmt.Sprint("t", i), DType: weights.U8, Shape: []int{n}, Memory: weights.Memory{Device: dev, Ptr: m.Ptr, Bytes: n},
		})
		m.Ptr += cudart.DevPtr(n + gap)
	}
	return list
}

// A kernel whose launch was abandoned finds its memory as it was: no other lease has it, and it is pinned.
func TestLateKernelsOfSaves(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls block on the simulated GPU alone")
	}
	for what, c := range map[string]struct {
		fn        string
		nth       int
		large     bool
		snapshot  bool
		checksums bool
	}{
		"view":                  {fn: "cudaHostGetDevicePointer", snapshot: true},
		"gather":                {fn: "cuLaunchKernel", snapshot: true},
		"gather through":        {fn: "cuLaunchKernel"},
		"checksums":             {fn: "cuLaunchKernel", large: true, snapshot: true, checksums: true},
		"gather with checksums": {fn: "cuLaunchKernel", nth: 2, checksums: true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{}) // which finds memory that a kernel may not use
			dev := rt.Devices()[0]
			sizes := slices.Repeat([]int{3000}, 200)
			if c.large {
				sizes = slices.Repeat([]int{mib}, 8)
			}
			tensors := apart(t, dev, sizes...)
			path := filepath.Join(t.TempDir(), "m.safetensors")
			o := weights.SaveOptions{NoChecksums: !c.checksums}
			if c.snapshot {
				o.Snapshot = newPool(t, dev, pool.Options{})
			}
			require.NoError(t, save(t.Context(), path, tensors, o)) // with kernels loaded, copies can be slower
			sim.OnCall(func(fn string, _ int) {
				if fn == "cudaMemcpyAsync" {
					time.Sleep(30 * time.Millisecond)
				}
			})
			unblock := sim.Block(c.fn, cudasim.Fault{Nth: c.nth})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- save(ctx, path, tensors, o) }()
			require.NoError(t, sim.AwaitBlocked(t.Context(), c.fn, 1))
			cancel()
			err := <-ended
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, transfer.ErrUnderWay)
			if c.snapshot && !c.checksums {
				assert.Len(t, o.Snapshot.Outstanding(), 1)
			}
			unblock()
			sim.OnCall(nil)
			require.Eventually(t, func() bool {
				return save(t.Context(), path, tensors, o) == nil && (!c.snapshot || len(o.Snapshot.Outstanding()) == 0)
			}, time.Minute, time.Millisecond)
		})
	}
}

// The memory of a snapshot serves the next one, although the lists of small tensors have several sizes.
func TestSnapshotsOfSmallTensorsPinNothingAgain(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls are counted on the simulated GPU")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	var sizes []int
	for i := range 4 {
		n := 2000 << i
		sizes = append(sizes, slices.Repeat([]int{n}, 33*mib/n)...)
	}
	tensors := apart(t, dev, sizes...)
	o := weights.SaveOptions{Snapshot: newPool(t, dev, pool.Options{}), NoChecksums: true}
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, tensors, o))
	before := sim.Calls("cudaHostRegister")
	for range 4 {
		require.NoError(t, save(t.Context(), path, tensors, o))
	}
	assert.Equal(t, before, sim.Calls("cudaHostRegister"))
}

// What a save has kept is closed by the runtime, also after a call that fails.
func TestClosingWhatSavesKeepAgain(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls fail on the simulated GPU alone")
	}
	for fn, late := range map[string]bool{"cuModuleUnload": false, "cudaHostUnregister": true, "cudaStreamDestroy": true} {
		sim, rt := testgpu.Sim(t, cudasim.Config{})
		tensors := apart(t, rt.Devices()[0], slices.Repeat([]int{3000}, 200)...)
		require.NoError(t, save(t.Context(), filepath.Join(t.TempDir(), "m.safetensors"), tensors, weights.SaveOptions{}))
		sim.Fail(fn, cudasim.Fault{Code: cudart.ErrLaunchFailure, Late: late})
		require.ErrorIs(t, rt.Close(), cudart.ErrLaunchFailure, fn)
		require.NoError(t, rt.Close(), fn)
	}
}

// Work that does not end delays a save that was cancelled as long on several devices as on one.
func TestCancelledSaveOfDevicesThatHang(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("devices hang on the simulated GPU alone")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 6)}) // which finds leaks at the end
	var tensors []weights.SavedTensor
	for i, dev := range rt.Devices() {
		for _, s := range apart(t, dev, slices.Repeat([]int{3000}, 200)...) {
			s.Name += fmt.Sprint(" of ", i)
			tensors = append(tensors, s)
		}
	}
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{}))
	sim.Hold()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	assert.ErrorIs(t, save(ctx, path, tensors, weights.SaveOptions{}), transfer.ErrUnderWay)
	assert.Less(t, time.Since(began), 7*time.Second)
	sim.Release()
	require.NoError(t, save(t.Context(), path, tensors, weights.SaveOptions{})) // which releases what that could not
}
