//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestExports(t *testing.T) {
	t.Parallel()
	tests := map[string]map[cudart.Version]bool{
		"cudaMalloc":                 {11080: true, 12040: true, 12080: true, 13000: true},
		"cudaGetDeviceProperties":    {11080: true, 12040: true, 12080: true, 13000: true},
		"cudaGetDeviceProperties_v2": {12040: true, 12080: true},
		"cudaMemPrefetchAsync":       {11080: true, 12040: true, 12080: true, 13000: true},
		"cudaMemPrefetchAsync_v2":    {12040: true, 12080: true},
		"cudaMemAdvise_v2":           {12040: true, 12080: true},
		"cudaMemcpyBatchAsync":       {12080: true, 13000: true},
		"cudaDeviceEnablePeerAccess": {11080: true, 12040: true, 12080: true, 13000: true},
		"cudaStreamGetId":            {12040: true, 12080: true, 13000: true},
		"cudaMemcpyPeerAsync":        {11080: true, 12040: true, 12080: true, 13000: true},
		"cudaNoSuchFunction":         {},
	}
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		l := open(t, cudasim.Config{Version: v})
		for name, in := range tests {
			assert.Equal(t, in[v], l.Symbol(name) != 0, "%s in %s", name, v)
		}
		assert.Equal(t, "simulated libcudart "+v.String(), l.String())
	}
}

func TestStructsAndCanaries(t *testing.T) {
	t.Parallel()
	const canary = 0xc5
	tests := []struct {
		version cudart.Version
		fn      string
		size    int
	}{
		{11080, "cudaGetDeviceProperties", 728},
		{12040, "cudaGetDeviceProperties", 728},
		{12040, "cudaGetDeviceProperties_v2", 792},
		{13000, "cudaGetDeviceProperties", 784},
		{11080, "cudaPointerGetAttributes", 24},
		{12040, "cudaPointerGetAttributes", 24},
		{13000, "cudaPointerGetAttributes", 88},
	}
	for _, tt := range tests {
		t.Run(tt.version.String()+" "+tt.fn, func(t *testing.T) {
			t.Parallel()
			l := open(t, cudasim.Config{Version: tt.version, Devices: []cudasim.DeviceConfig{{Name: "A", UUID: [16]byte{15: 7}}}})
			require.Equal(t, tt.size, l.StructSize(tt.fn))
			buf := make([]byte, 1024)
			for i := range buf {
				buf[i] = canary
			}
			second := uintptr(0)
			if tt.fn == "cudaPointerGetAttributes" {
				second = l.device(100) + 10
			}
			l.ok(tt.fn, addr(&buf[0]), second)
			assert.NotEqual(t, byte(canary), buf[tt.size-1], "all of it is written")
			for _, b := range buf[tt.size:] {
				require.Equal(t, byte(canary), b, "and nothing after it")
			}
			if tt.fn == "cudaPointerGetAttributes" {
				assert.Equal(t, []byte{2, 0, 0, 0, 0, 0, 0, 0}, buf[:8], "device memory of device 0")
				return
			}
			assert.Equal(t, []byte("A\x00"), buf[:2])
			assert.Equal(t, [16]byte{15: 7}, [16]byte(buf[256:272]))
		})
	}
}

func TestDeviceQueriesMakeNoContext(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{Version: 11080, Devices: []cudasim.DeviceConfig{
		{}, {PCIBusID: "0001:0a:1f.0", Attributes: map[cudart.Attr]int{cudart.AttrHostNumaID: 1}},
	}})
	assert.EqualValues(t, 2, get[int32](l, "cudaGetDeviceCount"))
	l.ok("cudaSetDevice", 1)
	assert.EqualValues(t, 1, get[int32](l, "cudaGetDevice"))
	for attr, want := range map[cudart.Attr]int32{
		cudart.AttrHostNumaID: 1, cudart.AttrPCIDomain: 1, cudart.AttrPCIBus: 0xa, cudart.AttrPCIDevice: 0x1f,
		cudart.AttrHostRegisterSupported: 1, cudart.AttrPageableMemoryAccess: 0,
	} {
		assert.Equal(t, want, get[int32](l, "cudaDeviceGetAttribute", uintptr(attr), 1), attr)
	}
	assert.Equal(t, "0001:0a:1f.0", string(cstring(get[[16]byte](l, "cudaDeviceGetPCIBusId", 16, 1))))
	assert.EqualValues(t, 1, get[int32](l, "cudaDeviceCanAccessPeer", 0, 1))
	var b [16]byte
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaDeviceGetPCIBusId", addr(&b), 12, 1), "no room for the NUL")
	assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaSetDevice", 2))
	assert.Equal(t, cudart.ErrInvalidDevice, l.call("cudaSetDevice", ^uintptr(0)))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaDeviceGetAttribute", addr(&b), 9999, 1))
	assert.Empty(t, l.Contexts())
}

func TestStreamPriorities(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	least, greatest := new(int32), new(int32)
	l.ok("cudaDeviceGetStreamPriorityRange", addr(least), addr(greatest))
	assert.Equal(t, []int32{0, -5}, []int32{*least, *greatest})
}

func cstring(b [16]byte) []byte {
	for i, c := range b {
		if c == 0 {
			return b[:i]
		}
	}
	return b[:]
}

func TestErrorTexts(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	read := func(fn string, code uintptr) string { return goString(l.raw(fn, code)) }
	assert.Equal(t, "cudaErrorMemoryAllocation", read("cudaGetErrorName", 2))
	assert.Equal(t, "out of memory", read("cudaGetErrorString", 2))
	assert.Equal(t, cudart.Code(123456).Text(), read("cudaGetErrorString", 123456))
	assert.Equal(t, l.raw("cudaGetErrorName", 2), l.raw("cudaGetErrorName", 2), "the text stays where it is")
}

func TestDrivers(t *testing.T) {
	t.Parallel()
	const untouched = int32(-77)
	tests := []struct {
		name      string
		cfg       cudasim.Config
		driver    int32
		runtime   cudart.Code // of cudaRuntimeGetVersion
		rest      cudart.Code
		lastError cudart.Code
	}{
		{"none, 11.8", cudasim.Config{Version: 11080, NoDriver: true}, 0, 35, 35, 35},
		{"none, 12.4", cudasim.Config{Version: 12040, NoDriver: true}, 0, 0, 35, 35},
		{"none, 13.0", cudasim.Config{Version: 13000, NoDriver: true}, 0, 0, 35, 35},
		{"too old", cudasim.Config{Version: 13000, DriverVersion: 12080}, 12080, 0, 35, 35},
		{"older minor", cudasim.Config{Version: 12080, DriverVersion: 12020}, 12020, 0, 0, 0},
		{"newer", cudasim.Config{Version: 11080, DriverVersion: 13000}, 13000, 0, 0, 0},
		{"no device", cudasim.Config{Devices: []cudasim.DeviceConfig{}}, 13000, 0, 100, 100},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, tt.cfg)
			assert.Equal(t, tt.driver, get[int32](l, "cudaDriverGetVersion"))
			v := new(int32)
			*v = untouched
			assert.Equal(t, tt.runtime, l.call("cudaRuntimeGetVersion", addr(v)))
			*v = untouched
			assert.Equal(t, tt.rest, l.call("cudaGetDeviceCount", addr(v)))
			p := new(uintptr)
			*p = 77
			assert.Equal(t, tt.rest, l.call("cudaMalloc", addr(p), 100))
			assert.Equal(t, tt.lastError, l.call("cudaPeekAtLastError"))
			assert.Equal(t, tt.lastError, l.call("cudaGetLastError"))
			again := cudart.Code(0)
			if tt.lastError == cudart.ErrInsufficientDriver {
				again = tt.lastError
			}
			assert.Equal(t, again, l.call("cudaGetLastError"))
			if tt.rest != cudart.Code(0) {
				assert.Equal(t, untouched, *v)
				assert.EqualValues(t, 77, *p)
				return
			}
			l.ok("cudaFree", *p)
		})
	}
}

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]cudasim.Config{
		"version":  {Version: 12345},
		"driver":   {DriverVersion: -1},
		"register": {MaxRegister: -1},
		"number":   {MaxRegistrations: -1},
		"pinned":   {MaxPinned: -1},
		"leak":     {LeakAbove: -1},
		"host":     {HostMemory: -1},
		"step":     {EventResolution: -1},
		"C int":    {DriverVersion: 1 << 40},
		"peer":     {NoPeerAccess: [][2]int{{0, 1}}},
		"peer -1":  {NoPeerAccess: [][2]int{{-1, 0}}},
		"lost":     {LostPeerCopies: [][2]int{{1, 0}}},
		"memory":   {Devices: []cudasim.DeviceConfig{{Memory: -1}}},
		"PCI":      {Devices: []cudasim.DeviceConfig{{PCIBusID: "6"}}},
		"PCI hex":  {Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:xx:00.0"}}},
		"rate":     {Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{Peer: cudasim.Speed{Latency: 1}}}}},
		"NaN":      {Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{Peer: cudasim.Speed{Rate: math.NaN()}}}}},
	} {
		_, err := cudasim.New(cfg)
		assert.ErrorContains(t, err, "cudasim: ", name)
	}
}
