package weights_test

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// A summedSim is simulated devices whose kernel counts what it sums, and shows memory to a function before.
type summedSim struct {
	*cudasim.Sim
	devs  []*cudart.Device
	spans atomic.Int64
	see   func(device int, at cudart.DevPtr, mem []byte)
}

func newSummedSim(t *testing.T, devices int) *summedSim {
	t.Helper()
	if testgpu.Real() {
		t.Skip("the kernel is one of the simulated GPU")
	}
	s := &summedSim{}
	sim, rt := testgpu.Sim(t, cudasim.Config{
		Devices: make([]cudasim.DeviceConfig, devices),
		Kernels: map[string]cudasim.KernelFunc{"pinned_crc32c": func(l *cudasim.Launch) {
			n := cudasim.Arg[int](l, 1)
			spans := cudasim.Elements[gpukernels.Span](l.Read(cudasim.Arg[cudart.DevPtr](l, 0), n*gpukernels.SpanBytes))
			sums := cudasim.Elements[uint32](l.Write(cudasim.Arg[cudart.DevPtr](l, 2), 4*n))
			for i, span := range spans {
				s.spans.Add(1)
				mem := l.Read(span.Address, int(span.Size))
				if s.see != nil {
					mem = bytes.Clone(mem)
					s.see(l.Device, span.Address, mem)
				}
				sums[i] = crc32.Checksum(mem, crc32.MakeTable(crc32.Castagnoli))
			}
		}},
	})
	s.Sim, s.devs = sim, rt.Devices()
	return s
}

// Devices compute the checksums, of saves before the copy and of loads after it, and the CPU does without them.
func TestChecksumsOfDevices(t *testing.T) {
	t.Parallel()
	for _, without := range []bool{false, true} {
		sim := newSummedSim(t, 2)
		if without {
			sim.Fail("cuModuleLoadDataEx", cudasim.Fault{Code: cudart.ErrNoKernelImageForDevice, Times: 1000})
		}
		s := newToSave(t, sim.devs)
		path := filepath.Join(t.TempDir(), "m.safetensors")
		loads := 0
		for i, o := range []weights.SaveOptions{{}, {ShardBytes: 1 << 40, Snapshot: newPool(t, sim.devs[0], pool.Options{})}} {
			sim.spans.Store(0)
			require.NoError(t, save(t.Context(), path, s.tensors, o))
			assert.Equal(t, without, sim.spans.Load() == 0)
			s.check(t, path)
			require.NoError(t, weights.Verify(t.Context(), path))
			sim.spans.Store(0)
			l, err := weights.LoadModel(t.Context(), sim.devs[1], path, weights.LoadOptions{Checksums: true})
			require.NoError(t, err)
			require.NoError(t, l.Close())
			assert.Equal(t, without, sim.spans.Load() == 0)
			if i == 0 {
				loads = sim.Calls("cuModuleLoadDataEx")
			}
		}
		assert.Equal(t, !without, loads == sim.Calls("cuModuleLoadDataEx"), "the kernel stays loaded")
	}
}

// The CPU computes the checksums of a load onto two devices if only the first one has the kernel.
func TestOneDeviceWithoutTheKernelOfChecksums(t *testing.T) {
	t.Parallel()
	sim := newSummedSim(t, 2)
	sim.Fail("cuModuleLoadDataEx", cudasim.Fault{Code: cudart.ErrNoKernelImageForDevice, Times: -1, Devices: []int{1}})
	s := newToSave(t, sim.devs)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	f, err := weights.OpenFile(path)
	require.NoError(t, err)
	defer f.Close()
	large, ok := f.Tensor("large0")
	require.True(t, ok)
	plan, err := weights.PlanShares([]weights.Share{{Part: large.Whole()}, {Part: large.Whole(), Device: 1}}, weights.PlanOptions{})
	require.NoError(t, err)
	sim.spans.Store(0)
	l, err := plan.LoadNew(t.Context(), sim.devs, weights.LoadOptions{Checksums: true})
	require.NoError(t, err)
	require.NoError(t, l.Close())
	assert.Zero(t, sim.spans.Load())
}

// Bits that flip between a device and the file are found before the file has its name.
func TestFlippedBitsOfSaves(t *testing.T) {
	t.Parallel()
	sim := newSummedSim(t, 2)
	s := newToSave(t, sim.devs)
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	for _, name := range []string{"large1", "odd0", "scattered1.7"} {
		m := memoryOfTensor(t, s, name)
		sim.see = func(device int, at cudart.DevPtr, mem []byte) {
			if i := int(m.Ptr) - int(at) + m.Bytes - 1; device == m.Device.Ordinal() && 0 <= i && i < len(mem) {
				mem[i] ^= 0x10
			}
		}
		for _, o := range []weights.SaveOptions{{}, {Snapshot: newPool(t, sim.devs[0], pool.Options{})}} {
			err := save(t.Context(), path, s.tensors, o)
			var wrong *weights.ChecksumError
			require.ErrorAs(t, err, &wrong)
			assert.Equal(t, name, wrong.Tensor)
			assert.True(t, wrong.InCopy)
			assert.Positive(t, wrong.Offset)
			assert.Equal(t, min(m.Bytes, mib), wrong.Size)
			require.ErrorContains(t, err, fmt.Sprintf("tensor %q", name))
			require.ErrorContains(t, err, "they changed between the file and the device")
			assert.Equal(t, []string{"m.safetensors"}, filesOf(t, dir))
			s.check(t, path)
		}
	}
}

func memoryOfTensor(t *testing.T, s *toSave, name string) weights.Memory {
	t.Helper()
	for _, tensor := range s.tensors {
		if tensor.Name == name {
			return tensor.Memory
		}
	}
	require.Fail(t, "no tensor", name)
	return weights.Memory{}
}

// Bits that flip on the way to a device, or on it, are found there, of each device that gets a tensor.
func TestFlippedBitsOfLoads(t *testing.T) {
	t.Parallel()
	sim := newSummedSim(t, 2)
	s := newToSave(t, sim.devs)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	f, err := weights.OpenFile(path)
	require.NoError(t, err)
	defer f.Close()
	large, ok := f.Tensor("large0")
	require.True(t, ok)
	half, err := large.Rows(0, 256)
	require.NoError(t, err)
	rest, err := large.Rows(256, 512)
	require.NoError(t, err)
	uneven, err := large.Rows(1, 300) // of whose blocks one is whole
	require.NoError(t, err)
	for what, shares := range map[string][]weights.Share{
		"whole":          {{Part: large.Whole()}},
		"on both":        {{Part: large.Whole()}, {Part: large.Whole(), Device: 1}},
		"halves":         {{Part: half}, {Part: rest, Device: 1}},
		"whole and half": {{Part: large.Whole(), Device: 1}, {Part: half}},
		"rows":           {{Part: uneven}, {Part: large.Whole(), Device: 1}},
	} {
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err, what)
		load := func() error {
			l, err := plan.LoadNew(t.Context(), sim.devs, weights.LoadOptions{Checksums: true})
			if err == nil {
				require.NoError(t, l.Close())
			}
			return err
		}
		sim.see = nil
		require.NoError(t, load(), what)
		for device := range len(sim.devs) {
			var flipped atomic.Int64
			sim.see = func(at int, _ cudart.DevPtr, mem []byte) {
				if at == device && len(mem) == mib {
					mem[77] ^= 1
					flipped.Add(1)
				}
			}
			err := load()
			if flipped.Load() == 0 {
				require.NoError(t, err, what)
				continue
			}
			var wrong *weights.ChecksumError
			require.ErrorAs(t, err, &wrong, "%s, device %d", what, device)
			assert.Equal(t, "large0", wrong.Tensor)
			assert.True(t, wrong.InCopy)
			assert.Equal(t, mib, wrong.Size)
		}
	}
}

// A call that fails while devices compute checksums fails the save or the load, or the CPU computes them: nothing is
// left, and the model before is whole.
func TestChecksumsThatFail(t *testing.T) {
	t.Parallel()
	for fn, fails := range map[string]bool{
		"cuLaunchKernel": true, "cuModuleLoadDataEx": false, "cuModuleGetFunction": false, "cudaHostRegister": false, "cudaHostGetDevicePointer": false,
	} {
		t.Run(fn, func(t *testing.T) { failChecksums(t, fn, fails) })
	}
}

func failChecksums(t *testing.T, fn string, fails bool) {
	large := func() (*summedSim, *toSave) {
		sim := newSummedSim(t, 1)
		all := newToSave(t, sim.devs)
		s := &toSave{bytes: all.bytes}
		for _, tensor := range all.tensors {
			if len(all.bytes[tensor.Name]) >= mib { // smaller ones are copied by another kernel
				s.tensors = append(s.tensors, tensor)
			}
		}
		return sim, s
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")
	_, before := large()
	require.NoError(t, save(t.Context(), path, before.tensors, weights.SaveOptions{}))
	options := []weights.SaveOptions{{}, {NoChecksums: true}}
	if fn == "cudaHostRegister" { // without which nothing is saved
		options = nil
	}
	for _, o := range options {
		sim, s := large()
		sim.Fail(fn, cudasim.Fault{Code: cudart.ErrLaunchFailure, Times: 1})
		err := save(t.Context(), path, s.tensors, o)
		called := sim.Calls(fn) > 0
		sim.ResetFaults()
		if fails && !o.NoChecksums {
			require.ErrorIs(t, err, cudart.ErrLaunchFailure)
			require.ErrorContains(t, err, `tensor "large0", at offset `)
			require.ErrorContains(t, err, "checksums on device 0")
			before.check(t, path)
		} else {
			require.NoError(t, err)
			s.check(t, path)
			before = s
		}
		require.True(t, called || o.NoChecksums)
		assert.Equal(t, []string{"m.safetensors"}, filesOf(t, dir))
		require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}), "again")
		s.check(t, path)
		before = s
	}
	sim, _ := large()
	sim.Fail(fn, cudasim.Fault{Code: cudart.ErrLaunchFailure, Times: 1})
	l, err := weights.LoadModel(t.Context(), sim.devs[0], path, weights.LoadOptions{Checksums: true})
	sim.ResetFaults()
	if !fails {
		require.NoError(t, err)
		require.NoError(t, l.Close())
		return
	}
	var loading *weights.LoadError
	require.ErrorAs(t, err, &loading)
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	require.ErrorContains(t, err, "checksums on device 0")
}
