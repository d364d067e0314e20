package cudart_test

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// newSim starts a simulated library that Open is expected to refuse.
func newSim(t *testing.T, cfg cudasim.Config) *cudasim.Sim {
	t.Helper()
	sim, err := cudasim.New(cfg)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { testgpu.End(t, sim) })
	return sim
}

func TestOpenReportsLibraryAndDevices(t *testing.T) {
	t.Parallel()
	forEachLibrary(t, func(t *testing.T, dev *cudart.Device) {
		rt := dev.Runtime()
		lib := rt.Library()
		assert.NotEmpty(t, lib.Path)
		assert.NotEmpty(t, lib.Found)
		assert.Equal(t, !testgpu.Real(), lib.Simulated)
		assert.GreaterOrEqual(t, lib.Runtime, cudart.Version(11000))
		assert.GreaterOrEqual(t, lib.Driver.Major(), lib.Runtime.Major())
		require.NotEmpty(t, lib.Attempts)
		last := lib.Attempts[len(lib.Attempts)-1]
		assert.NoError(t, last.Err)
		assert.Equal(t, lib.Runtime, last.Runtime)

		assert.NotEmpty(t, dev.Name())
		assert.Regexp(t, `^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`, dev.UUID())
		assert.Regexp(t, `^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]$`, dev.PCIBusID())
		free, total, err := dev.MemInfo()
		require.NoError(t, err)
		assert.Positive(t, free)
		assert.GreaterOrEqual(t, total, free)
		major, err := dev.Attribute(cudart.AttrComputeCapabilityMajor)
		require.NoError(t, err)
		assert.Positive(t, major)
		_, err = dev.Attribute(9999)
		require.ErrorIs(t, err, cudart.ErrInvalidValue)

		for _, i := range []int{-1, rt.DeviceCount()} {
			_, err := rt.Device(i)
			require.ErrorIs(t, err, cudart.ErrInvalidDevice)
			require.ErrorContains(t, err, "this process sees")
		}
		assert.Len(t, rt.Devices(), rt.DeviceCount())
		require.NoError(t, rt.Close())
		require.NoError(t, rt.Close())
	})
}

func TestNoDriver(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12040, 13000} {
		_, err := cudart.Open(context.Background(), cudart.Options{Source: newSim(t, cudasim.Config{Version: v, NoDriver: true})})
		require.ErrorIs(t, err, cudart.ErrNoDriver, "%v", v)
		var open *cudart.OpenError
		require.ErrorAs(t, err, &open)
		assert.Contains(t, open.Remedy(), "driver")
	}
}

func TestDriverTooOld(t *testing.T) {
	t.Parallel()
	_, err := cudart.Open(context.Background(), cudart.Options{Source: newSim(t, cudasim.Config{Version: 13000, DriverVersion: 12040})})
	require.ErrorIs(t, err, cudart.ErrInsufficientDriver)
	require.ErrorContains(t, err, "runtime 13.0")
	require.ErrorContains(t, err, "12.4", "what the driver supports")
	var open *cudart.OpenError
	require.ErrorAs(t, err, &open)
	assert.Equal(t, cudart.Version(13000), open.Attempts[0].Runtime, "the library said so before it failed")
}

func TestNoDevices(t *testing.T) {
	t.Parallel()
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: newSim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{}})})
	require.NoError(t, err, "no device is an answer")
	assert.Empty(t, rt.Devices())
	_, err = rt.Device(0)
	require.ErrorIs(t, err, cudart.ErrInvalidDevice)
	require.ErrorContains(t, err, "CUDA_VISIBLE_DEVICES")
}

func TestNamedLibraryThatIsNone(t *testing.T) {
	for what, named := range map[string]string{
		"absent":          filepath.Join(t.TempDir(), "libcudart.so.12"),
		"another library": "libc.so.6",
	} {
		_, err := cudart.Open(context.Background(), cudart.Options{Library: named})
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		require.ErrorIs(t, err, cudart.ErrNoLibrary, what)
		require.ErrorContains(t, err, named, what)
		var open *cudart.OpenError
		require.ErrorAs(t, err, &open)
		require.Len(t, open.Attempts, 1, "a library that was named is the only one tried")
		t.Setenv("PINNED_CUDART", named)
		_, again := cudart.Open(context.Background(), cudart.Options{})
		require.EqualError(t, errors.Unwrap(again), errors.Unwrap(err).Error(), what)
	}
}

// Each call of Open that fails is an error, of Open or of the device that it is about.
func TestOpenWithEveryCallFailing(t *testing.T) {
	t.Parallel()
	ok := newSim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	_, err := cudart.Open(context.Background(), cudart.Options{Source: ok})
	require.NoError(t, err)
	calls := ok.TotalCalls()
	require.Greater(t, calls, 5)
	for k := 1; k <= calls; k++ {
		sim := newSim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		sim.FailCall(k, cudart.ErrUnknown)
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		if err == nil {
			_, first := rt.Device(0)
			_, second := rt.Device(1)
			err = errors.Join(first, second)
			require.Len(t, rt.Devices(), 1)
		}
		require.ErrorIs(t, err, cudart.ErrUnknown, "call %d of %d", k, calls)
	}
}

// lacking is a library without some functions.
type lacking struct {
	cudart.Source
	names map[string]bool
}

func (l lacking) Symbol(name string) uintptr {
	if l.names[name] {
		return 0
	}
	return l.Source.Symbol(name)
}

func TestMissingFunctions(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{Version: 12040})
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: lacking{sim, map[string]bool{"cudaMallocAsync": true, "cudaMemAdvise_v2": true}}})
	require.NoError(t, err, "optional ones are missed at the call that needs them")
	assert.ElementsMatch(t, []string{"cudaMallocAsync", "cudaMemAdvise_v2"}, rt.Library().Missing)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	_, err = s.Malloc(1)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "cudaMallocAsync")
	require.ErrorContains(t, err, "12.4")
	err = dev.MemAdvise(0, 1, cudart.AdviseReadMostly, dev.Location())
	require.ErrorIs(t, err, errors.ErrUnsupported, "never the old signature in its place")
	require.ErrorContains(t, err, "cudaMemAdvise_v2: not exported", "the name that 12.4 has")

	_, err = cudart.Open(context.Background(), cudart.Options{Source: lacking{sim, map[string]bool{"cudaHostRegister": true}}})
	require.ErrorIs(t, err, cudart.ErrNoLibrary)
	require.ErrorContains(t, err, "cudaHostRegister")
}

func TestDebugRefusesMemoryThatIsNotPinned(t *testing.T) {
	t.Parallel()
	sim := newSim(t, cudasim.Config{})
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim, Debug: true})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	mem, good, heap := device(t, dev, 4096), pinned(t, dev, 4096), make([]byte, 4096)
	require.NoError(t, s.CopyToDevice(mem, pointer(good), 4096))
	var up, down, fine cudart.CopyBatch
	fine.ToDevice(mem, pointer(good), 2048)
	fine.ToHost(pointer(good[2048:]), mem+2048, 2048)
	require.NoError(t, s.CopyBatch(&fine))
	up.ToDevice(mem, pointer(good), 2048)
	up.ToDevice(mem+2048, pointer(heap), 2048)
	down.ToHost(pointer(good[1:]), mem, 4096)
	for what, err := range map[string]error{
		"batch":          s.CopyBatch(&up),
		"batch, its end": s.CopyBatch(&down),
		"to device":      s.CopyToDevice(mem, pointer(heap), 4096),
		"to host":        s.CopyToHost(pointer(heap), mem, 4096),
		"past the end":   s.CopyToDevice(mem, pointer(good), 2*4096),
	} {
		require.ErrorIs(t, err, cudart.ErrInvalidValue, what)
		require.ErrorContains(t, err, "not pinned", what)
	}
	require.ErrorContains(t, s.CopyBatch(&up), "copy 1 of 2")
	require.NoError(t, dev.Synchronize(t.Context()))
	require.NoError(t, dev.CopyToDevice(mem, pointer(heap), 4096), "synchronous copies take any memory")
	fill(heap, 3)
	require.NoError(t, raw.CopyPageable(s, uintptr(mem), pointer(heap), 4096))
	want := bytes.Clone(heap)
	clear(heap) // it may be changed
	require.NoError(t, s.CopyToHost(pointer(good), mem, 4096))
	require.NoError(t, s.SynchronizeBlocking())
	require.Equal(t, want, good)
}

// C writes structs of other sizes in every version. None may be larger than the memory
// that it gets.
func TestStructsHaveRoom(t *testing.T) {
	t.Parallel()
	for version, want := range map[cudart.Version]struct{ pointer, properties int }{
		11080: {24, 728}, 12040: {24, 728}, 13000: {88, 784},
	} {
		assert.LessOrEqual(t, want.pointer, cudart.PointerAttributesSize, "%v", version)
		assert.Less(t, 2*want.properties, cudart.PropertiesSize, "%v, with room for later versions", version)
	}
}

// A device that CUDA cannot describe does not hide the others.
func TestOneDeviceThatFails(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cudaGetDeviceProperties", "cudaDeviceGetPCIBusId"} {
		sim := newSim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
		sim.Fail(fn, cudasim.Fault{Nth: 2, Code: cudart.ErrUnknown})
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err, fn)
		assert.Equal(t, 3, rt.DeviceCount())
		var ordinals []int
		for _, d := range rt.Devices() {
			ordinals = append(ordinals, d.Ordinal())
		}
		assert.Equal(t, []int{0, 2}, ordinals)
		_, err = rt.Device(1)
		require.ErrorIs(t, err, cudart.ErrUnknown)
		require.ErrorContains(t, err, fn+": device 1")
		last, err := rt.Device(2)
		require.NoError(t, err)
		assert.Equal(t, 2, last.Ordinal())
		require.NoError(t, rt.Close())

		sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
		_, err = cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.ErrorIs(t, err, cudart.ErrUnknown, "all of them fail")
		sim.ResetFaults()
	}
}
