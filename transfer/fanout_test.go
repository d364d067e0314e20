package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/iotest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A fanFixture is a Fanout on several devices.
type fanFixture struct {
	testing.TB
	devs []*cudart.Device
	f    *Fanout
}

// devicesOf returns simulated devices, or with a real GPU as many as there are.
func devicesOf(t testing.TB, n int) []*cudart.Device {
	t.Helper()
	if testgpu.Real() {
		devs := testgpu.Device(t).Runtime().Devices()
		return devs[:min(n, len(devs))]
	}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, n)})
	return rt.Devices()
}

func newFanFixture(t testing.TB, devs []*cudart.Device, o Options) *fanFixture {
	t.Helper()
	f, err := NewFanout(t.Context(), devs, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return &fanFixture{TB: t, devs: devs, f: f}
}

// devices allocates n bytes on each device until the test ends.
func (r *fanFixture) devices(n int) (list []cudart.DevPtr) {
	r.Helper()
	for _, dev := range r.devs {
		list = append(list, (&fixture{TB: r.TB, dev: dev}).device(n))
	}
	return list
}

// forget makes it so that no device has bytes of an earlier copy.
func (r *fanFixture) forget(mems []cudart.DevPtr, n int) {
	r.Helper()
	for i, dev := range r.devs {
		require.NoError(r, dev.Memset(mems[i], 0xEE, n))
		require.NoError(r, dev.Synchronize(context.Background()))
	}
}

// requireOn requires that all devices have these bytes.
func (r *fanFixture) requireOn(mems []cudart.DevPtr, want []byte, what string) {
	r.Helper()
	for i, dev := range r.devs {
		got := (&fixture{TB: r.TB, dev: dev}).onDevice(mems[i], len(want))
		require.True(r, bytes.Equal(want, got), "%s: %v", what, dev)
	}
}

// onlyReaderAt hides what else a reader is.
type onlyReaderAt struct{ io.ReaderAt }

// fanSizes are of one chunk and several, with a part of one.
var fanSizes = []int{1, 64 * kib, 64*kib + 1, mib + 3, 5*mib + 1}

// more is more than the ring of each device holds.
func (r *fanFixture) more() int { return r.f.Stats().RingBytes/len(r.devs) + mib + 12345 }

func TestFanoutBringsEveryByteToEveryDevice(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]cudasim.Config{
		"peers":     {Devices: make([]cudasim.DeviceConfig, 3)},
		"no peers":  {Devices: make([]cudasim.DeviceConfig, 2), NoPeerAccess: [][2]int{{0, 1}}},
		"two pairs": {Devices: make([]cudasim.DeviceConfig, 4), NoPeerAccess: [][2]int{{0, 1}, {0, 3}, {2, 1}, {2, 3}}},
		"one apart": {Devices: make([]cudasim.DeviceConfig, 3), NoPeerAccess: [][2]int{{0, 2}, {1, 2}}},
		"one":       {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, rt := testgpu.Sim(t, cfg)
			r := newFanFixture(t, rt.Devices(), Options{})
			everySource(t, r, append(slices.Clone(fanSizes), r.more()))
			peers := r.f.Stats().PeerBytes
			if name == "no peers" || name == "one" {
				require.Zero(t, peers)
			} else {
				require.NotZero(t, peers)
			}
		})
	}
}

// The same on the GPUs of the machine, with PINNED_TEST_GPU=1.
func TestFanoutOntoAllDevicesOfTheMachine(t *testing.T) {
	r := newFanFixture(t, devicesOf(t, 8), Options{})
	sizes := fanSizes[:3] // of simulated ones there are other tests
	if testgpu.Real() {
		sizes = append(slices.Clone(fanSizes), r.more(), 300*mib+35)
	}
	everySource(t, r, sizes)
}

// everySource copies by every method.
func everySource(t *testing.T, r *fanFixture, sizes []int) {
	t.Helper()
	const skip = 77
	maxN := sizes[len(sizes)-1]
	mems := r.devices(maxN)
	all := bytesOf(1, skip+maxN)
	file, err := os.Create(filepath.Join(t.TempDir(), "source"))
	require.NoError(t, err)
	defer file.Close()
	_, err = file.Write(all)
	require.NoError(t, err)
	pinned, err := hostmem.Alloc(t.Context(), r.devs[0], maxN, hostmem.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, pinned.Close()) }()
	theirs, err := r.devs[0].HostAlloc(maxN, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.devs[0].FreeHost(theirs)) }()
	stream, err := r.devs[len(r.devs)-1].NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, stream.Close()) }()
	ctx := t.Context()
	for _, n := range sizes {
		want := all[skip:][:n]
		copy(pinned.Bytes(), want)
		copied := unsafe.Slice((*byte)(theirs), maxN)
		copy(copied, want)
		for what, one := range map[string]func() (int, error){
			"bytes":        func() (int, error) { return n, r.f.Upload(ctx, mems, want) },
			"pinned":       func() (int, error) { return n, r.f.Upload(ctx, mems, pinned.Bytes()[:n]) },
			"CUDA's":       func() (int, error) { return n, r.f.Upload(ctx, mems, copied[:n]) },
			"file":         func() (int, error) { return r.f.UploadFrom(ctx, mems, file, skip, n) },
			"direct file":  func() (int, error) { return r.f.With(Call{DirectIO: true}).UploadFrom(ctx, mems, file, skip, n) },
			"reader at":    func() (int, error) { return r.f.UploadFrom(ctx, mems, onlyReaderAt{bytes.NewReader(all)}, skip, n) },
			"bytes reader": func() (int, error) { return r.f.UploadFrom(ctx, mems, bytes.NewReader(all), skip, n) },
			"reader": func() (int, error) {
				return r.f.UploadReader(ctx, mems, iotest.OneByteReader(bytes.NewReader(want)), n)
			},
			"buffer":      func() (int, error) { return r.f.UploadReader(ctx, mems, bytes.NewBuffer(want), n) },
			"on a stream": func() (int, error) { return n, r.f.With(Call{Stream: stream}).Upload(ctx, mems, want) },
		} {
			if what == "reader" && n > mib {
				continue
			}
			r.forget(mems, n)
			done, err := one()
			require.NoError(t, err, "%s, %d bytes", what, n)
			require.Equal(t, n, done)
			r.requireOn(mems, want, fmt.Sprintf("%s, %d bytes", what, n))
		}
	}
}

// A device that is far behind the others still has each chunk before the ring's
// memory is used again.
func TestFanoutWaitsForTheSlowestDevice(t *testing.T) {
	t.Parallel()
	for name, no := range map[string][][2]int{"peers": nil, "no peers": {{0, 1}}} {
		slow, n := cudasim.Link{Peer: cudasim.Speed{Rate: 0.05}}, 6*mib+1
		if no != nil {
			slow, n = cudasim.Link{HostToDevice: cudasim.Speed{Rate: 0.5}}, 60*mib+1
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{}, {Link: slow}}, NoPeerAccess: no})
			r := newFanFixture(t, rt.Devices(), Options{})
			mems, want := r.devices(n), bytesOf(2, n)
			require.NoError(t, r.f.Upload(t.Context(), mems, want))
			require.Zero(t, sim.PendingCopies(), "also from device to device")
			r.requireOn(mems, want, name)
		})
	}
}

// Each device with access takes a share over its own link; without access each
// takes everything.
func TestFanoutSharesTheLinks(t *testing.T) {
	t.Parallel()
	for name, no := range map[string][][2]int{"peers": nil, "no peers": {{0, 1}}} {
		sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), NoPeerAccess: no})
		r := newFanFixture(t, rt.Devices(), Options{})
		const n = 64 * mib
		mems := r.devices(n)
		before, proved := sim.Calls("cudaMemcpyAsync"), sim.Calls("cudaMemcpyPeerAsync")
		require.NoError(t, r.f.Upload(t.Context(), mems, bytesOf(3, n)))
		up, across := sim.Calls("cudaMemcpyAsync")-before, sim.Calls("cudaMemcpyPeerAsync")-proved
		if no == nil {
			require.Equal(t, up, across, name)
			require.Equal(t, n, r.f.Stats().PeerBytes, name)
		} else {
			require.Zero(t, across, name)
			require.Zero(t, up%2, name)
		}
		require.Equal(t, n, r.f.Stats().StagedBytes, name)
	}
}

func TestFanoutRefusesInvalidInput(t *testing.T) {
	var noContext context.Context
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
	_, other := testgpu.Sim(t, cudasim.Config{})
	devs := rt.Devices()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		ctx  context.Context
		devs []*cudart.Device
		o    Options
		want string
	}{
		{nil, devs, Options{}, "transfer: new fanout on 3 devices: the context is nil"},
		{t.Context(), nil, Options{}, "no devices"},
		{t.Context(), []*cudart.Device{devs[0], nil}, Options{}, "device 1 of 2: the device is nil"},
		{t.Context(), []*cudart.Device{devs[0], devs[1], devs[0]}, Options{}, "duplicate device: device 0 (Simulated GPU)"},
		{t.Context(), []*cudart.Device{devs[0], other.Devices()[0]}, Options{}, "are of different CUDA libraries"},
		{t.Context(), devs, Options{Workers: -1}, "Options.Workers: -1"},
		{ended, devs, Options{}, "context canceled"},
	} {
		_, err := NewFanout(tt.ctx, tt.devs, tt.o)
		require.ErrorContains(t, err, tt.want)
	}

	r := newFanFixture(t, devs, Options{})
	mems := r.devices(mib)
	src := make([]byte, mib)
	ctx := t.Context()
	s, err := other.Devices()[0].NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer s.Close()
	overlapping := []cudart.DevPtr{mems[0], mems[1], mems[0] + mib - 1}
	for want, err := range map[string]error{
		"2 destinations for 3 devices":                                      r.f.Upload(ctx, mems[:2], src),
		"0 destinations for 3 devices":                                      r.f.Upload(ctx, nil, nil),
		"the destinations of byte 0 on device 0 (Simulated GPU) (":          r.f.Upload(ctx, overlapping, src),
		"transfer: upload 1048576 bytes onto 3 devices: the context is nil": r.f.Upload(noContext, mems, src),
		"Call.Stream: stream":                                               r.f.With(Call{Stream: s}).Upload(ctx, mems, src),
		"context canceled":                                                  r.f.Upload(ended, mems, src),
	} {
		require.ErrorContains(t, err, want)
	}
	var none *os.File
	for want, one := range map[string]func() (int, error){
		"the reader or writer is nil":    func() (int, error) { return r.f.UploadFrom(ctx, mems, nil, 0, 1) },
		"reader or writer is nil":        func() (int, error) { return r.f.UploadReader(ctx, mems, none, 1) },
		"-1 bytes: must not be negative": func() (int, error) { return r.f.UploadReader(ctx, mems, bytes.NewReader(src), -1) },
		"offset -1: must not":            func() (int, error) { return r.f.UploadFrom(ctx, mems, bytes.NewReader(src), -1, 1) },
	} {
		done, err := one()
		require.ErrorContains(t, err, want)
		require.Zero(t, done)
	}
	// Of nothing, also where the places are one.
	require.NoError(t, r.f.Upload(ctx, overlapping, nil))
	done, err := r.f.UploadFrom(ctx, mems, bytes.NewReader(nil), 5, 0)
	require.NoError(t, err)
	require.Zero(t, done)
	done, err = r.f.UploadReader(ctx, mems, bytes.NewReader(src), mib+1)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, mib, done)
}

func TestAFanoutThatWasClosed(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	f, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	again, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	require.Equal(t, 2, sim.Outstanding().PeerAccesses, "which is counted")
	require.Equal(t, f.Stats().RingBytes, again.Stats().RingBytes, "the rings are shared")
	require.NoError(t, f.Close())
	require.NoError(t, f.Close())
	require.Equal(t, 2, sim.Outstanding().PeerAccesses)
	require.ErrorIs(t, f.Upload(t.Context(), make([]cudart.DevPtr, 2), make([]byte, 9)), os.ErrClosed)
	require.NoError(t, again.CloseContext(t.Context()))
	require.Zero(t, sim.Outstanding().PeerAccesses)
	require.Zero(t, again.Stats().RingBytes)
	var noContext context.Context
	require.ErrorContains(t, again.CloseContext(noContext), "the context is nil")
}

// Close during a copy is refused, and CloseContext waits.
func TestAFanoutIsClosedByItsReader(t *testing.T) {
	t.Parallel()
	r := newFanFixture(t, devicesOf(t, 2), Options{})
	mems := r.devices(mib)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	source := bytes.NewReader(bytesOf(4, mib))
	_, err := r.f.UploadReader(t.Context(), mems, readerFunc(func(p []byte) (int, error) {
		assert.ErrorContains(t, r.f.Close(), "still copying (calls: 1)")
		assert.ErrorIs(t, r.f.CloseContext(ended), context.Canceled)
		return source.Read(p)
	}), mib)
	require.NoError(t, err, "what runs is not disturbed")
	_, err = r.f.UploadReader(t.Context(), mems, source, 1)
	require.ErrorIs(t, err, cudart.ErrClosed)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestFanoutReportsProgress(t *testing.T) {
	t.Parallel()
	r := newFanFixture(t, devicesOf(t, 2), Options{})
	const n = 20*mib + 1
	mems, src := r.devices(n), bytesOf(5, n)
	last := 0
	err := r.f.With(Call{Progress: func(done, total int) {
		assert.Greater(t, done, last)
		assert.Equal(t, n, total)
		last = done
	}}).Upload(t.Context(), mems, src)
	require.NoError(t, err)
	require.Equal(t, n, last)
	boom := errors.New("boom")
	err = r.f.With(Call{Progress: func(int, int) { panic(boom) }}).Upload(t.Context(), mems, src)
	require.ErrorContains(t, err, "panic: boom")
}
