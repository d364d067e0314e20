package weights

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A header is what encoding/json makes of a map.
func TestHeadersAreThoseOfEncodingJSON(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	parts := []string{"a", "Z", "_", "\"", `\`, "/", "<&>", "\x01\n\t\x7f", "é", "\u2028", "😀", " "}
	for round := range 100 {
		tensors, want := []SavedTensor{{Name: metadataKey + "a", DType: U8, Shape: []int{0}}}, map[string]any{}
		for i := range random.IntN(50) {
			name := fmt.Sprintf("%s%s.%d", parts[random.IntN(len(parts))], parts[random.IntN(len(parts))], i)
			shape := []int{2, 3, 4}[:random.IntN(4)]
			tensors = append(tensors, SavedTensor{Name: name, DType: I16, Shape: shape, Host: make([]byte, 48)})
		}
		s := Saving{path: "m.safetensors", o: SaveOptions{NoChecksums: true}}
		if round%3 > 0 {
			s.o.Metadata = map[string]string{"format": "pt", parts[random.IntN(len(parts))]: parts[random.IntN(len(parts))]}
			want[metadataKey] = s.o.Metadata
		}
		require.NoError(t, s.layOut(tensors))
		f := s.files[0]
		for _, saved := range f.tensors {
			from := int(saved.off) - len(f.header)
			want[saved.Name] = struct {
				DType   DType  `json:"dtype"`
				Shape   []int  `json:"shape"`
				Offsets [2]int `json:"data_offsets"`
			}{saved.DType, append([]int{}, saved.Shape...), [2]int{from, from + saved.size}}
		}
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		require.NoError(t, e.Encode(want))
		require.Equal(t, uint64(len(f.header)-8), binary.LittleEndian.Uint64(f.header))
		require.Equal(t, string(bytes.TrimSpace(text.Bytes())), string(bytes.TrimRight(f.header[8:], " ")))
		require.Zero(t, len(f.header)%saveAlign)
	}
}

// A save queries CUDA once for each allocation, and for each device that tensors name.
func TestSaveAsksForTheMemoryOfAnAllocationOnce(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls are counted on the simulated GPU alone")
	}
	const apart = 512
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, other := rt.Devices()[0], rt.Devices()[1]
	var tensors []SavedTensor
	allocations := []cudart.DevPtr{testgpu.Malloc(t, dev, 100*apart), testgpu.Malloc(t, dev, 100*apart)}
	for i := range 200 {
		m := Memory{Device: dev, Ptr: allocations[i%2] + cudart.DevPtr(i/2*apart), Bytes: apart}
		tensors = append(tensors, SavedTensor{Name: fmt.Sprint(i), DType: U8, Shape: []int{100}, Memory: m})
	}
	check := func() (calls int, err error) {
		s := Saving{path: "m.safetensors"}
		require.NoError(t, s.layOut(tensors))
		before := sim.Calls("cudaPointerGetAttributes")
		err = s.checkMemory(t.Context())
		return sim.Calls("cudaPointerGetAttributes") - before, err
	}
	calls, err := check()
	require.NoError(t, err)
	assert.Equal(t, len(allocations), calls)

	tensors[150].Memory.Device = other
	_, err = check()
	require.ErrorContains(t, err, `the memory from tensor "150" on`)
	require.ErrorContains(t, err, "is not memory of device 1")

	tensors[150].Memory.Device = dev
	tensors[198].Memory.Ptr += apart - 99 // its last byte is behind the allocation
	_, err = check()
	require.ErrorContains(t, err, `the memory from tensor "198" on`)
}

// CUDA refuses a copy that spans two allocations, which may be neighbours.
func TestRunsAreSplitBetweenAllocations(t *testing.T) {
	t.Parallel()
	c := memoryCheck{known: []span{{100, 100}, {200, 50}, {250, 100}}}
	host := savedRun{host: make([]byte, 7), off: 1, n: 7}
	parts, err := (*memoryCheck)(nil).split(nil, host)
	require.NoError(t, err)
	parts, err = c.split(parts, savedRun{ptr: 150, off: 8, n: 150})
	require.NoError(t, err)
	parts, err = c.split(parts, savedRun{ptr: 250, off: 158, n: 100})
	require.NoError(t, err)
	assert.Equal(t, []savedRun{
		host, {ptr: 150, off: 8, n: 50}, {ptr: 200, off: 58, n: 50}, {ptr: 250, off: 108, n: 50}, {ptr: 250, off: 158, n: 100},
	}, parts)
}
