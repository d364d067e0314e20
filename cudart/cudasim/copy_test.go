//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestMemsetNeedsMemoryOfTheDevice(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	h := l.pinned(64)
	l.ok("cudaMemset", addr(&h[0]), 3, 64)
	assert.EqualValues(t, 3, h[63])
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemset", addr(&make([]byte, 8)[0]), 3, 8))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemset", 0, 3, 8))
}

func TestBatch(t *testing.T) {
	t.Parallel()
	type attributes struct {
		order int32
		_     [5]int32 // locations and flags
	}
	for _, v := range []cudart.Version{12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, cudasim.Config{Version: v})
			h, d, s := l.pinned(64), l.device(64), l.stream()
			h[0], h[8] = 1, 2
			dsts, srcs := []uintptr{d, d + 8}, []uintptr{addr(&h[0]), addr(&h[8])}
			sizes, index, fail := []uint64{8, 8}, new(uint64), new(uint64)
			batch := func(stream uintptr) cudart.Code {
				args := []uintptr{addr(&dsts[0]), addr(&srcs[0]), addr(&sizes[0]), 2, addr(&attributes{order: 1}), addr(index), 1}
				if v < 13000 {
					args = append(args, addr(fail))
				}
				return l.call("cudaMemcpyBatchAsync", append(args, stream)...)
			}
			require.Equal(t, cudart.Code(0), batch(s))
			l.ok("cudaStreamSynchronize", s)
			clear(h)
			l.ok("cudaMemcpy", addr(&h[0]), d, 16, d2h)
			assert.EqualValues(t, 1, h[0])
			assert.EqualValues(t, 2, h[8])
			assert.Equal(t, cudart.ErrInvalidValue, batch(0), "the default stream")
			sizes[1] = 65
			assert.Equal(t, cudart.ErrInvalidValue, batch(s))
			if v < 13000 {
				assert.EqualValues(t, 1, *fail)
			}
		})
	}
}

func TestManaged(t *testing.T) {
	t.Parallel()
	location := func(kind, id int32) uintptr { return uintptr(uint32(kind)) | uintptr(uint32(id))<<32 }
	host := ^uintptr(0) // -1
	const n = 8192
	type names struct{ prefetch, advise string }
	plain, v2 := names{"cudaMemPrefetchAsync", "cudaMemAdvise"}, names{"cudaMemPrefetchAsync_v2", "cudaMemAdvise_v2"}
	for _, tt := range []struct {
		version cudart.Version
		names   names
		ordinal bool
	}{{11080, plain, true}, {12040, plain, true}, {12040, v2, false}, {13000, plain, false}} {
		t.Run(tt.version.String()+" "+tt.names.prefetch, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, cudasim.Config{Version: tt.version, Devices: twoDevices.Devices})
			s, p := l.stream(), get[uintptr](l, "cudaMallocManaged", n, 1)
			prefetch := func(place, count uintptr) cudart.Code {
				if tt.ordinal {
					return l.call(tt.names.prefetch, p, count, place, s)
				}
				return l.call(tt.names.prefetch, p, count, place, 0, s)
			}
			dev1, cpu, none := location(1, 1), location(2, 0), location(1, 7)
			if tt.ordinal {
				dev1, cpu, none = 1, host, 7
			}
			state := func() cudasim.ManagedState {
				m, ok := l.Managed(p + 1)
				require.True(t, ok)
				return m
			}
			assert.Equal(t, cudasim.ManagedState{Bytes: n, Location: -1, PreferredLocation: -2}, state())
			require.Equal(t, cudart.Code(0), prefetch(dev1, n))
			l.ok("cudaStreamSynchronize", s)
			assert.Equal(t, 1, state().Location)
			require.Equal(t, cudart.Code(0), prefetch(cpu, n))
			l.ok("cudaStreamSynchronize", s)
			assert.Equal(t, -1, state().Location)
			assert.Equal(t, cudart.ErrInvalidDevice, prefetch(none, n))
			assert.Equal(t, cudart.ErrInvalidValue, prefetch(dev1, n+1))
			if !tt.ordinal {
				assert.Equal(t, cudart.ErrInvalidValue, prefetch(location(0, 0), n))
				require.Equal(t, cudart.Code(0), prefetch(location(3, 0), n))
				require.Equal(t, cudart.Code(0), prefetch(location(4, 0), n))
			}
			for advice, place := range map[uintptr]uintptr{1: dev1, 3: cpu, 5: dev1} {
				l.ok(tt.names.advise, p, n, advice, place)
			}
			assert.Equal(t, cudasim.ManagedState{Bytes: n, Location: -1, ReadMostly: true, PreferredLocation: -1, AccessedBy: []int{1}}, state())
			for _, advice := range []uintptr{2, 4, 6} {
				l.ok(tt.names.advise, p, n, advice, dev1)
			}
			assert.Equal(t, cudart.ErrInvalidValue, l.call(tt.names.advise, p, n, 9, dev1))
			assert.Equal(t, cudart.ErrInvalidDevice, l.call(tt.names.advise, p, n, 5, none))
			assert.Equal(t, cudasim.Outstanding{ManagedAllocs: 1, ManagedBytes: n, Streams: 1}, func() cudasim.Outstanding {
				l.ok("cudaDeviceSynchronize")
				return l.Outstanding()
			}())
			bytesOf(p, n)[n-1] = 3 // the CPU's as well
			l.ok("cudaFree", p)
			v := new(uintptr)
			assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMallocManaged", addr(v), n, 0))
			assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMallocManaged", addr(v), 0, 1))
		})
	}
}
