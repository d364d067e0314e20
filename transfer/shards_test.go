package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// shardsAtRandom are parts of n bytes, each at its own place on one of the devices,
// which start at mems: some follow on each other there, some are in several.
func shardsAtRandom(seed uint64, devs []*cudart.Device, mems []cudart.DevPtr, n int) (list []Shard) {
	rnd := rand.New(rand.NewPCG(seed, 2))
	placed := make([]int, len(devs))
	for off := 0; off < n; {
		size := min([]int{0, 1, 4095, 70_000, 300_000, 3 * mib}[rnd.IntN(6)], n-off)
		for d := range devs {
			if rnd.IntN(2) == 0 {
				continue
			}
			if rnd.IntN(3) == 0 {
				placed[d] += rnd.IntN(300)
			}
			list = append(list, Shard{devs[d], mems[d] + cudart.DevPtr(placed[d]), int64(off), size})
			placed[d] += size
		}
		off += size
	}
	rnd.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

func TestShardsComeToTheirDevices(t *testing.T) {
	t.Parallel()
	r := newFanRig(t, devicesOf(t, 3), Options{})
	const n = 20*mib + 77
	source := bytesOf(8, n)
	mems := r.devices(n + mib)
	file, err := os.Create(filepath.Join(t.TempDir(), "source"))
	require.NoError(t, err)
	defer file.Close()
	_, err = file.Write(source)
	require.NoError(t, err)
	for name, from := range map[string]io.ReaderAt{
		"file": file, "reader": onlyReaderAt{bytes.NewReader(source)}, "bytes": bytes.NewReader(source),
		"section": io.NewSectionReader(file, 0, n),
	} {
		for seed := range uint64(3) {
			shards := shardsAtRandom(seed, r.devs, mems, n)
			r.forget(mems, n+mib)
			want := make(map[*cudart.Device][]byte)
			for i, dev := range r.devs {
				want[dev] = bytes.Repeat([]byte{0xEE}, n+mib)
				for _, s := range shards {
					if s.Device == dev {
						copy(want[dev][s.Dst-mems[i]:], source[s.Off:][:s.N])
					}
				}
			}
			require.NoError(t, r.f.UploadShards(t.Context(), from, shards))
			for i, dev := range r.devs {
				got := (&rig{TB: t, dev: dev}).onDevice(mems[i], n+mib)
				require.True(t, bytes.Equal(want[dev], got), "%s, %d, %v", name, seed, dev)
			}
		}
	}
}

// Shards that follow on each other are one copy.
func TestShardsAreJoined(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	a, b := rt.Devices()[0], rt.Devices()[1]
	list := []Shard{{a, 5030, 30, 10}, {b, 0, 20, 10}, {a, 5000, 0, 20}, {a, 5020, 20, 10}, {a, 7000, 40, 5}, {a, 7005, 46, 5}, {a, 1, 9, 0}}
	require.Equal(t, []Shard{{a, 5000, 0, 40}, {a, 7000, 40, 5}, {a, 7005, 46, 5}}, shardsOf(a, list))
	require.Equal(t, []Shard{{b, 0, 20, 10}}, shardsOf(b, list))
}

// All devices are copied to at once: each waits for what the other reads.
func TestShardsOfAllDevicesAtOnce(t *testing.T) {
	t.Parallel()
	r := newFanRig(t, devicesOf(t, 2), Options{})
	if len(r.devs) < 2 {
		t.Skip("needs two GPUs")
	}
	const n = mib
	mems := r.devices(n)
	first, second := make(chan struct{}, 100), make(chan struct{}, 100)
	err := r.f.UploadShards(t.Context(), readerAtFunc(func(p []byte, off int64) (int, error) {
		mine, other := first, second
		if off >= n {
			mine, other = second, first
		}
		mine <- struct{}{}
		v := <-other
		other <- v
		return len(p), nil
	}), []Shard{{r.devs[0], mems[0], 0, n}, {r.devs[1], mems[1], n, n}})
	require.NoError(t, err)
}

func TestShardsThatAreRefused(t *testing.T) {
	var none context.Context
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
	r := newFanRig(t, rt.Devices()[:2], Options{})
	a, b := r.devs[0], r.devs[1]
	mems := r.devices(100)
	source := bytes.NewReader(make([]byte, 100))
	for want, shards := range map[string][]Shard{
		"shard 1: the device is nil":                     {{a, mems[0], 0, 1}, {nil, 1, 1, 1}},
		"shard 0: device 2 (Simulated GPU) is none of":   {{rt.Devices()[2], 1, 0, 1}},
		"shard 0: -1 bytes: must not be negative":        {{a, 1, 0, -1}},
		"shard 0: offset -1: must not be negative":       {{a, 1, -1, 1}},
		"shard 1: all shards are more than":              {{a, 1, 0, math.MaxInt}, {b, 1, 0, 1}},
		"the parts at offsets 5 and 50 overlap on devic": {{b, mems[1] + 9, 50, 10}, {a, mems[0], 5, 10}, {b, mems[1], 5, 10}},
	} {
		err := r.f.UploadShards(t.Context(), source, shards)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, fmt.Sprintf("transfer: upload %d shards of *bytes.Reader: ", len(shards)))
	}
	require.ErrorContains(t, r.f.UploadShards(t.Context(), nil, nil), "reader or writer is nil")
	require.ErrorContains(t, r.f.UploadShards(none, source, nil), "the context is nil")
	require.NoError(t, r.f.UploadShards(t.Context(), source, nil))
	require.NoError(t, r.f.UploadShards(t.Context(), source, []Shard{{a, 1, 1000, 0}, {a, 1, 0, 0}}), "of nothing")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, r.f.UploadShards(ended, source, []Shard{{a, mems[0], 0, 1}}), context.Canceled)
}

// One error is reported, not its consequences for the other shards.
func TestAShardThatFailsEndsTheOthers(t *testing.T) {
	t.Parallel()
	r := newFanRig(t, devicesOf(t, 2), Options{})
	last := len(r.devs) - 1
	const n = mib
	mems := r.devices(40 * n)
	var shards []Shard
	for i := range 40 {
		shards = append(shards, Shard{r.devs[i%2*last], mems[i%2*last] + cudart.DevPtr(i*n), int64(2 * i * n), n})
	}
	source := make([]byte, 80*n)
	err := r.f.UploadShards(t.Context(), readerAtFunc(func(p []byte, off int64) (int, error) {
		if off/n == 26 {
			return 0, io.ErrNoProgress
		}
		return copy(p, source[off:]), nil
	}), shards)
	require.ErrorIs(t, err, io.ErrNoProgress)
	require.ErrorContains(t, err, fmt.Sprintf("1048576 bytes from offset %d onto %v: at byte 0 of 1048576", 26*n, r.devs[last]))
	assert.NotContains(t, err.Error(), "\n")
	assert.Equal(t, 1, r.f.Stats().Failures)
}
