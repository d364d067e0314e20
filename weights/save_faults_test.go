package weights_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// A device that falls off the bus during a save leaves the model before, and the error names a tensor and its file.
func TestSaveFromALostDevice(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("devices are lost on the simulated GPU alone")
	}
	for _, snapshot := range []bool{false, true} {
		for at := int64(1); at <= 4; at++ {
			sim, err := cudasim.New(testgpu.Config(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}))
			require.NoError(t, err)
			rt, err := cudart.Open(t.Context(), cudart.Options{Source: sim})
			require.NoError(t, err)
			s := &toSave{bytes: map[string][]byte{}}
			for i, dev := range rt.Devices() {
				for j := range 3 {
					b := bytes.Repeat([]byte{byte(7*i + j)}, 3*mib+j)
					p, err := dev.Malloc(len(b)) // not freed: the device will be lost
					require.NoError(t, err)
					testgpu.CopyToDevice(t, dev, p, b)
					name := fmt.Sprintf("%d.%d", i, j)
					s.bytes[name] = b
					m := weights.Memory{Device: dev, Ptr: p, Bytes: len(b)}
					s.tensors = append(s.tensors, weights.SavedTensor{Name: name, DType: weights.U8, Shape: []int{len(b)}, Memory: m})
				}
			}
			dir := t.TempDir()
			path := filepath.Join(dir, "m.safetensors")
			require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
			o := weights.SaveOptions{}
			if snapshot {
				o.Snapshot, err = pool.New(rt.Devices()[0], pool.Options{})
				require.NoError(t, err)
			}
			var copies atomic.Int64
			sim.OnCall(func(fn string, _ int) {
				if strings.HasPrefix(fn, "cudaMemcpy") && copies.Add(1) == at {
					assert.NoError(t, sim.LoseDevice(1))
				}
			})
			err = save(t.Context(), path, s.tensors, o)
			what := fmt.Sprintf("copy %d, snapshot %v: %v", at, snapshot, err)
			if at == 1 || err != nil { // or the device had no more to do
				require.ErrorIs(t, err, cudart.ErrLaunchFailure, what)
				require.ErrorContains(t, err, "at offset ", what)
				require.ErrorContains(t, err, dir+"/.m.", what)
				require.ErrorContains(t, err, "device 1", what)
			}
			assert.Equal(t, []string{"m.safetensors"}, filesOf(t, dir), what)
			s.check(t, path)
			_ = rt.Close() // what the lost device has stays
			_ = sim.Close()
		}
	}
}

// Devices that are busy with copies and kernels of others give one file their tensors at once.
func TestSaveFromBusyDevices(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	s := newToSave(t, devs)
	ctx, stop := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	for _, dev := range devs {
		m := memoryOf(t, dev, 4*mib)
		for range 3 {
			stream, err := dev.NewStream(cudart.StreamOptions{})
			require.NoError(t, err)
			busy.Go(func() {
				defer func() { assert.NoError(t, stream.Close()) }()
				for ctx.Err() == nil {
					assert.NoError(t, stream.Memset(m.Ptr, 7, m.Bytes))
					assert.NoError(t, stream.Synchronize(t.Context()))
				}
			})
		}
	}
	for _, o := range []weights.SaveOptions{{}, {Snapshot: newPool(t, devs[0], pool.Options{})}, {DirectIO: true}} {
		path := filepath.Join(t.TempDir(), "m.safetensors")
		for range 3 {
			require.NoError(t, save(t.Context(), path, s.tensors, o))
			s.check(t, path)
		}
	}
	stop()
	busy.Wait()
}
