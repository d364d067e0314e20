package blocks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/queue"
)

// Two copies are joined only if they differ in nothing but lists and counts on the host.
func TestCopiesThatJoin(t *testing.T) {
	t.Parallel()
	host := make([]byte, 64)
	base := Copy{Host: host, Device: 1 << 20, DeviceLen: 64, HostStride: 16, DeviceStride: 32, Size: 8}
	differ := map[string]func(*Copy){
		"Host":                func(c *Copy) { c.Host = host[8:] },
		"Hosts":               func(c *Copy) { c.Hosts = [][]byte{host} },
		"Device":              func(c *Copy) { c.Device++ },
		"DeviceLen":           func(c *Copy) { c.DeviceLen++ },
		"HostIndexOnDevice":   func(c *Copy) { c.HostIndexOnDevice = 1 << 20 },
		"DeviceIndexOnDevice": func(c *Copy) { c.DeviceIndexOnDevice = 1 << 20 },
		"HostStride":          func(c *Copy) { c.HostStride++ },
		"DeviceStride":        func(c *Copy) { c.DeviceStride++ },
		"Size":                func(c *Copy) { c.Size++ },
		"HostIndex":           nil, // joined
		"DeviceIndex":         nil,
		"Count":               nil,
		"CheckIndices":        nil, // of lists on the device
	}
	fields := reflect.TypeFor[Copy]()
	for i := range fields.NumField() {
		field := fields.Field(i)
		change, known := differ[field.Name]
		require.True(t, known, "%s is new: does it keep copies apart?", field.Name)
		other := base
		other.HostIndex, other.DeviceIndex, other.Count, other.CheckIndices = []uint32{1}, []uint32{0}, 1, true
		if change != nil {
			change(&other)
		}
		assert.Equal(t, change == nil, base.joins(&other), field.Name)
		assert.Equal(t, change == nil, other.joins(&base), field.Name)
	}
	shorter := base
	shorter.Host = host[:32]
	assert.False(t, base.joins(&shorter), "the end of Host bounds the indices")
}

func TestMemoriesThatOverlap(t *testing.T) {
	t.Parallel()
	m := make([]byte, 64)
	assert.False(t, overlap([][]byte{m[32:], m[8:32], m[:8]}), "neighbours")
	assert.False(t, overlap([][]byte{m[:32], m[16:16], m[32:]}), "nothing is in the first")
	assert.True(t, overlap([][]byte{m[32:], m[:33]}), "one byte")
	assert.True(t, overlap([][]byte{m, m[50:60], m[10:20]}), "both are in the first")
	assert.True(t, overlap([][]byte{m, m}))
}

// A fixture is a Copier with memory on both sides. The tests know all bytes of that memory.
type fixture struct {
	*Copier
	s   *cudart.Stream
	mem []byte // pinned, across a seam if it is in chunks
	p   cudart.DevPtr
	n   int // bytes on either side
}

func newFixture(t *testing.T, dev *cudart.Device, method Method, buffer hostmem.Options) *fixture {
	t.Helper()
	b, err := New(t.Context(), dev, Options{Method: method})
	require.NoError(t, err)
	const n = 1 << 20
	host, err := hostmem.Alloc(t.Context(), dev, 3*n, buffer)
	require.NoError(t, err)
	p, err := dev.Malloc(n)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, s.Synchronize(context.Background()))
		assert.NoError(t, b.Close())
		assert.NoError(t, host.Close())
		assert.NoError(t, dev.Free(p))
		assert.NoError(t, s.Close())
	})
	return &fixture{b, s, host.Bytes()[n+n/2:][:n], p, n}
}

// bytesOf returns n bytes that differ from those of other seeds, and from each other.
func bytesOf(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	return b
}

// copyByModel copies block by block.
func copyByModel(c Copy, host, device []byte, hostAt, deviceAt int, down bool) {
	for i := range c.Count {
		h, d := i, i
		if c.HostIndex != nil {
			h = int(c.HostIndex[i])
		}
		if c.DeviceIndex != nil {
			d = int(c.DeviceIndex[i])
		}
		from, to := host[hostAt+h*c.HostStride:][:c.Size], device[deviceAt+d*c.DeviceStride:][:c.Size]
		if down {
			from, to = to, from
		}
		copy(to, from)
	}
}

// Every byte on both sides is what a naive model says, for blocks of any size, alignment and
// distance, in lists and in order, across the seams of registrations, by each method.
func TestBlocksMatchANaiveModel(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 13000} { // the older one has no batches
		for _, method := range []Method{ByKernel, ByEngine, Quickest} {
			t.Run(fmt.Sprint(v, " ", method), func(t *testing.T) {
				t.Parallel()
				var dev *cudart.Device
				if testgpu.Real() {
					dev = testgpu.Device(t)
				} else {
					_, rt := testgpu.Sim(t, cudasim.Config{Version: v})
					dev = rt.Devices()[0]
				}
				f := newFixture(t, dev, method, hostmem.Options{Chunk: 2 << 20})
				lists, err := dev.Malloc(2 * 4 * 2500)
				require.NoError(t, err)
				defer func() { assert.NoError(t, dev.Free(lists)) }()
				r := rand.New(rand.NewPCG(uint64(v), uint64(method)))
				device := make([]byte, f.n)
				want := make([]byte, f.n)
				for trial := range 40 {
					align := 1 << r.IntN(5)
					c := Copy{Size: (1 + r.IntN([...]int{40, 700, 9000}[r.IntN(3)]) + align - 1) / align * align}
					hostAt, deviceAt := r.IntN(100)/align*align, r.IntN(100)/align*align
					c.Host, c.Device, c.DeviceLen = f.mem[hostAt:], f.p+cudart.DevPtr(deviceAt), f.n-deviceAt
					c.HostStride, c.DeviceStride = c.Size+r.IntN(50)/align*align, c.Size+r.IntN(50)/align*align
					most := (f.n - 100) / max(c.HostStride, c.DeviceStride)
					c.Count = min(1+r.IntN(most), 2500)
					down := r.IntN(2) == 0
					for _, index := range []*[]uint32{&c.HostIndex, &c.DeviceIndex} {
						if r.IntN(3) == 0 {
							continue
						}
						for _, at := range r.Perm(most)[:c.Count] {
							*index = append(*index, uint32(at))
						}
					}
					if source := &c.HostIndex; !down && *source != nil && r.IntN(2) == 0 {
						(*source)[0] = (*source)[c.Count-1] // a source may be there twice
					}
					copy(f.mem, bytesOf(2*uint64(trial), f.n))
					copy(device, bytesOf(2*uint64(trial)+1, f.n))
					require.NoError(t, dev.CopyToDevice(f.p, unsafe.Pointer(&device[0]), f.n))
					require.NoError(t, dev.Synchronize(t.Context()))
					copy(want, f.mem)
					copyByModel(c, want, device, hostAt, deviceAt, down)
					onDevice := method != ByEngine && r.IntN(2) == 0
					if c.CheckIndices = r.IntN(2) == 0; onDevice {
						c.HostIndexOnDevice = listOnDevice(t, dev, lists, &c.HostIndex)
						c.DeviceIndexOnDevice = listOnDevice(t, dev, lists+4*2500, &c.DeviceIndex)
					}

					do := f.CopyToDevice
					if down {
						do = f.CopyToHost
					}
					point, err := do(t.Context(), f.s, c)
					require.NoError(t, err)
					clear(c.HostIndex) // the lists are the caller's again
					clear(c.DeviceIndex)
					require.NoError(t, point.Wait(t.Context()))
					got := make([]byte, f.n)
					require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, f.n))
					name := fmt.Sprintf("trial %d: down %v, lists on the device %v, %d blocks of %d, strides %d and %d", trial, down, onDevice, c.Count, c.Size, c.HostStride, c.DeviceStride)
					require.True(t, bytes.Equal(want, f.mem), "%s: on the host", name)
					require.True(t, bytes.Equal(device, got), "%s: on the device", name)
				}
			})
		}
	}
}

// listOnDevice moves a list, if there is one, to memory of the device at p.
func listOnDevice(t *testing.T, dev *cudart.Device, p cudart.DevPtr, list *[]uint32) cudart.DevPtr {
	t.Helper()
	if *list == nil {
		return 0
	}
	testgpu.CopyToDevice(t, dev, p, *list)
	*list = nil
	return p
}

// The kernel reads lists in the device's memory when the stream has reached the copies.
func TestListsOnTheDeviceAreReadInStreamOrder(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	f := newFixture(t, dev, Quickest, hostmem.Options{})
	for i := range f.mem {
		f.mem[i] = byte(i / 64)
	}
	at := f.p + 4096
	c := Copy{Host: f.mem, Device: f.p, DeviceLen: 4096, HostIndexOnDevice: listOnDevice(t, dev, at, &[]uint32{1 << 30, 1 << 31}), Size: 64, Count: 2}
	indices := f.mem[f.n-8:]
	copy(indices, []byte{5, 0, 0, 0, 3, 0, 0, 0})
	require.NoError(t, dev.Synchronize(t.Context()))
	sim.Hold()
	require.NoError(t, f.s.CopyToDevice(at, unsafe.Pointer(&indices[0]), 8))
	point, err := f.CopyToDevice(t.Context(), f.s, c)
	require.NoError(t, err)
	sim.Release()
	require.NoError(t, point.Wait(t.Context()))
	got := make([]byte, 128)
	require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, len(got)))
	assert.Equal(t, append(bytes.Repeat([]byte{5}, 64), bytes.Repeat([]byte{3}, 64)...), got)
}

// Of lists in the device's memory the first index that is not within the memory is named if the check
// is asked for, and nothing is copied.
func TestWrongIndicesOnTheDeviceAreNamed(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	f := newFixture(t, dev, ByKernel, hostmem.Options{})
	lists := f.p + 4096
	right := Copy{Host: f.mem[:1000], Device: f.p, DeviceLen: 2000, Size: 100, Count: 3, CheckIndices: true,
		HostIndexOnDevice: lists, DeviceIndexOnDevice: lists + 400}
	set := func(host, device []uint32) {
		listOnDevice(t, dev, lists, &host)
		listOnDevice(t, dev, lists+400, &device)
	}
	require.NoError(t, dev.Memset(f.p, 7, 2000))
	for want, list := range map[string][2][]uint32{
		"block 1, with index 10, is not within the host's 1000 bytes: they have 10 blocks":        {{9, 10, 11}, {19, 2, 20}},
		"block 0, with index 4294967295, is not within the device's 2000 bytes: they have 20 blo": {{9, 0, 4}, {1<<32 - 1, 1 << 31, 1}},
		"block 2, with index 20, is not within the device's 2000 bytes: they have 20 blocks":      {{9, 0, 4}, {19, 0, 20}},
	} {
		set(list[0], list[1])
		_, err := f.CopyToDevice(t.Context(), f.s, right)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "blocks: copy 3 blocks of 100 bytes to the ")
		_, err = f.CopyToHost(t.Context(), f.s, right)
		assert.ErrorContains(t, err, want)
	}
	got := make([]byte, 2000)
	require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, len(got)))
	assert.Equal(t, bytes.Repeat([]byte{7}, 2000), got)
	set([]uint32{9, 0, 4}, []uint32{19, 2, 1})
	point, err := f.CopyToDevice(t.Context(), f.s, right)
	require.NoError(t, err)
	require.NoError(t, point.Wait(t.Context()))

	for want, change := range map[string]func(c *Copy){
		"the host has two lists: one on the host, and one in the device's memory": func(c *Copy) { c.HostIndex = []uint32{1, 2, 3} },
		"is not at a multiple of 4 bytes":                                         func(c *Copy) { c.DeviceIndexOnDevice += 2 },
		"block 0 is not within the host's 99 bytes: they have 0 blocks":           func(c *Copy) { c.Host = c.Host[:99] },
		"blocks overlap in the device's memory, 99 bytes apart":                   func(c *Copy) { c.DeviceStride = 99 },
	} {
		c := right
		change(&c)
		_, err := f.CopyToDevice(t.Context(), f.s, c)
		assert.ErrorContains(t, err, want)
	}
	engines, err := New(t.Context(), dev, Options{Method: ByEngine})
	require.NoError(t, err)
	_, err = engines.CopyToDevice(t.Context(), f.s, right)
	assert.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "a list in the device's memory needs the kernel")
	require.NoError(t, engines.Close())

	// The check waits for the stream, as long as the context admits.
	sim.Hold()
	ctx, cancel := context.WithCancelCause(t.Context())
	sim.OnCall(func(fn string, _ int) {
		if fn == "cuLaunchKernel" {
			cancel(os.ErrDeadlineExceeded)
		}
	})
	_, err = f.CopyToDevice(ctx, f.s, right)
	sim.OnCall(nil)
	sim.Release()
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
	assert.ErrorIs(t, err, context.Canceled)
}

// Copier of several host memories are numbered through, and copied as from one, by each method.
func TestBlocksOfSeveralHostMemories(t *testing.T) {
	t.Parallel()
	for _, method := range []Method{ByKernel, ByEngine} {
		t.Run(method.String(), func(t *testing.T) {
			t.Parallel()
			dev := testgpu.Device(t)
			f := newFixture(t, dev, method, hostmem.Options{Chunk: 2 << 20})
			leases, err := pool.New(dev, pool.Options{})
			require.NoError(t, err)
			defer func() { assert.NoError(t, leases.Close()) }()
			lease, err := leases.Get(t.Context(), 20_000)
			require.NoError(t, err)
			defer func() { assert.NoError(t, lease.Release(f.s)) }()
			r := rand.New(rand.NewPCG(3, uint64(method)))
			for trial := range 40 {
				c := Copy{Hosts: [][]byte{f.mem[5000:9000], lease.Bytes(), nil, f.mem[:3], f.mem[100_000:150_000]}, Device: f.p, DeviceLen: f.n, Size: 1 + r.IntN(600)}
				c.HostStride, c.DeviceStride = c.Size+r.IntN(50), c.Size+r.IntN(50)
				var places [][]byte // of all blocks
				for _, host := range c.Hosts {
					for len(host) >= c.Size {
						places = append(places, host[:c.Size])
						host = host[min(len(host), c.HostStride):]
					}
				}
				c.Count = 1 + r.IntN(len(places))
				hosts, devices := r.Perm(len(places)), r.Perm(f.n/(2*c.DeviceStride))
				c.Count = min(c.Count, len(devices))
				for i := range c.Count {
					c.HostIndex, c.DeviceIndex = append(c.HostIndex, uint32(hosts[i])), append(c.DeviceIndex, uint32(devices[i]))
				}
				if trial%3 == 0 {
					c.HostIndex = nil
				}
				if trial%4 == 0 {
					c.DeviceIndex = nil
				}
				copy(f.mem, bytesOf(uint64(trial), f.n))
				copy(lease.Bytes(), bytesOf(uint64(trial)+7, 20_000))
				device := bytesOf(uint64(trial)+99, f.n)
				require.NoError(t, dev.CopyToDevice(f.p, unsafe.Pointer(&device[0]), f.n))
				before := [2][]byte{slices.Clone(f.mem), slices.Clone(lease.Bytes())}
				down := r.IntN(2) == 0
				do := f.CopyToDevice
				if down {
					do = f.CopyToHost
				}
				point, err := do(t.Context(), f.s, c)
				require.NoError(t, err)
				require.NoError(t, point.Wait(t.Context()))
				got := make([]byte, f.n)
				require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, f.n))
				after := [2][]byte{slices.Clone(f.mem), slices.Clone(lease.Bytes())}
				copy(f.mem, before[0]) // for the model
				copy(lease.Bytes(), before[1])
				for i := range c.Count {
					host, at := c.numbers(i)
					if from := device[at*c.DeviceStride:][:c.Size]; down {
						copy(places[host], from)
					} else {
						copy(from, places[host])
					}
				}
				name := fmt.Sprintf("trial %d: down %v, %d blocks of %d", trial, down, c.Count, c.Size)
				require.True(t, bytes.Equal(device, got), "%s: on the device", name)
				require.True(t, bytes.Equal(f.mem, after[0]), "%s: on the host", name)
				require.True(t, bytes.Equal(lease.Bytes(), after[1]), "%s: in the lease", name)
			}
			right := Copy{Hosts: [][]byte{f.mem[:1000], f.mem[2000:2550]}, Device: f.p, DeviceLen: f.n, Size: 100, Count: 3, HostIndex: []uint32{0, 14, 10}}
			_, err = f.CopyToDevice(t.Context(), f.s, right)
			require.NoError(t, err)
			require.NoError(t, f.s.Synchronize(t.Context()))
			require.NoError(t, dev.Memset(f.p, 7, f.n))
			for want, change := range map[string]func(c *Copy){
				"block 1, with index 15, is not within the host's 1550 bytes: they have 15 blocks": func(c *Copy) { c.HostIndex = []uint32{0, 15, 10} },
				"block 15 is not within the host's 1550 bytes: they have 15 blocks":                func(c *Copy) { c.HostIndex, c.Count = nil, 16 },
				"block 1 overlaps another one in the host's memory: duplicate index 0":             func(c *Copy) { c.HostIndex = []uint32{0, 0, 10} },
				"with Hosts there is neither a Host nor a list in the device's memory":             func(c *Copy) { c.Host = f.mem },
				"two of Hosts overlap":                    func(c *Copy) { c.Hosts = [][]byte{f.mem[900:2000], f.mem[:1000]} },
				"550 bytes of host memory are not pinned": func(c *Copy) { c.Hosts = [][]byte{f.mem[:1000], make([]byte, 550)} },
			} {
				c := right
				change(&c)
				before := slices.Clone(f.mem)
				_, err := f.CopyToHost(t.Context(), f.s, c)
				assert.ErrorContains(t, err, want)
				require.NoError(t, f.s.Synchronize(t.Context()))
				assert.True(t, bytes.Equal(before, f.mem), want)
			}
		})
	}
}

// Requests are copied as if one by one, but those next to each other that differ in their lists alone by one launch.
func TestCopiesAreJoined(t *testing.T) {
	t.Parallel()
	for _, method := range []Method{ByKernel, ByEngine} {
		t.Run(method.String(), func(t *testing.T) {
			t.Parallel()
			dev := testgpu.Device(t)
			f := newFixture(t, dev, method, hostmem.Options{Chunk: 2 << 20})
			r := rand.New(rand.NewPCG(4, uint64(method)))
			for trial := range 30 {
				down := trial%2 == 0
				kinds := []Copy{
					{Host: f.mem, Device: f.p, DeviceLen: f.n / 2, Size: 100, HostStride: 112, DeviceStride: 128},
					{Host: f.mem, Device: f.p + cudart.DevPtr(f.n/2), DeviceLen: f.n / 2, Size: 4000, HostStride: 4000, DeviceStride: 4000},
				}
				// No target twice: each kind takes its numbers from one permutation.
				hosts := [][]int{r.Perm(4000), r.Perm(120)}
				devices := [][]int{r.Perm(4000), r.Perm(120)}
				if down { // the kinds' parts of the host's memory are apart
					kinds[0].Host, kinds[1].Host = f.mem[:f.n/2], f.mem[f.n/2:]
				}
				device := bytesOf(uint64(trial)+99, f.n)
				copy(f.mem, bytesOf(uint64(trial), f.n))
				wantHost, wantDevice := slices.Clone(f.mem), slices.Clone(device)
				var requests []Copy
				for range r.IntN(30) {
					k := r.IntN(2)
					c := kinds[k]
					c.Count = r.IntN(5)
					for i := range c.Count {
						c.HostIndex, c.DeviceIndex = append(c.HostIndex, uint32(hosts[k][i])), append(c.DeviceIndex, uint32(devices[k][i]))
					}
					hosts[k], devices[k] = hosts[k][c.Count:], devices[k][c.Count:]
					requests = append(requests, c)
					hostAt, deviceAt := int(uintptr(unsafe.Pointer(&c.Host[0]))-uintptr(unsafe.Pointer(&f.mem[0]))), int(c.Device-f.p)
					for i := range c.Count {
						host, at := wantHost[hostAt+int(c.HostIndex[i])*c.HostStride:][:c.Size], wantDevice[deviceAt+int(c.DeviceIndex[i])*c.DeviceStride:][:c.Size]
						if down {
							copy(host, at)
						} else {
							copy(at, host)
						}
					}
				}
				require.NoError(t, dev.CopyToDevice(f.p, unsafe.Pointer(&device[0]), f.n))
				do := f.CopyToDevice
				if down {
					do = f.CopyToHost
				}
				point, err := do(t.Context(), f.s, requests...)
				require.NoError(t, err)
				require.NoError(t, point.Wait(t.Context()))
				got := make([]byte, f.n)
				require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, f.n))
				require.True(t, bytes.Equal(wantDevice, got), "trial %d, down %v, %d requests: on the device", trial, down, len(requests))
				require.True(t, bytes.Equal(wantHost, f.mem), "trial %d, down %v, %d requests: on the host", trial, down, len(requests))
			}
		})
	}
	t.Run("launches", func(t *testing.T) {
		t.Parallel()
		sim, rt := testgpu.Sim(t, cudasim.Config{})
		f := newFixture(t, rt.Devices()[0], ByKernel, hostmem.Options{})
		one := Copy{Host: f.mem[:1000], Device: f.p, DeviceLen: 2000, Size: 100, Count: 1}
		list := one
		list.Count, list.HostIndex, list.DeviceIndex = 2, []uint32{4, 4}, []uint32{7, 9}
		larger := one
		larger.Size, larger.DeviceIndex = 200, []uint32{3}
		launches := func() int { return sim.Calls("cuLaunchKernel") }
		for _, tc := range []struct {
			requests []Copy
			launches int
		}{
			{nil, 0},
			{[]Copy{{Size: 1}, {Size: 1}}, 0},
			{[]Copy{one}, 1},
			{[]Copy{one, list}, 1},
			{[]Copy{larger, one, list}, 2},
			{[]Copy{one, larger, list}, 3},
		} {
			before := launches()
			given := slices.Clone(tc.requests)
			point, err := f.CopyToDevice(t.Context(), f.s, tc.requests...)
			require.NoError(t, err)
			require.NoError(t, point.Wait(t.Context()))
			assert.Equal(t, tc.launches, launches()-before, "%v", tc.requests)
			assert.Equal(t, given, tc.requests, "they stay the caller's")
		}
		far, foreign := list, one
		far.DeviceIndex = []uint32{7, 20}
		foreign.Host = make([]byte, 1000)
		for want, requests := range map[string][]Copy{
			"blocks: copy to the device (copies: 2): copy 1: block 1, with index 20, is not within":        {one, far},
			"copies 1 to 2 joined: block 2 overlaps another one in the device's memory: duplicate index 7": {larger, list, list},
			"1000 bytes of host memory are not pinned":                                                     {one, foreign},
		} {
			before := launches()
			_, err := f.CopyToDevice(t.Context(), f.s, requests...)
			assert.ErrorContains(t, err, want)
			assert.Equal(t, before, launches(), want)
		}
		_, err := f.CopyToDevice(t.Context(), nil)
		assert.ErrorContains(t, err, "stream")
		_, err = (*Copier)(nil).CopyToHost(t.Context(), f.s)
		assert.ErrorIs(t, err, errZero)
	})
}

// Copies are in the order of their stream, and nothing of them runs before.
func TestBlocksAreInStreamOrder(t *testing.T) {
	t.Parallel()
	for _, method := range []Method{ByKernel, ByEngine} {
		t.Run(method.String(), func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			f := newFixture(t, rt.Devices()[0], method, hostmem.Options{})
			clear(f.mem)
			c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, HostIndex: []uint32{5, 3}, DeviceIndex: []uint32{1, 0}, Size: 64, Count: 2}
			sim.Hold()
			require.NoError(t, f.s.Memset(f.p, 7, 128))
			point, err := f.CopyToHost(t.Context(), f.s, c)
			require.NoError(t, err)
			require.NoError(t, f.s.Memset(f.p, 9, 128))
			assert.False(t, point.Done(t.Context()))
			assert.Zero(t, f.mem[5*64])
			sim.Release()
			require.NoError(t, point.Wait(t.Context()))
			assert.Equal(t, []byte{7, 7, 0}, []byte{f.mem[5*64], f.mem[3*64+63], f.mem[4*64]})
		})
	}
}

// What cannot be right is refused before anything is queued, and the error says which block it is.
// listed returns c with lists of n blocks in the device's memory, which are checked.
func listed(c Copy, list cudart.DevPtr, n, size int) Copy {
	c.HostIndex, c.DeviceIndex, c.HostIndexOnDevice, c.DeviceIndexOnDevice = nil, nil, list, list
	c.Count, c.Size, c.CheckIndices = n, size, true
	return c
}

func TestWrongBlocksAreRefused(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	f := newFixture(t, rt.Devices()[0], ByKernel, hostmem.Options{})
	other, err := rt.Devices()[1].NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	right := Copy{Host: f.mem[:1000], Device: f.p, DeviceLen: 2000, Size: 100, Count: 3, HostIndex: []uint32{9, 0, 4}, DeviceIndex: []uint32{19, 2, 1}}
	for want, change := range map[string]func(c *Copy){
		"block 2, with index 10, is not within the host's 1000 bytes: they have 10 blocks": func(c *Copy) { c.HostIndex = []uint32{9, 0, 10} },
		"block 0, with index 4294967295, is not within the device's 2000 bytes":            func(c *Copy) { c.DeviceIndex = []uint32{1<<32 - 1, 0, 1} },
		"block 2 overlaps another one in the device's memory: duplicate index 1":           func(c *Copy) { c.DeviceIndex = []uint32{1, 0, 1} },
		"blocks overlap in the device's memory, 99 bytes apart":                            func(c *Copy) { c.DeviceStride = 99 },
		"indices: 2 in HostIndex, 3 in DeviceIndex: the lists must have the same length":   func(c *Copy) { c.HostIndex = c.HostIndex[:2] },
		"block 10 is not within the host's 1000 bytes: they have 10 blocks":                func(c *Copy) { c.HostIndex, c.DeviceIndex, c.Count = nil, nil, 11 },
		"block 0 is not within the host's 0 bytes: they have 0 blocks":                     func(c *Copy) { c.Host, c.HostIndex = nil, nil },
		"the size must be positive":                                                           func(c *Copy) { c.Size = 0 },
		"and the count, the strides of -1 and 100":                                            func(c *Copy) { c.HostStride = -1 },
		"the device's -1 bytes not negative":                                                  func(c *Copy) { c.DeviceLen = -1 },
		"copy 9223372036854775807 blocks of 100 bytes to the device: they or their list have": func(c *Copy) { *c = listed(*c, f.p, math.MaxInt, 100) },
		"copy 2305843009213693952 blocks of 1 bytes to the device: they or their list have":   func(c *Copy) { *c = listed(*c, f.p, 1<<61, 1) },
		"copy 3 blocks of 9223372036854775807 bytes to the device: they or their list":        func(c *Copy) { c.Size, c.HostStride, c.DeviceStride = math.MaxInt, math.MaxInt, math.MaxInt },
		"they have 1 blocks":           func(c *Copy) { c.HostStride, c.DeviceStride = math.MaxInt, math.MaxInt },
		"no memory has such addresses": func(c *Copy) { c.Device = ^cudart.DevPtr(0) },
		"the 1000 bytes of host memory are not pinned, or not by package hostmem: hostmem.R": func(c *Copy) { c.Host = make([]byte, 1000) },
	} {
		c := right
		change(&c)
		_, err := f.CopyToDevice(t.Context(), f.s, c)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, fmt.Sprintf("blocks: copy %d blocks of %d bytes to the device: ", c.Count, c.Size))
	}
	down := right
	down.HostIndex = []uint32{4, 4, 0}
	_, err = f.CopyToHost(t.Context(), f.s, down)
	assert.ErrorContains(t, err, "block 1 overlaps another one in the host's memory: duplicate index 4")
	_, err = f.CopyToDevice(t.Context(), f.s, down)
	assert.NoError(t, err, "a source may be read twice")

	for _, s := range []*cudart.Stream{nil, new(cudart.Stream), other} {
		_, err := f.CopyToDevice(t.Context(), s, right)
		assert.ErrorContains(t, err, "stream")
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(os.ErrDeadlineExceeded)
	_, err = f.CopyToDevice(ended, f.s, right)
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
	assert.ErrorIs(t, err, context.Canceled)
	var none context.Context
	_, err = f.CopyToDevice(none, f.s, right)
	assert.ErrorContains(t, err, "the context is nil")

	for _, b := range []*Copier{nil, {}} {
		_, err := b.CopyToDevice(t.Context(), f.s, right)
		assert.ErrorIs(t, err, errZero)
		assert.ErrorIs(t, b.Close(), errZero)
	}
	for _, o := range []Options{{Processors: -1}, {Processors: 1 << 31}, {Method: 3}, {Method: -1}} {
		_, err := New(t.Context(), rt.Devices()[0], o)
		assert.ErrorContains(t, err, "blocks: new: Options")
	}
	_, err = New(t.Context(), nil, Options{})
	assert.ErrorIs(t, err, errNilDevice)
	require.NoError(t, f.Close())
	_, err = f.CopyToDevice(t.Context(), f.s, right)
	assert.ErrorIs(t, err, os.ErrClosed)
}

// Pinned memory that is read-only is no target, and a buffer that blocks are copied of closes
// after them.
func TestBlocksUseTheirMemory(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	f := newFixture(t, dev, ByKernel, hostmem.Options{})
	name := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(name, make([]byte, 4096), 0o600))
	file, err := hostmem.MapFile(t.Context(), dev, name, hostmem.FileOptions{})
	require.NoError(t, err)
	c := Copy{Host: file.Bytes()[:4096], Device: f.p, DeviceLen: f.n, Size: 512, Count: 8}
	_, err = f.CopyToHost(t.Context(), f.s, c)
	assert.ErrorIs(t, err, hostmem.ErrReadOnly)
	several := c
	f.mem[0] = 77
	several.Host, several.Hosts = nil, [][]byte{f.mem[:2048], file.Bytes()[:2048]}
	_, err = f.CopyToHost(t.Context(), f.s, several)
	assert.ErrorIs(t, err, hostmem.ErrReadOnly)
	require.NoError(t, f.s.Synchronize(t.Context()))
	assert.EqualValues(t, 77, f.mem[0], "nothing was copied")

	leases, err := pool.New(dev, pool.Options{})
	require.NoError(t, err)
	lease, err := leases.Get(t.Context(), 4096)
	require.NoError(t, err)
	leased := c
	leased.Host = lease.Bytes()
	_, err = f.CopyToHost(t.Context(), f.s, leased)
	require.NoError(t, err)
	require.NoError(t, lease.Release(f.s))
	require.NoError(t, leases.Close())

	sim.Hold()
	_, err = f.CopyToDevice(t.Context(), f.s, c)
	require.NoError(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	assert.ErrorIs(t, file.CloseContext(ended), context.Canceled)
	sim.Release()
	require.NoError(t, file.Close())
}

// Few and large blocks are for engines, of any size and alignment.
func TestTheQuickestMethodIsChosen(t *testing.T) {
	t.Parallel()
	memory := make([]uint64, 1)
	host := unsafe.Slice((*byte)(unsafe.Pointer(&memory[0])), 8)
	for _, c := range []struct {
		size, count, align int
		up, down           Method
	}{
		{64, 1, 16, ByEngine, ByEngine}, {4096, 3, 16, ByEngine, ByEngine}, {64, 4, 16, ByKernel, ByEngine}, {64, 7, 16, ByKernel, ByKernel},
		{32 << 10, 6, 16, ByEngine, ByEngine}, {4096, 100_000, 16, ByKernel, ByKernel}, {511 << 10, 16, 16, ByKernel, ByKernel},
		{512 << 10, 16, 16, ByEngine, ByEngine}, {16 << 20, 4, 16, ByEngine, ByEngine}, {64<<10 + 1, 16, 1, ByKernel, ByKernel},
	} {
		blocks := Copy{Host: host, Device: cudart.DevPtr(c.align), Size: c.size, Count: c.count, HostStride: 2 * c.size, DeviceStride: c.size}
		assert.Equal(t, c.up, new(Copier).choose(&blocks, false), "%+v", c)
		assert.Equal(t, c.down, new(Copier).choose(&blocks, true), "%+v", c)
		blocks.HostIndexOnDevice = 4
		assert.Equal(t, ByKernel, (&Copier{method: ByEngine}).choose(&blocks, true), "%+v", c)
	}
	assert.Equal(t, ByEngine, new(Copier).choose(&Copy{Size: 16, Count: 100, HostStride: 16, DeviceStride: 16}, false), "one block on both sides")
	huge := Copy{Size: math.MaxInt32, Count: 3}
	huge.Size++ // a constant would not be an int everywhere
	assert.Equal(t, ByEngine, (&Copier{method: ByKernel}).choose(&huge, true))
}

// A device that cannot access host memory by its address copies by engines.
func TestBlocksWithoutHostAddresses(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrCanUseHostPointerForRegisteredMem: 0}}}})
	b, err := New(t.Context(), rt.Devices()[0], Options{})
	require.NoError(t, err)
	assert.Equal(t, ByEngine, b.method)
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	_, err = New(t.Context(), rt.Devices()[0], Options{Method: ByKernel})
	assert.ErrorIs(t, err, errors.ErrUnsupported)
}

// Whichever call fails, New leaves nothing behind, and copies return the error.
func TestEveryCallCanFail(t *testing.T) {
	t.Parallel()
	for k := 1; k <= 20; k++ {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev := rt.Devices()[0]
			sim.FailCall(sim.TotalCalls()+k, cudart.ErrMemoryAllocation)
			b, err := New(t.Context(), dev, Options{})
			sim.ResetFaults()
			if err != nil {
				require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
				return
			}
			require.NoError(t, b.Close())
		})
	}
}

// Whenever its context ends, New leaves nothing behind.
func TestNewInterruptedAnywhere(t *testing.T) {
	t.Parallel()
	for k := 1; k <= 20; k++ {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev := rt.Devices()[0]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var calls atomic.Int64
			sim.OnCall(func(string, int) {
				if calls.Add(1) == int64(k) {
					cancel()
				}
			})
			b, err := New(ctx, dev, Options{})
			if err != nil {
				require.ErrorIs(t, err, context.Canceled)
				return
			}
			require.NoError(t, b.Close())
		})
	}
}

// Blocks that are one block on both sides are one copy, however many they are.
func TestContiguousBlocksAreOneCopy(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	f := newFixture(t, rt.Devices()[0], Quickest, hostmem.Options{})
	before, launches := sim.Calls("cudaMemcpyAsync"), sim.Calls("cuLaunchKernel")
	c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, Size: 16, Count: 1000}
	_, err := f.CopyToDevice(t.Context(), f.s, c)
	require.NoError(t, err)
	assert.Equal(t, before+1, sim.Calls("cudaMemcpyAsync"))
	c.DeviceStride = 32
	_, err = f.CopyToDevice(t.Context(), f.s, c)
	require.NoError(t, err)
	assert.Equal(t, launches+1, sim.Calls("cuLaunchKernel"))
	require.NoError(t, f.s.Synchronize(t.Context()))
}

// A long list is several batches: one call with all of it would hold up the caller.
func TestLongListsAreSeveralBatches(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	f := newFixture(t, rt.Devices()[0], ByEngine, hostmem.Options{})
	_, err := f.CopyToDevice(t.Context(), f.s, Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, Size: 16, HostStride: 32, Count: 2*queue.MaxBatch + 2})
	require.NoError(t, err)
	assert.Equal(t, 3, sim.Calls("cudaMemcpyBatchAsync"))
	_, err = f.CopyToDevice(t.Context(), f.s, Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, Size: 16, HostStride: 32, Count: queue.MaxBatch + 1})
	require.NoError(t, err)
	assert.Equal(t, 4, sim.Calls("cudaMemcpyBatchAsync"))
	assert.Equal(t, 1, sim.Calls("cudaMemcpyAsync"), "one copy is no batch")
}

// A Count of 0 is the length of the lists, and one that contradicts them is refused.
func TestCountOfBlocks(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	f := newFixture(t, dev, ByKernel, hostmem.Options{})
	three, four := []uint32{5, 3, 9}, []uint32{8, 0, 2, 6}
	for name, tc := range map[string]struct {
		host, device []uint32
		count, want  int
		err          string
	}{
		"of the host's list":          {host: three, want: 3},
		"of the device's list":        {device: three, want: 3},
		"of both":                     {host: three, device: []uint32{1, 0, 2}, want: 3},
		"the same":                    {host: three, count: 3, want: 3},
		"no list":                     {count: 4, want: 4},
		"nothing":                     {},
		"empty list":                  {host: []uint32{}},
		"less":                        {host: three, count: 2, err: "Count of 2 beside a list of 3 indices"},
		"more":                        {device: three, count: 4, err: "Count of 4 beside a list of 3 indices"},
		"more than an empty list":     {host: []uint32{}, count: 1, err: "Count of 1 beside a list of 0 indices"},
		"lists of different lengths":  {host: three, device: four, err: "indices: 3 in HostIndex, 4 in DeviceIndex"},
		"an empty list and a longer":  {host: []uint32{}, device: four, err: "indices: 0 in HostIndex, 4 in DeviceIndex"},
		"different, count of a first": {host: three, device: four, count: 3, err: "indices: 3 in HostIndex, 4 in DeviceIndex"},
	} {
		copy(f.mem, bytesOf(11, f.n))
		c := Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, HostIndex: tc.host, DeviceIndex: tc.device, Size: 16, Count: tc.count}
		want := bytes.Repeat([]byte{7}, 256)
		require.NoError(t, dev.Memset(f.p, 7, len(want)))
		for _, upload := range []func() (cudart.Point, error){
			func() (cudart.Point, error) { return f.CopyToDevice(t.Context(), f.s, c) },
			func() (cudart.Point, error) { return f.CopyToDevice(t.Context(), f.s, c) },
		} {
			point, err := upload()
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err, name)
				continue
			}
			require.NoError(t, err, name)
			require.NoError(t, point.Wait(t.Context()))
		}
		if tc.err == "" {
			c.Count, c.HostStride, c.DeviceStride = tc.want, 16, 16
			copyByModel(c, f.mem, want, 0, 0, false)
		}
		got := make([]byte, len(want))
		require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), f.p, len(got)))
		require.Equal(t, want, got, name)
	}
	_, err := f.CopyToDevice(t.Context(), f.s, Copy{Host: f.mem, Device: f.p, DeviceLen: f.n, HostIndexOnDevice: f.p, Size: 16})
	assert.ErrorContains(t, err, "Count of 0 beside a list in device memory")
}

// Device memory that is not there is refused, and the context goes on: a kernel's access would end it.
func TestMemoryThatIsNotTheDevices(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	for _, method := range []Method{Quickest, ByKernel, ByEngine} {
		f := newFixture(t, dev, method, hostmem.Options{})
		c := Copy{Host: f.mem, Device: f.p + 1<<45, DeviceLen: f.n, HostIndex: []uint32{2, 0, 1}, Size: 4096}
		if !testgpu.Real() { // the simulator takes such an address for memory of the host
			short, err := dev.Malloc(4096)
			require.NoError(t, err)
			defer func() { assert.NoError(t, dev.Free(short)) }()
			c.Device, c.DeviceLen = short, 3*4096
		}
		for range 2 {
			_, err := f.CopyToDevice(t.Context(), f.s, c)
			require.ErrorIs(t, err, cudart.ErrInvalidValue, "%v", method)
			_, err = f.CopyToHost(t.Context(), f.s, c)
			require.ErrorIs(t, err, cudart.ErrInvalidValue, "%v", method)
		}
		c.Device, c.DeviceLen = f.p, f.n
		point, err := f.CopyToDevice(t.Context(), f.s, c)
		require.NoError(t, err, "%v", method)
		require.NoError(t, point.Wait(t.Context()), "%v: the context lives", method)
	}
}

// The check for blocks that overlap needs memory by the number of blocks, not by the largest index, and finds the same.
func TestIndicesThatAreFarApart(t *testing.T) {
	t.Parallel()
	var seen bitSet
	far := []uint32{1<<32 - 1, 0, 1 << 31, 7, 1 << 31, 0}
	assert.Equal(t, 4, seen.firstTwice(far, 1<<32-1))
	assert.Equal(t, -1, seen.firstTwice(far[:4], 1<<32-1))
	assert.LessOrEqual(t, len(seen.words), 8192)
	assert.Equal(t, 2, seen.firstTwice([]uint32{9, 8, 9}, 9))
	assert.Equal(t, -1, seen.firstTwice([]uint32{9, 8}, 9), "between uses no bit is set")
}
