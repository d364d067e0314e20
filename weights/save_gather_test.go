package weights_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
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
			all := 5 * mib
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
			s.check(t, path)
		})
	}
}
