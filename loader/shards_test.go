package loader

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// writeShards writes files with so many samples each, numbered from 0 over all files.
func writeShards(t testing.TB, samples []int, fields ...int) (paths []string) {
	t.Helper()
	dir, i := t.TempDir(), 0
	for shard, n := range samples {
		var content []byte
		for range n {
			for f, size := range fields {
				field := make([]byte, size)
				writeSample(field, i, f)
				content = append(content, field...)
			}
			i++
		}
		paths = append(paths, filepath.Join(dir, fmt.Sprintf("shard-%d", shard)))
		require.NoError(t, os.WriteFile(paths[shard], content, 0o600))
	}
	return paths
}

func shardsOf(t testing.TB, maxPinned int, samples []int, fields ...int) Source {
	t.Helper()
	src, err := Shards(fields, maxPinned, writeShards(t, samples, fields...)...)
	require.NoError(t, err)
	return src
}

// maxPinnedFor returns the bytes of two windows of n shards.
func maxPinnedFor(n int, samples []int, fields ...int) int {
	size := 0
	for _, f := range fields {
		size += f
	}
	page := os.Getpagesize()
	return 2 * n * ((slices.Max(samples)*size + page - 1) / page * page)
}

// requireGathered requires that a batch without host memory has its samples on the device.
func requireGathered(t testing.TB, b *Batch, s *cudart.Stream, fields ...int) {
	t.Helper()
	require.Nil(t, b.Host(0), "there are no host bytes")
	require.Equal(t, -1, b.Offset(0))
	require.NoError(t, b.Use(s))
	require.NoError(t, s.Synchronize(t.Context()))
	for f, size := range fields {
		got, err := download(s.Device(), b.Field(f), b.Len()*size)
		require.NoError(t, err)
		want := make([]byte, size)
		for at, i := range b.Indices() {
			writeSample(want, i, f)
			require.Equal(t, want, got[at*size:][:size], "%v: sample %d, place %d, field %d", b, i, at, f)
		}
	}
}

// shardOrder is the order of an epoch as the documentation has it: shards in a random order, that in windows, and
// the samples of each window in a random order.
func shardOrder(samples []int, window int, o Options, epoch int) (order []int) {
	first, places := make([]int, len(samples)), make([]int, len(samples))
	for shard := range samples {
		if places[shard] = shard; shard > 0 {
			first[shard] = first[shard-1] + samples[shard-1]
		}
	}
	if o.Shuffle && window < len(samples) {
		p := newPermutation(len(samples), o.Seed, epoch)
		for place := range places {
			places[place] = p.at(place)
		}
	}
	for k := 0; len(places) > 0; k++ {
		var of []int
		for _, shard := range places[:min(window, len(places))] {
			for i := range samples[shard] {
				of = append(of, first[shard]+i)
			}
		}
		places = places[min(window, len(places)):]
		if o.Shuffle {
			p := newPermutation(len(of), mix(o.Seed)+uint64(k)+1, epoch)
			mixed := make([]int, len(of))
			for i := range of {
				mixed[i] = of[p.at(i)]
			}
			of = mixed
		}
		order = append(order, of...)
	}
	return order
}

var shardCases = []struct {
	samples []int
	window  int
	fields  []int
	o       Options
}{
	{[]int{20, 20, 20, 20, 20, 20, 20}, 2, []int{64}, Options{BatchSize: 16, Shuffle: true, Seed: 3}},
	{[]int{20, 20, 20, 20, 20, 20, 20}, 2, []int{64}, Options{BatchSize: 16}},
	{[]int{9, 30, 1, 27, 25, 22, 30, 4, 30, 28, 29}, 3, []int{100, 1, 257}, Options{BatchSize: 7, Shuffle: true, Seed: 1, DropLast: true}},
	{[]int{9, 30, 1, 27, 25, 22, 30, 4, 30, 28, 29}, 3, []int{256}, Options{BatchSize: 4, Shuffle: true, Seed: 1, Prefetch: 40}},
	{[]int{5, 6, 7, 5, 6, 7}, 1, []int{16, 4096}, Options{BatchSize: 5, Shuffle: true, Workers: 3, Prefetch: 2}},
	{[]int{12, 11, 13, 12}, 1, []int{33}, Options{BatchSize: 3, Shuffle: true, Unordered: true, Workers: 5, Prefetch: 3}},
	{[]int{8, 8, 8}, 3, []int{64}, Options{BatchSize: 5, Shuffle: true}},           // one window
	{[]int{4, 4, 4}, 1, []int{64}, Options{BatchSize: 3, Shuffle: true}},           // a batch of two windows
	{[]int{4500, 4501, 4200}, 1, []int{8}, Options{BatchSize: 999, Shuffle: true}}, // more samples than a list has
}

func TestShardsAreInTheOrderOfAModel(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const epochs = 3
	for _, test := range shardCases {
		t.Run(fmt.Sprintf("%v by %d/%+v", test.samples, test.window, test.o), func(t *testing.T) {
			o, n := test.o, 0
			for _, of := range test.samples {
				n += of
			}
			src := shardsOf(t, maxPinnedFor(test.window, test.samples, test.fields...), test.samples, test.fields...)
			require.Equal(t, n, src.Len())
			var want []delivered
			l := newLoaderFor(t, dev, src, o)
			require.Equal(t, test.window, l.shards.window)
			for epoch := range epochs {
				order := shardOrder(test.samples, test.window, o, epoch)
				seen := make(map[int]int)
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					from := b.Number() * o.BatchSize
					require.Equal(t, order[from:min(from+o.BatchSize, n)], b.Indices(), "%v", b)
					requireGathered(t, b, s, test.fields...)
					for _, i := range b.Indices() {
						seen[i]++
					}
					want = append(want, delivered{slices.Clone(b.Indices()), b.Position()})
				}
				if o.DropLast {
					n -= n % o.BatchSize
				}
				require.Len(t, seen, n, "each sample once")
			}
			if o.Shuffle && len(test.samples) > 2 {
				require.NotEqual(t, want[0].indices, want[len(want)/epochs].indices, "each epoch has its order")
			}
			host, memory := newHostLoader(t, src, o)
			if !o.Unordered {
				at := 0
				for range host.Epochs(epochs) {
					for b, err := range host.Batches(t.Context()) {
						require.NoError(t, err)
						require.Equal(t, want[at], delivered{slices.Clone(b.Indices()), b.Position()})
						requireHostBatch(t, b, memory, test.fields...)
						at++
					}
				}
			}
			for from := range want {
				if from%7 > 0 && os.Getenv("PINNED_SOAK") == "" && len(want) > 40 {
					continue
				}
				o.Start = want[from].position
				l := newLoaderFor(t, dev, src, o)
				got := make(map[int]int)
				at := from + 1
				for range l.Epochs(epochs) {
					for b, err := range l.Batches(t.Context()) {
						require.NoError(t, err)
						if !o.Unordered {
							require.Equal(t, want[at], delivered{slices.Clone(b.Indices()), b.Position()})
						}
						requireGathered(t, b, s, test.fields...)
						got[b.Epoch()] += b.Len()
						at++
					}
					if at >= from+8 && os.Getenv("PINNED_SOAK") == "" {
						break
					}
				}
				require.NoError(t, l.Close())
				require.True(t, at == len(want) || at >= from+8)
			}
		})
	}
}

// watchPinned returns the largest number of registered bytes at any call since, beside others.
func watchPinned(t *testing.T, sim *cudasim.Sim, others int) *atomic.Int64 {
	var largest atomic.Int64
	sim.OnCall(func(string, int) {
		now := int64(sim.Outstanding().RegisteredBytes - others)
		for old := largest.Load(); now > old && !largest.CompareAndSwap(old, now); old = largest.Load() {
		}
	})
	t.Cleanup(func() { sim.OnCall(nil) })
	return &largest
}

// However loops end, no more is registered than the bound, all of it is used, and nothing stays after Close.
func TestShardsStayWithinTheirBound(t *testing.T) {
	t.Parallel()
	for _, turns := range []int{0, 1, 5} { // of a loop, 0 for all
		for _, test := range shardCases {
			t.Run(fmt.Sprintf("%d of %v by %d", turns, test.samples, test.window), func(t *testing.T) {
				sim, dev := simulated(t, cudasim.Link{})
				bound := maxPinnedFor(test.window, test.samples, test.fields...)
				src := shardsOf(t, bound, test.samples, test.fields...)
				before := sim.Outstanding()
				l, err := New(t.Context(), dev, src, test.o)
				require.NoError(t, err)
				largest := watchPinned(t, sim, sim.Outstanding().RegisteredBytes)
				s := stream(t, dev)
				for epoch := range l.Epochs(3) {
					n := 0
					for b, err := range l.Batches(t.Context()) {
						require.NoError(t, err)
						requireGathered(t, b, s, test.fields...)
						if n++; n == turns {
							break
						}
					}
					if epoch == 1 && turns == 5 {
						require.NoError(t, l.EndEpoch())
					}
				}
				require.NoError(t, l.Close())
				require.NoError(t, s.Close())
				require.LessOrEqual(t, int(largest.Load()), bound)
				require.Greater(t, int(largest.Load()), bound/2-os.Getpagesize()*test.window)
				after := sim.Outstanding()
				require.Equal(t, before.Registrations, after.Registrations)
				require.Equal(t, before.DeviceAllocs, after.DeviceAllocs)
				require.Equal(t, before.Modules, after.Modules)
				require.Empty(t, sim.Misuses())
			})
		}
	}
}

// The pages of one window stay registered as long as the loader.
func TestShardsThatFitAreRegisteredOnce(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	samples := []int{10, 10, 10}
	l := newLoaderFor(t, dev, shardsOf(t, 3*os.Getpagesize(), samples, 64), Options{BatchSize: 8, Shuffle: true})
	before := sim.Calls("cudaHostRegister")
	for range l.Epochs(3) {
		for _, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
		}
	}
	require.Equal(t, len(samples), sim.Calls("cudaHostRegister")-before)
}

// The window after the one in use is registered meanwhile; the one after that when its kernels have run.
func TestTheNextWindowIsRegisteredMeanwhile(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	samples := []int{4, 4, 4, 4}
	l := newLoaderFor(t, dev, shardsOf(t, 2*os.Getpagesize(), samples, 64), Options{BatchSize: 4, Shuffle: true, Prefetch: 1})
	registered := func() int { return sim.Outstanding().Registrations - 1 }
	var most atomic.Int64
	n := 0
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if n++; b.Number() == 0 {
			require.Eventually(t, func() bool { return registered() == 2 }, timeout, time.Millisecond, "while batch 0 is used")
		}
		most.Store(max(most.Load(), int64(registered())))
	}
	require.Equal(t, 4, n)
	require.Equal(t, int64(2), most.Load())

	// A GPU that does not get on with the kernels keeps the windows.
	sim.Hold()
	var seen []int
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		seen = append(seen, b.Number())
		if len(seen) == 2 {
			require.Equal(t, 2, registered())
			sim.Release()
		}
	}
	require.Equal(t, []int{0, 1, 2, 3}, seen)
}

// The windows of an epoch that was left stay registered until the GPU has passed the kernels of its batches.
func TestWindowsOfAnEpochThatWasLeft(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	l := newLoaderFor(t, dev, shardsOf(t, 2*os.Getpagesize(), []int{40, 40, 40, 40}, 64), Options{BatchSize: 4, Prefetch: 5})
	s := stream(t, dev)
	sim.Hold()
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		break
	}
	require.NoError(t, l.EndEpoch())
	var once sync.Once
	var queries, inUse atomic.Int32
	sim.OnCall(func(fn string, _ int) {
		if fn == "cudaHostUnregister" || fn == "cudaEventQuery" && queries.Add(1) == 100 {
			once.Do(func() {
				if fn == "cudaHostUnregister" {
					inUse.Store(int32(sim.PendingCopies()))
				}
				sim.Release()
			})
		}
	})
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		requireGathered(t, b, s, 64)
	}
	sim.OnCall(nil)
	require.Zero(t, inUse.Load(), "kernels that read what was unregistered")
}

func TestShardsThatAreRefused(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	samples := []int{10, 10, 10, 7}
	paths := writeShards(t, samples, 8)
	page := os.Getpagesize()
	empty, odd := filepath.Join(t.TempDir(), "empty"), filepath.Join(t.TempDir(), "odd")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	require.NoError(t, os.WriteFile(odd, make([]byte, 15), 0o600))
	many := filepath.Join(t.TempDir(), "many") // without blocks on the disk
	require.NoError(t, os.WriteFile(many, nil, 0o600))
	require.NoError(t, os.Truncate(many, math.MaxUint32))
	_, err := Shards([]int{1}, 16<<30, many)
	require.NoError(t, err, "as many as indices of 32 bits")
	require.NoError(t, os.Truncate(many, math.MaxUint32+1))
	for _, test := range []struct {
		fields    []int
		maxPinned int
		paths     []string
		want      string
	}{
		{nil, 8 * page, paths, "loader: shards: there are no fields"},
		{[]int{8, 0}, 8 * page, paths, "field 1 has 0 bytes"},
		{[]int{8, 1<<63 - 1}, 8 * page, paths, "field 1 has 9223372036854775807 bytes"},
		{[]int{8}, 8 * page, nil, "there are no shards"},
		{[]int{8}, 2*page - 1, paths, fmt.Sprintf("maxPinned is %d: two shards of %d bytes do not fit", 2*page-1, page)},
		{[]int{8}, -1, paths, "maxPinned is -1: "},
		{[]int{8}, 8 * page, []string{paths[0], empty}, empty + " has 0 bytes: must be a whole number of samples of 8 bytes, and not empty"},
		{[]int{8}, 8 * page, []string{odd}, odd + " has 15 bytes: must be a whole number"},
		{[]int{1}, 16 << 30, []string{many}, many + " has 4294967296 samples: the GPU gathers from at most 4294967295"},
		{[]int{8}, 8 * page, []string{filepath.Dir(odd)}, "is not a regular file (mode d"},
		{[]int{8}, 8 * page, []string{odd + "x"}, odd + "x: no such file"},
	} {
		_, err := Shards(test.fields, test.maxPinned, test.paths...)
		require.ErrorContains(t, err, test.want)
		require.ErrorContains(t, err, "loader: shards: ")
	}
	src, err := Shards([]int{8}, 2*page, paths...)
	require.NoError(t, err)
	_, err = New(t.Context(), dev, src, Options{BatchSize: 8})
	require.EqualError(t, err, "loader: new: Options.BatchSize is 8: a window (1 of 4 shards) may have only 7 samples")
	sample := [][]byte{make([]byte, 8)}
	require.EqualError(t, src.Read(t.Context(), 37, sample), "loader: shards: sample 37 of 37")
	require.EqualError(t, src.Read(t.Context(), -1, sample), "loader: shards: sample -1 of 37")
	require.EqualError(t, src.Read(t.Context(), 0, nil), "loader: shards: the destination has 0 fields, not 1")
	require.EqualError(t, src.Read(t.Context(), 0, [][]byte{nil}), "loader: shards: field 0: the destination has 0 bytes, not 8")
	require.Zero(t, sim.Outstanding().Registrations)

	// A position in other windows is another order.
	l := newLoaderFor(t, dev, src, Options{BatchSize: 4, Shuffle: true})
	require.Equal(t, "37 samples in batches of 4, shuffled with seed 0 within windows of 1 of 4 shards", l.order)
	other, err := Shards([]int{8}, 4*page, paths...)
	require.NoError(t, err)
	_, err = New(t.Context(), dev, other, Options{BatchSize: 4, Shuffle: true, Start: Position{Order: l.order}})
	require.ErrorContains(t, err, "it would skip or repeat samples")

	refusing, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrCanUseHostPointerForRegisteredMem: 0}}}})
	_, err = New(t.Context(), rt.Devices()[0], src, Options{BatchSize: 4})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.Zero(t, refusing.Outstanding().Registrations)
}

// An error of a shard names it and ends the epoch before the window; when its cause is gone, the next epoch is whole.
func TestShardsThatChange(t *testing.T) {
	t.Parallel()
	samples := []int{4, 4, 4, 4, 4}
	for name, change := range map[string]struct {
		change func(path string) error
		want   string
	}{
		"shrunk":   {func(path string) error { return os.Truncate(path, 64) }, " has 64 bytes, and had 256 when the source was made"},
		"empty":    {func(path string) error { return os.Truncate(path, 0) }, " has 0 bytes, and had 256 when the source was made"},
		"grown":    {func(path string) error { return os.Truncate(path, 512) }, " has 512 bytes, and had 256 when the source was made"},
		"removed":  {os.Remove, ": no such file or directory"},
		"a folder": {func(path string) error { return cmpErr(os.Remove(path), os.Mkdir(path, 0o700)) }, " is not a regular file (mode d"},
	} {
		for _, unordered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", name, unordered), func(t *testing.T) {
				t.Parallel()
				sim, dev := simulated(t, cudasim.Link{})
				paths := writeShards(t, samples, 64)
				src, err := Shards([]int{64}, 2*os.Getpagesize(), paths...)
				require.NoError(t, err)
				content, err := os.ReadFile(paths[3])
				require.NoError(t, err)
				require.NoError(t, change.change(paths[3]))
				l := newLoaderFor(t, dev, src, Options{BatchSize: 3, Unordered: unordered})
				s := stream(t, dev)
				for range 2 {
					var last error
					var numbers []int
					for b, err := range l.Batches(t.Context()) {
						if last = err; err == nil {
							requireGathered(t, b, s, 64)
							numbers = append(numbers, b.Number())
						}
					}
					require.ErrorContains(t, last, paths[3]+change.want)
					require.Regexp(t, "^loader: batch 4 of epoch [01]: shards of a window: ", last.Error())
					if !unordered {
						require.Equal(t, []int{0, 1, 2, 3}, numbers)
					}
				}
				require.LessOrEqual(t, sim.Outstanding().Registrations, 1+2)
				host, _ := newHostLoader(t, src, Options{BatchSize: 3})
				var last error
				for _, last = range host.Batches(t.Context()) {
				}
				if name != "grown" {
					require.ErrorContains(t, last, paths[3])
				}
				require.NoError(t, os.RemoveAll(paths[3]))
				require.NoError(t, os.WriteFile(paths[3], content, 0o600))
				n := 0
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					requireGathered(t, b, s, 64)
					n += b.Len()
				}
				require.Equal(t, 20, n)
			})
		}
	}
}

func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Files that cannot be registered, or unregistered, are an error of the epoch, and Close closes them later.
func TestShardsThatStayRegistered(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	samples := []int{4, 4, 4, 4}
	src := shardsOf(t, 2*os.Getpagesize(), samples, 64)
	l, err := New(t.Context(), dev, src, Options{BatchSize: 4})
	require.NoError(t, err)
	largest := watchPinned(t, sim, sim.Outstanding().RegisteredBytes)
	sim.Fail("cudaHostUnregister", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	for range 3 {
		n := 0
		var last error
		for _, last = range l.Batches(t.Context()) {
			n++
		}
		require.ErrorIs(t, last, cudart.ErrUnknown)
		require.ErrorContains(t, last, "shard-0")
		require.LessOrEqual(t, n, 3)
	}
	require.ErrorIs(t, l.Close(), cudart.ErrUnknown)
	require.Positive(t, sim.Outstanding().Registrations)
	sim.ResetFaults()
	require.NoError(t, l.Close())
	require.Zero(t, sim.Outstanding().Registrations)
	require.LessOrEqual(t, int(largest.Load()), 2*os.Getpagesize())
}

// Close ends a loader while a window is being registered or closed, at each call of CUDA that this takes.
func TestCloseWhileWindowsChange(t *testing.T) {
	t.Parallel()
	samples := []int{4, 4, 4, 4}
	for _, fn := range []string{"cudaHostRegister", "cudaHostUnregister"} {
		for nth := 1; nth <= 4; nth++ {
			t.Run(fmt.Sprintf("%s #%d", fn, nth), func(t *testing.T) {
				t.Parallel()
				sim, dev := simulated(t, cudasim.Link{})
				l, err := New(t.Context(), dev, shardsOf(t, 2*os.Getpagesize(), samples, 64), Options{BatchSize: 4, Prefetch: 1})
				require.NoError(t, err)
				unblock := sim.Block(fn, cudasim.Fault{Nth: nth})
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				ended := make(chan error, 1)
				go func() {
					var last error
					for last == nil && ctx.Err() == nil {
						for _, last = range l.Batches(ctx) {
						}
					}
					ended <- last
				}()
				require.NoError(t, sim.AwaitBlocked(ctx, fn, 1))
				require.ErrorIs(t, l.Close(), errRunning)
				require.ErrorIs(t, <-ended, cudart.ErrClosed)
				brief, stop := context.WithCancel(ctx)
				stop()
				err = l.CloseContext(brief)
				require.ErrorIs(t, err, context.Canceled)
				unblock()
				require.NoError(t, l.CloseContext(ctx))
				require.Eventually(t, func() bool { return sim.Outstanding().Registrations == 0 }, timeout, time.Millisecond, "after the call that was abandoned")
				require.NoError(t, ctx.Err(), "it hung")
				require.Empty(t, sim.Misuses())
			})
		}
	}
}

// Close is called at each of a loop's calls of CUDA, or some of them, and loops are left and begun meanwhile.
func TestCloseAtAnyCallOfALoopOverShards(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	src := shardsOf(t, 2*os.Getpagesize(), []int{9, 7, 8, 9}, 64)
	held := sim.Outstanding()
	life := func(at int) (calls int) {
		l, err := New(t.Context(), dev, src, Options{BatchSize: 4, Prefetch: 2, Shuffle: true})
		require.NoError(t, err)
		var n atomic.Int64
		closeLoader := sync.OnceFunc(func() {
			for l.Close() != nil { // while the loop ends
				runtime.Gosched()
			}
		})
		sim.OnCall(func(string, int) {
			if int(n.Add(1)) == at {
				go closeLoader()
			}
		})
		for range l.Epochs(2) {
			for b, err := range l.Batches(t.Context()) {
				if err != nil {
					require.ErrorIs(t, err, cudart.ErrClosed)
					break
				}
				require.NoError(t, b.Use(s))
				if b.Number()%3 == 2 {
					break
				}
			}
		}
		calls = int(n.Load())
		sim.OnCall(nil)
		closeLoader() // or waits for it
		require.NoError(t, s.Synchronize(t.Context()))
		now := sim.Outstanding()
		now.Events, held.Events = 0, 0 // a runtime keeps some for the next wait
		require.Equal(t, held, now, "Close at call %d", at)
		return calls
	}
	step := 13
	if os.Getenv("PINNED_SOAK") != "" {
		step = 1
	}
	calls := life(0)
	for at := 1; at < calls; at += step {
		life(at)
	}
	require.Empty(t, sim.Misuses())
}

// MaxBytes holds for both lists of indices where they are larger than the samples.
func TestListsOfShardsKeepToMaxBytes(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	src := shardsOf(t, 1<<20, []int{10_000}, 1)
	o := Options{BatchSize: 1000, MaxBytes: 17_000}
	require.Equal(t, 16_000, newLoaderFor(t, dev, src, o).Stats().PinnedBytes)
	o.MaxBytes = 15_000
	_, err := New(t.Context(), dev, src, o)
	require.ErrorContains(t, err, "Options.MaxBytes is 15000: two batches of 8000 bytes do not fit")
}

// Stats and messages of a loader of shards are those of others.
func TestStatsOfShards(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Link{})
	samples := []int{40, 40, 40}
	l := newLoaderFor(t, dev, shardsOf(t, 2*2*os.Getpagesize(), samples, 100), Options{BatchSize: 8, Shuffle: true})
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
	}
	stats := l.Stats()
	assert.Equal(t, 120, stats.Samples)
	assert.Equal(t, 12000, stats.Bytes)
	assert.Equal(t, 15, stats.Batches)
	assert.True(t, strings.HasSuffix(l.order, "of 3 shards"))
}
