package weights_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
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
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// A trial is a plan with memory on two simulated devices, for loads with faults: some
// tensors go to one device, some to both, some are split.
type trial struct {
	*planned
	sim *cudasim.Sim
	rt  *cudart.Runtime
}

func newTrial(t testing.TB, cfg cudasim.Config, b *bench) *trial {
	t.Helper()
	cfg.Devices = make([]cudasim.DeviceConfig, 2)
	sim, err := cudasim.New(testgpu.Config(cfg))
	require.NoError(t, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	var shares []weights.Share
	for i, tensor := range b.tensors {
		switch half := tensor.Size / 2; i % 4 {
		case 0, 1:
			shares = append(shares, weights.Share{Part: tensor.Whole(), Device: i % 4})
		case 2:
			shares = append(shares, weights.Share{Part: tensor.Whole(), Device: 0}, weights.Share{Part: tensor.Whole(), Device: 1})
		case 3:
			shares = append(shares, weights.Share{Part: weights.Part{Tensor: tensor, Size: half}, Device: 0},
				weights.Share{Part: weights.Part{Tensor: tensor, From: half, Size: tensor.Size - half}, Device: 1})
		}
	}
	plan, err := weights.PlanShares(shares, weights.PlanOptions{})
	require.NoError(t, err)
	p := &planned{b, plan, map[int]weights.Memory{}}
	for _, d := range plan.Devices {
		ptr, err := rt.Devices()[d.Device].Malloc(d.Bytes)
		require.NoError(t, err)
		p.memory[d.Device] = weights.Memory{Device: rt.Devices()[d.Device], Ptr: ptr, Bytes: d.Bytes}
	}
	return &trial{p, sim, rt}
}

func (tr *trial) load(ctx context.Context) error {
	return tr.plan.Load(ctx, tr.memory, weights.LoadOptions{})
}

// forget overwrites the memory when copies are done that a failed load has left.
func (tr *trial) forget(t testing.TB) {
	t.Helper()
	for tr.sim.Outstanding().PendingOps > 0 {
		time.Sleep(time.Millisecond)
	}
	tr.planned.forget(t)
}

// requireWorks loads without faults.
func (tr *trial) requireWorks(t testing.TB, what string) {
	t.Helper()
	tr.forget(t)
	require.NoError(t, tr.load(t.Context()), what)
	tr.requireLoaded(t, what)
}

// close releases all, and requires that nothing is left. What a load could not release, as a
// copy that it had given up was still running, later loads do.
func (tr *trial) close(t testing.TB, what string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); tr.sim.Outstanding().Registrations > 0 && time.Now().Before(end); {
		require.NoError(t, tr.load(t.Context()), what)
	}
	for _, m := range tr.memory {
		require.NoError(t, m.Device.Free(m.Ptr), what)
	}
	require.NoError(t, tr.rt.Close(), what)
	testgpu.End(t, tr.sim)
}

// calls counts the calls that a load makes.
func (tr *trial) calls(t testing.TB) map[string]int {
	t.Helper()
	var mu sync.Mutex
	calls := map[string]int{}
	tr.sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	require.NoError(t, tr.load(t.Context()))
	tr.sim.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	delete(calls, "cudaGetLastError") // cannot fail
	return maps.Clone(calls)
}

// smallBench is a model of a safetensors and a GGUF file.
func smallBench(t testing.TB) *bench {
	specs := func(prefix string) []spec {
		return []spec{u8(prefix+"a", 1_000_001), u8(prefix+"b", 300), u8(prefix+"c", 700_000), u8(prefix+"d", 77), u8(prefix+"e", 900_000), u8(prefix+"f", 1)}
	}
	return benchOf(t, t.TempDir(), map[string][]byte{
		"a.safetensors": makeSafetensors(t, nil, specs("a.")...),
		"b.gguf":        makeGGUF(3, 32, specs("b.")...),
	})
}

var trialConfigs = map[string]cudasim.Config{"peers": {}, "no peers": {NoPeerAccess: [][2]int{{0, 1}}, Version: 12040}}

// TestFailureOfEachCallIsReported makes each CUDA call of a load fail in turn, once and
// from then on. The load fails with an error that names the call, or has brought all
// bytes; what it calls complete is, nothing is in flight, the next one works, and all
// is released.
func TestFailureOfEachCallIsReported(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	configs, times := []string{"peers", "no peers"}, []int{1, -1} // once, from then on
	for i := range cells(len(configs), len(times)) {
		config, more := configs[i[0]], times[i[1]]
		t.Run(fmt.Sprintf("%s/%d", config, more), func(t *testing.T) {
			t.Parallel()
			sweepOfFaults(t, newTrial(t, trialConfigs[config], b), more)
		})
	}
}

func sweepOfFaults(t *testing.T, tr *trial, more int) {
	tr.requireWorks(t, "before")
	calls := tr.calls(t)
	candidates, positions, failed, loads := 0, 0, 0, 0
	for _, fn := range slices.Sorted(maps.Keys(calls)) {
		times := calls[fn]
		if strings.HasSuffix(fn, "Query") { // as often as the wait happens to ask
			times = min(times, 2)
		}
		for nth := 1; nth <= min(times, 12); nth++ {
			if !long() && nth > 3 && nth < min(times, 12) && nth%3 > 0 {
				continue // all first calls, the last one, and some between
			}
			if candidates++; candidates%hosttest.Stride() != 0 {
				continue
			}
			what := fmt.Sprintf("%s, call %d", fn, nth)
			tr.forget(t)
			tr.sim.Fail(fn, cudasim.Fault{Nth: nth, Times: more, Code: cudart.ErrInvalidResourceHandle})
			err := tr.load(t.Context())
			pending := tr.sim.Outstanding().PendingOps
			tr.sim.ResetFaults()
			positions++
			if err == nil {
				tr.requireLoaded(t, what)
				continue
			}
			failed++
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle, what)
			require.ErrorContains(t, err, fn, what)
			require.Regexp(t, "^weights: load( tensor|:) ", err.Error(), what)
			if !errors.Is(err, transfer.ErrUnderWay) {
				require.Zero(t, pending, what+": "+err.Error())
			}
			var load *weights.LoadError
			if errors.As(err, &load) {
				loads++
				tr.requireComplete(t, load)
			}
		}
	}
	tr.requireWorks(t, "after")
	require.NotZero(t, loads)
	t.Logf("%d faults: %d loads failed, %d of them while copying", positions, failed, loads)
	if more == 1 {
		tr.close(t, "after")
		return
	}
	for _, m := range tr.memory {
		require.NoError(t, m.Device.Free(m.Ptr))
	}
	require.NoError(t, tr.rt.Close())
	_ = tr.sim.Close() // what could not be released stays
}

// A device that falls off the bus: the error names it.
func TestLoadOntoLostDeviceFails(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	for config, cfg := range trialConfigs {
		for _, lost := range []int{0, 1} {
			tr := newTrial(t, cfg, b)
			var once sync.Once
			tr.sim.OnCall(func(fn string, n int) {
				if strings.HasPrefix(fn, "cudaMemcpy") {
					once.Do(func() { assert.NoError(t, tr.sim.LoseDevice(lost)) })
				}
			})
			err := tr.load(t.Context())
			var load *weights.LoadError
			require.ErrorAs(t, err, &load, config)
			require.ErrorContains(t, load.Err, fmt.Sprintf("device %d (", lost), config)
			require.NoError(t, tr.rt.Close())
			_ = tr.sim.Close() // what the lost device has stays
		}
	}
}

// A device that was lost before the load: the error names it and its tensor.
func TestLoadAfterADeviceWasLost(t *testing.T) {
	t.Parallel()
	tr := newTrial(t, cudasim.Config{}, smallBench(t))
	require.NoError(t, tr.sim.LoseDevice(1))
	var placements []weights.Placement
	for i, tensor := range tr.tensors[:2] {
		placements = append(placements, weights.Placement{Part: tensor.Whole(), To: tr.memory[i]})
	}
	var load *weights.LoadError
	require.ErrorAs(t, weights.Place(t.Context(), placements, weights.LoadOptions{}), &load)
	require.Equal(t, tr.tensors[1].Name, load.Tensor.Name)
	require.True(t, slices.Equal([]*cudart.Device{tr.memory[1].Device}, load.Devices))
	require.NotContains(t, load.Complete, tr.tensors[1])
	require.NoError(t, tr.rt.Close())
	_ = tr.sim.Close() // what the lost device has stays
}

// Loads that are canceled at any call end with the context's error; what they call
// complete is there, and no device copies any more.
func TestCanceledLoadsReturn(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	for config, cfg := range trialConfigs {
		tr := newTrial(t, cfg, b)
		all := 0
		for _, n := range tr.calls(t) {
			all += n
		}
		canceled, ends := 0, 12
		if long() {
			ends = 48
		}
		for i := range ends {
			ctx, cancel := context.WithCancelCause(t.Context())
			stop := errors.New("stop")
			var left atomic.Int64
			left.Store(int64(1 + all*i/ends))
			tr.forget(t)
			tr.sim.OnCall(func(string, int) {
				if left.Add(-1) == 0 {
					cancel(stop)
				}
			})
			err := tr.load(ctx)
			tr.sim.OnCall(nil)
			cancel(nil)
			require.Zero(t, tr.sim.PendingCopies(), config)
			if err == nil {
				tr.requireLoaded(t, config)
				continue
			}
			canceled++
			require.ErrorIs(t, err, stop, config)
			require.ErrorIs(t, err, context.Canceled, config)
			var load *weights.LoadError
			if errors.As(err, &load) {
				tr.requireComplete(t, load)
			}
		}
		require.NotZero(t, canceled)
		tr.requireWorks(t, config)
		tr.close(t, config)
	}
}

// Several loads at once, with faults at random.
func TestRandomFaultsAreReported(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	configs := []string{"peers", "no peers"}
	for i := range cells(len(configs), 2) {
		seed := uint64(i[1])
		rnd := rand.New(rand.NewPCG(seed, uint64(i[0])))
		tr := newTrial(t, trialConfigs[configs[i[0]]], b)
		rounds := 6
		if long() {
			rounds = 60
		}
		for range rounds {
			for range rnd.IntN(4) {
				tr.sim.Fail([]string{"cudaMemcpyAsync", "cudaEventRecord", "cudaMemcpyPeerAsync"}[rnd.IntN(3)],
					cudasim.Fault{Nth: 1 + rnd.IntN(20), Times: 1, Code: cudart.ErrInvalidResourceHandle})
			}
			var all sync.WaitGroup
			for range 2 {
				all.Go(func() {
					if err := tr.load(t.Context()); err != nil {
						assert.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
					}
				})
			}
			all.Wait()
			require.Zero(t, tr.sim.PendingCopies())
			tr.sim.ResetFaults()
			tr.requireWorks(t, fmt.Sprint(seed))
		}
		tr.close(t, fmt.Sprint(seed))
	}
}

// Two files that fail at once make one error, of one of them.
func TestErrorsOfTwoFilesAreJoined(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	tr := newTrial(t, cudasim.Config{}, b)
	fire, flood := errors.New("the disk is on fire"), errors.New("the disk is under water")
	var both sync.WaitGroup // each waits for the other one
	both.Add(2)
	bring := func(err error) *weights.File {
		data := makeSafetensors(t, nil, u8("x", 100))
		var broken atomic.Bool
		f, parsed := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
			if !broken.Load() {
				return copy(p, data[off:]), nil
			}
			both.Done()
			both.Wait()
			return 0, err
		}), int64(len(data)), err.Error())
		require.NoError(t, parsed)
		broken.Store(true)
		return f
	}
	var placements []weights.Placement
	for i, f := range []*weights.File{bring(fire), bring(flood)} {
		x, _ := f.Tensor("x")
		placements = append(placements, weights.Placement{Part: x.Whole(), To: tr.memory[i]})
	}
	err := weights.Place(t.Context(), placements, weights.LoadOptions{})
	require.True(t, errors.Is(err, fire) || errors.Is(err, flood))
	var load *weights.LoadError
	require.ErrorAs(t, err, &load)
	require.Empty(t, load.Complete)
	tr.close(t, "")
}

// A call into CUDA that does not return holds up no load whose context ends.
func TestLoadEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	for _, fn := range []string{"cudaMemcpyAsync", "cudaStreamCreateWithPriority", "cudaHostRegister"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			tr := newTrial(t, cudasim.Config{}, b)
			ctx, cancel := context.WithCancel(t.Context())
			unblock := tr.sim.Block(fn, cudasim.Fault{})
			ended := make(chan error, 1)
			go func() { ended <- tr.load(ctx) }()
			require.NoError(t, tr.sim.AwaitBlocked(t.Context(), fn, 1))
			cancel()
			require.ErrorIs(t, <-ended, context.Canceled)
			unblock() // the call may still copy, the same bytes to the same places
			require.NoError(t, tr.load(t.Context()))
			tr.requireComplete(t, &weights.LoadError{Complete: tr.tensors})
			_ = tr.rt.Close()
			_ = tr.sim.Close() // what could not be released stays
		})
	}
}

// That the GPU may still be copying is said also when another copy failed first. What
// could not be released then is by the next loads.
func TestAbandonedCopyIsUnderWay(t *testing.T) {
	t.Parallel()
	tr := newTrial(t, cudasim.Config{NoPeerAccess: [][2]int{{0, 1}}, Version: 12040}, smallBench(t))
	unblock := tr.sim.Block("cudaMemcpyAsync", cudasim.Fault{Nth: 1, Times: 1})
	tr.sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 2, Times: -1, Code: cudart.ErrInvalidResourceHandle})
	err := tr.load(t.Context())
	require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
	require.ErrorIs(t, err, transfer.ErrUnderWay)
	unblock()
	tr.sim.ResetFaults()
	require.Eventually(t, func() bool {
		return tr.load(t.Context()) == nil && tr.sim.Outstanding().Registrations == 0
	}, time.Minute, time.Millisecond)
	tr.requireWorks(t, "after")
	tr.close(t, "after")
}

// A file that is removed while it is open can be read still.
func TestRemovedFileIsLoaded(t *testing.T) {
	t.Parallel()
	b := smallBench(t)
	tr := newTrial(t, cudasim.Config{}, b)
	for _, path := range b.paths {
		require.NoError(t, os.Remove(path))
	}
	tr.requireWorks(t, "removed")
	tr.close(t, "removed")
}

// A faultyReader has the bytes of a file, and fails at one of them. Calls may outlast the load that has made them.
type faultyReader struct {
	file  []byte
	fault atomic.Pointer[fault] // nil for none
}

// A fault is what a read of the byte at an offset does. It gets the bytes before it.
type fault struct {
	at   int
	fail func(p []byte) (int, error)
}

func (r *faultyReader) ReadAt(p []byte, off int64) (int, error) {
	if f := r.fault.Load(); f != nil && f.at >= int(off) && f.at < int(off)+len(p) {
		return f.fail(p[:copy(p[:f.at-int(off)], r.file[off:])])
	}
	return bytes.NewReader(r.file).ReadAt(p, off)
}

// sharesAtRandom are parts of a file's tensors for three devices: rows, columns, and rows of odd sizes.
func sharesAtRandom(t testing.TB, rnd *rand.Rand, f *weights.File) (shares []weights.Share) {
	for tensor := range f.Tensors() {
		switch rnd.IntN(5) {
		case 0:
			shares = append(shares, weights.Share{Part: tensor.Whole(), Device: rnd.IntN(3)})
		case 1:
			for d := range 3 {
				shares = append(shares, weights.Share{Part: tensor.Whole(), Device: d})
			}
		case 2:
			p := weights.Part{Tensor: tensor, From: rnd.IntN(tensor.Size), Row: 1 + rnd.IntN(tensor.Size/10+1)}
			p.Stride = p.Row + rnd.IntN(tensor.Size/20+1)
			p.Size = max(tensor.Size-p.From-p.Row, 0)/p.Stride*p.Row + rnd.IntN(min(p.Row, tensor.Size-p.From)+1)
			shares = append(shares, weights.Share{Part: p, Device: 0}, weights.Share{Part: p, Device: 2}, weights.Share{Part: tensor.Whole(), Device: 1})
		default:
			dim := rnd.IntN(len(tensor.Shape))
			n, unit := tensor.Shape[dim], 1
			if tensor.DType == "Q4_0" && dim == 1 {
				n, unit = n/32, 32
			}
			for d := range 3 {
				part, err := tensor.Slice(dim, n*d/3*unit, n*(d+1)/3*unit)
				require.NoError(t, err)
				shares = append(shares, weights.Share{Part: part, Device: d})
			}
		}
	}
	return shares
}

// Whatever parts go where, a load brings them there, and its error names the first byte that is missing
// and no tensor as complete that is not.
func TestLoadErrorsOfAnyPartsAreExact(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 3)
	if len(devs) < 3 {
		t.Skip("needs three devices")
	}
	rnd := rand.New(rand.NewPCG(7, 8))
	r := &faultyReader{file: makeGGUF(3, 32, u8("a", 1_000_001), spec{"m", "F32", []int{100, 1000}}, u8("b", 77), spec{"q", "Q4_0", []int{64, 640}},
		spec{"c", "F16", []int{5, 40, 200}}, u8("d", 30), u8("e", 500_000), spec{"z", "F32", []int{50, 700}})}
	f, err := weights.Parse(r, int64(len(r.file)), "f")
	require.NoError(t, err)
	p := &planned{&bench{contents: map[*weights.Tensor][]byte{}}, nil, map[int]weights.Memory{}}
	for tensor := range f.Tensors() {
		p.contents[tensor] = r.file[tensor.Offset:][:tensor.Size]
	}
	faults := []func(p []byte) (int, error){
		func(p []byte) (int, error) { return len(p), errStop },
		func(p []byte) (int, error) { return len(p), nil },
		func([]byte) (int, error) { return 0, io.EOF },
		func([]byte) (int, error) { panic("at this byte") },
	}
	for round := range 20 {
		shares := sharesAtRandom(t, rnd, f)
		rnd.Shuffle(len(shares), func(i, j int) { shares[i], shares[j] = shares[j], shares[i] })
		p.plan, err = weights.PlanShares(shares, weights.PlanOptions{Align: 1 << rnd.IntN(14)})
		require.NoError(t, err)
		clear(p.memory)
		for _, d := range p.plan.Devices {
			p.memory[d.Device] = memoryOf(t, devs[d.Device], d.Bytes)
		}
		last, total := 0, 0
		r.fault.Store(nil)
		require.NoError(t, p.plan.Load(t.Context(), p.memory, weights.LoadOptions{DropCache: true, Progress: func(done, all int) {
			assert.Greater(t, done, last)
			last, total = done, all
		}}))
		assert.Equal(t, total, last)
		p.requireLoaded(t, fmt.Sprint(round))

		p.forget(t)
		bad := rnd.IntN(len(r.file))
		r.fault.Store(&fault{bad, faults[round%len(faults)]})
		err := p.plan.Load(t.Context(), p.memory, weights.LoadOptions{})
		if err == nil { // no part has the byte
			p.requireLoaded(t, fmt.Sprint(round))
			continue
		}
		var failed *weights.LoadError
		require.ErrorAs(t, err, &failed)
		require.NotNil(t, failed.Tensor, err)
		require.GreaterOrEqual(t, failed.Offset, failed.Tensor.Offset)
		require.Less(t, failed.Offset, failed.Tensor.Offset+int64(failed.Tensor.Size))
		if errors.Is(err, errStop) {
			require.EqualValues(t, bad, failed.Offset)
		}
		require.LessOrEqual(t, failed.Offset, int64(bad))
		p.requireComplete(t, failed)
	}
}
