package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
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
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A fanTrial is a Fanout on two simulated devices, for one operation with faults.
type fanTrial struct {
	testing.TB
	sim    *cudasim.Sim
	rt     *cudart.Runtime
	f      *Fanout
	mems   []cudart.DevPtr
	pinned *hostmem.Buffer
	want   []byte
	file   string
}

const fanTrialBytes = 3*mib + 5

// fanOperations are ways in; all leave the same bytes on the devices.
var fanOperations = map[string]func(ctx context.Context, b *fanTrial) error{
	"bytes":  func(ctx context.Context, b *fanTrial) error { return b.f.Upload(ctx, b.mems, b.want) },
	"pinned": func(ctx context.Context, b *fanTrial) error { return b.f.Upload(ctx, b.mems, b.pinned.Bytes()) },
	"few bytes": func(ctx context.Context, b *fanTrial) error {
		return b.f.Upload(ctx, b.mems, b.want[:1000])
	},
	"file": func(ctx context.Context, b *fanTrial) error {
		f, err := os.Open(b.file)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = b.f.UploadFrom(ctx, b.mems, f, 0, len(b.want))
		return err
	},
	"reader": func(ctx context.Context, b *fanTrial) error {
		_, err := b.f.UploadReader(ctx, b.mems, struct{ io.Reader }{bytes.NewReader(b.want)}, len(b.want))
		return err
	},
	"pieces": func(ctx context.Context, b *fanTrial) error {
		_, err := b.f.UploadPieces(ctx, bytes.NewReader(b.want), 0, len(b.want), piecesOf(b.mems, len(b.want), 300_001))
		return err
	},
}

// piecesOf cuts n bytes into pieces, each of which goes to where it is without them.
func piecesOf(mems []cudart.DevPtr, n, size int) (list []Piece) {
	for off := 0; off < n; off += size {
		p := Piece{Off: off, N: min(size, n-off)}
		for _, mem := range mems {
			p.Dsts = append(p.Dsts, mem+cudart.DevPtr(off))
		}
		list = append(list, p)
	}
	return list
}

func newFanTrial(t testing.TB, cfg cudasim.Config, file string, want []byte) *fanTrial {
	t.Helper()
	cfg.Devices = make([]cudasim.DeviceConfig, 2)
	b := &fanTrial{TB: t, want: want, file: file}
	var err error
	b.sim, err = cudasim.New(testgpu.Config(cfg))
	require.NoError(t, err)
	b.rt, err = cudart.Open(context.Background(), cudart.Options{Source: b.sim})
	require.NoError(t, err)
	b.f, err = NewFanout(t.Context(), b.rt.Devices(), Options{Workers: 2})
	require.NoError(t, err)
	for _, dev := range b.rt.Devices() {
		p, err := dev.Malloc(len(want))
		require.NoError(t, err)
		b.mems = append(b.mems, p)
	}
	b.pinned, err = hostmem.Alloc(t.Context(), b.rt.Devices()[0], len(want), hostmem.Options{})
	require.NoError(t, err)
	copy(b.pinned.Bytes(), want)
	return b
}

// n is how many bytes an operation copies.
func (b *fanTrial) n(operation string) int {
	if operation == "few bytes" {
		return 1000
	}
	return len(b.want)
}

func (b *fanTrial) fixture() *fanFixture { return &fanFixture{TB: b.TB, devs: b.rt.Devices(), f: b.f} }

// requireWorks runs an operation that is to succeed.
func (b *fanTrial) requireWorks(name, what string) {
	b.Helper()
	b.fixture().forget(b.mems, b.n(name))
	err := fanOperations[name](b.Context(), b)
	if errors.Is(err, cudart.ErrInvalidResourceHandle) { // of a call that was in progress
		err = fanOperations[name](b.Context(), b)
	}
	require.NoError(b, err, what)
	b.fixture().requireOn(b.mems, b.want[:b.n(name)], what)
}

// close releases all, and requires that nothing is left.
func (b *fanTrial) close(what string) {
	b.Helper()
	require.NoError(b, b.f.Close(), what)
	require.NoError(b, b.pinned.Close(), what)
	for i, dev := range b.rt.Devices() {
		require.NoError(b, dev.Free(b.mems[i]), what)
	}
	require.NoError(b, b.rt.Close(), what)
	testgpu.End(b, b.sim)
}

// callsOf counts the calls of what one makes.
func (b *fanTrial) callsOf(one func()) map[string]int {
	var mu sync.Mutex
	calls := make(map[string]int)
	b.sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	one()
	b.sim.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	delete(calls, "cudaGetLastError") // cannot fail
	return calls
}

func fanSource(t testing.TB) (file string, want []byte) {
	t.Helper()
	want = bytesOf(6, fanTrialBytes)
	file = filepath.Join(t.TempDir(), "source")
	require.NoError(t, os.WriteFile(file, want, 0o600))
	return file, want
}

var fanConfigs = map[string]cudasim.Config{
	"peers":    {},
	"no peers": {NoPeerAccess: [][2]int{{0, 1}}, Version: 12040},
}

var namesDevice = regexp.MustCompile(`device [01] \(`)

// TestEveryCallOfAFanoutCanFail makes each CUDA call of each operation fail in turn,
// once, and the first ones from then on. The operation fails with an error that names the call and
// the device, or has brought all bytes; nothing is in flight, the next one works,
// and all can be released.
func TestEveryCallOfAFanoutCanFail(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	var failed atomic.Int64
	var cells []cell
	for _, config := range slices.Sorted(maps.Keys(fanConfigs)) {
		for _, name := range slices.Sorted(maps.Keys(fanOperations)) {
			probe := newFanTrial(t, fanConfigs[config], file, want)
			calls := probe.callsOf(func() { require.NoError(t, fanOperations[name](t.Context(), probe)) })
			probe.close(name)
			for _, fn := range slices.Sorted(maps.Keys(calls)) {
				add := func(nth, times int) {
					dims := []string{config + ", " + name, fmt.Sprintf("%s %d times", fn, times), fmt.Sprintf("%s, call %d", fn, min(nth, 3))}
					cells = append(cells, cell{dims, func(t *testing.T) {
						if newFanTrial(t, fanConfigs[config], file, want).fails(name, fn, nth, times) {
							failed.Add(1)
						}
					}})
				}
				times := calls[fn]
				if strings.HasSuffix(fn, "Query") { // as often as the wait happens to ask
					times = min(times, 2)
				}
				for nth := 1; nth <= min(times, 8); nth++ {
					if add(nth, 1); nth <= 2 { // each takes a second
						add(nth, -1)
					}
				}
			}
		}
	}
	cells = thin(cells)
	atOnce(t, cells)
	assert.NotZero(t, failed.Load())
	t.Logf("%d faults: %d copies failed, %d worked all the same", len(cells), failed.Load(), len(cells)-int(failed.Load()))
}

// fails runs an operation with calls that fail, and reports whether it has failed.
func (b *fanTrial) fails(name, fn string, nth, times int) bool {
	b.fixture().forget(b.mems, b.n(name))
	b.sim.Fail(fn, cudasim.Fault{Nth: nth, Times: times, Code: cudart.ErrInvalidResourceHandle})
	err := fanOperations[name](b.Context(), b)
	if !errors.Is(err, ErrUnderWay) {
		require.Zero(b, b.sim.PendingCopies())
	}
	b.sim.ResetFaults()
	if err != nil {
		require.ErrorIs(b, err, cudart.ErrInvalidResourceHandle)
		require.ErrorContains(b, err, fn)
		require.Regexp(b, namesDevice, err.Error())
		require.Regexp(b, `at byte \d+ of \d+`, err.Error())
	} else {
		b.fixture().requireOn(b.mems, b.want[:b.n(name)], name)
	}
	b.requireWorks(name, fn)
	b.close(name)
	return err != nil
}

// Calls that block hold up no caller whose context ends: the copy returns, and says
// that it may be under way if that is so. When the call returns everything works
// again.
func TestCallsOfAFanoutThatDoNotReturn(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	var cells []cell
	for _, config := range slices.Sorted(maps.Keys(fanConfigs)) {
		cfg := fanConfigs[config]
		for _, name := range slices.Sorted(maps.Keys(fanOperations)) {
			operation := fanOperations[name]
			probe := newFanTrial(t, cfg, file, want)
			calls := probe.callsOf(func() { require.NoError(t, operation(t.Context(), probe)) })
			probe.close(name)
			for _, fn := range slices.Sorted(maps.Keys(calls)) {
				cells = append(cells, cell{[]string{config, name, config + ", " + fn}, func(t *testing.T) {
					b := newFanTrial(t, cfg, file, want)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					unblock := b.sim.Block(fn, cudasim.Fault{})
					ended := make(chan error, 1)
					go func() { ended <- operation(ctx, b) }()
					// It may not make the call this time.
					reached, stop := context.WithCancel(t.Context())
					go func() {
						if b.sim.AwaitBlocked(reached, fn, 1) == nil {
							cancel()
						}
					}()
					err := <-ended
					stop()
					unblock()
					if err != nil {
						require.ErrorIs(t, err, context.Canceled)
					} else {
						b.fixture().requireOn(b.mems, want[:b.n(name)], fn)
					}
					for b.sim.Outstanding().PendingOps > 0 { // what was left
						time.Sleep(time.Millisecond)
					}
					b.requireWorks(name, fn)
					b.close(fn)
				}})
			}
		}
	}
	atOnce(t, thin(cells))
}

// A copy between devices that CUDA keeps for long ends while the Fanout is closed: peer
// access stays until then.
func TestCloseOfAFanoutWithACallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	b := newFanTrial(t, fanConfigs["peers"], file, want)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	unblock := b.sim.Block("cudaMemcpyPeerAsync", cudasim.Fault{})
	ended := make(chan error, 1)
	go func() { ended <- b.f.Upload(ctx, b.mems, want) }()
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaMemcpyPeerAsync", 1))
	cancel()
	require.ErrorIs(t, <-ended, ErrUnderWay)
	require.ErrorIs(t, b.f.Close(), ErrUnderWay)
	require.NotZero(t, b.sim.Outstanding().PeerAccesses)
	unblock()
	require.Eventually(t, func() bool { return b.f.Close() == nil }, time.Minute, time.Millisecond)
	require.Zero(t, b.sim.Outstanding().PeerAccesses)
	b.close("after")
}

// A device that falls off the bus half-way: the error names it, the other one is
// done with its memory, goes on, and is released.
func TestADeviceOfAFanoutThatIsLost(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	var cells []cell
	for _, config := range slices.Sorted(maps.Keys(fanConfigs)) {
		for _, name := range slices.Sorted(maps.Keys(fanOperations)) {
			for _, lost := range []int{0, 1} {
				dims := []string{config, name, fmt.Sprintf("%s, device %d", config, lost)}
				cells = append(cells, cell{dims, func(t *testing.T) {
					cfg, operation := fanConfigs[config], fanOperations[name]
					b := newFanTrial(t, cfg, file, want)
					dev := b.rt.Devices()[1-lost]
					c, err := NewCopier(t.Context(), dev, Options{})
					require.NoError(t, err)
					var once sync.Once
					b.sim.OnCall(func(fn string, n int) {
						if strings.HasPrefix(fn, "cudaMemcpy") {
							once.Do(func() { assert.NoError(t, b.sim.LoseDevice(lost)) })
						}
					})
					err = operation(t.Context(), b)
					require.Error(t, err)
					require.ErrorContains(t, err, fmt.Sprintf("device %d (", lost))
					require.Regexp(t, `at byte \d+ of \d+`, err.Error())

					const more = 24 * mib // than fits into the ring
					mem, err := dev.Malloc(more)
					require.NoError(t, err)
					require.NoError(t, c.Upload(t.Context(), mem, bytesOf(7, more)))
					require.True(t, bytes.Equal(bytesOf(7, more), (&fixture{TB: t, dev: dev}).onDevice(mem, more)))
					require.NoError(t, dev.Free(mem))
					require.ErrorContains(t, b.f.Close(), fmt.Sprintf("device %d (", lost))
					require.ErrorIs(t, b.f.Upload(t.Context(), b.mems, want), cudart.ErrClosed)
					require.NoError(t, dev.Free(b.mems[1-lost]))
					if err := c.Close(); config == "peers" || name == "shards" {
						require.NoError(t, err)
					} else if err != nil { // the lost device may be reading its ring
						require.ErrorContains(t, err, fmt.Sprintf("device %d (", lost))
					}
					if lost == 1 && (config == "peers" || name != "pinned") {
						require.NoError(t, b.pinned.Close())
					}
					if err := b.rt.Close(); err != nil { // it cannot destroy events of the lost device
						require.ErrorContains(t, err, fmt.Sprintf("of device %d (", lost))
					}
					err = b.sim.Close()
					require.ErrorContains(t, err, fmt.Sprintf("of device %d", lost), "what it has stays")
					if config == "peers" {
						require.NotContains(t, err.Error(), fmt.Sprintf("of device %d", 1-lost))
					}
				}})
			}
		}
	}
	atOnce(t, thin(cells))
}

// A source that fails half-way fails the copy, and no device copies any more.
func TestSourcesOfAFanoutThatFail(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	b := newFanTrial(t, cudasim.Config{}, file, want)
	n := len(want)
	boom := errors.New("the disk is on fire")
	for _, at := range []int{0, 1, 512 * kib, 2*mib + 1, n - 1} {
		for how, end := range map[string]error{"error": boom, "end": io.ErrUnexpectedEOF} {
			what := fmt.Sprintf("%s at %d", how, at)
			source := want[:at]
			if how == "end" {
				done, err := b.f.UploadFrom(t.Context(), b.mems, onlyReaderAt{bytes.NewReader(source)}, 0, n)
				require.ErrorIs(t, err, end, what)
				require.Equal(t, at, done, what)
			}
			b.fixture().forget(b.mems, n)
			done, err := b.f.UploadReader(t.Context(), b.mems, io.MultiReader(bytes.NewReader(source), failing{end}), n)
			require.ErrorIs(t, err, end, what)
			require.ErrorContains(t, err, fmt.Sprintf("at byte %d of %d", at, n), what)
			require.Equal(t, at, done, what)
			b.fixture().requireOn(b.mems, want[:done], what)
			require.Zero(t, b.sim.PendingCopies(), what)
		}
	}
	_, err := b.f.UploadReader(t.Context(), b.mems, readerFunc(func([]byte) (int, error) { panic(boom) }), n)
	require.ErrorContains(t, err, "panic: the disk is on fire")
	b.close("")
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// A copy that is canceled at any time ends with the context's error, and no device
// copies any more.
func TestFanoutsThatAreCanceled(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	for config, cfg := range fanConfigs {
		b := newFanTrial(t, cfg, file, want)
		for name, operation := range fanOperations {
			calls := 0
			for _, n := range b.callsOf(func() { require.NoError(t, operation(t.Context(), b)) }) {
				calls += n
			}
			for i := range 8 { // at calls from the first to the last
				ctx, cancel := context.WithCancelCause(t.Context())
				stop := errors.New("stop")
				remaining := atomic.Int64{}
				remaining.Store(int64(1 + calls*i/8))
				b.sim.OnCall(func(string, int) {
					if remaining.Add(-1) == 0 {
						cancel(stop)
					}
				})
				err := operation(ctx, b)
				b.sim.OnCall(nil)
				cancel(nil)
				if err != nil {
					require.ErrorIs(t, err, stop, "%s, %s", config, name)
				}
				require.Zero(t, b.sim.PendingCopies(), "%s, %s", config, name)
			}
			b.requireWorks(name, config+", "+name)
		}
		b.close(config)
	}
}

// Runs with faults at random, several copies at once.
func TestFanoutWithFaultsAtRandom(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	seeds := uint64(2)
	if soaks() {
		seeds = 24
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 1))
			b := newFanTrial(t, fanConfigs[[]string{"peers", "no peers"}[seed%2]], file, want)
			names := slices.Sorted(maps.Keys(fanOperations))
			for range 25 {
				start := b.sim.TotalCalls()
				for range rnd.IntN(4) {
					b.sim.FailCall(start+1+rnd.IntN(120), cudart.ErrInvalidResourceHandle)
				}
				var all sync.WaitGroup
				var gaveUp atomic.Bool
				for range 1 + rnd.IntN(3) {
					name := names[rnd.IntN(len(names))]
					all.Go(func() {
						if err := fanOperations[name](t.Context(), b); err != nil {
							assert.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
							if errors.Is(err, ErrUnderWay) {
								gaveUp.Store(true)
							}
						}
					})
				}
				all.Wait()
				if !gaveUp.Load() { // as it may on a busy machine, where a call is slow
					require.Zero(t, b.sim.PendingCopies())
				}
				require.Eventually(t, func() bool { return b.sim.Outstanding().PendingOps == 0 }, 20*time.Second, time.Millisecond)
				b.sim.ResetFaults()
				b.requireWorks(names[rnd.IntN(len(names))], fmt.Sprint(seed))
			}
			b.close(fmt.Sprint(seed))
		})
	}
}

// Making and closing a Fanout, with each call failing in turn, also where copies between the devices
// are lost.
func TestMakingAndClosingAFanoutCanFail(t *testing.T) {
	for _, lost := range [][][2]int{nil, {{1, 0}}} {
		t.Run(fmt.Sprint(lost), func(t *testing.T) { makingAndClosingCanFail(t, lost) })
	}
}

func makingAndClosingCanFail(t *testing.T, lost [][2]int) {
	positions := 0
	for nth := 1; ; nth += hosttest.Stride() {
		sim, err := cudasim.New(testgpu.Config(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), LostPeerCopies: lost}))
		require.NoError(t, err)
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err)
		start := sim.TotalCalls()
		sim.FailCall(start+nth, cudart.ErrInvalidResourceHandle)
		f, err := NewFanout(t.Context(), rt.Devices(), Options{})
		made := err == nil
		if !made {
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
			require.ErrorContains(t, err, "transfer: new fanout on 2 devices")
			require.Regexp(t, namesDevice, err.Error())
		} else {
			if err := f.Close(); err != nil {
				require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
				require.ErrorContains(t, err, "transfer: close fanout")
				require.NoError(t, f.Close(), "it may be tried again")
			}
			require.NoError(t, f.Close(), "once more does nothing")
		}
		calls := sim.TotalCalls() - start
		sim.ResetFaults()
		require.NoError(t, rt.Close())
		testgpu.End(t, sim)
		positions++
		if made && nth > calls {
			break
		}
	}
	require.Greater(t, positions, 30/hosttest.Stride())
	t.Logf("%d faults", positions)
}

// Where a device has no more room for peers, chunks go to all devices.
func TestFanoutWorksWhenPeerAccessIsExhausted(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}))
	require.NoError(t, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	sim.Fail("cudaDeviceEnablePeerAccess", cudasim.Fault{Nth: 2, Code: cudart.Code(711)})
	f, err := NewFanout(t.Context(), rt.Devices(), Options{})
	require.NoError(t, err)
	require.Zero(t, sim.Outstanding().PeerAccesses, "the other way's is undone")
	require.Len(t, f.groups, 2)
	require.NoError(t, f.Close())
	require.NoError(t, rt.Close())
	testgpu.End(t, sim)
}

// A copy between devices that fails has copies before it, which the GPU may be at: the
// upload waits for them.
func TestAFailedPeerCopyIsWaitedFor(t *testing.T) {
	t.Parallel()
	file, want := fanSource(t)
	b := newFanTrial(t, fanConfigs["peers"], file, want)
	var gates []func()
	for _, p := range b.f.peers {
		gates = append(gates, blocked(t, p.stream))
	}
	b.sim.Fail("cudaMemcpyPeerAsync", cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidValue})
	// Both pieces are in one chunk.
	_, err := b.f.UploadPieces(t.Context(), bytes.NewReader(want), 0, 2000, piecesOf(b.mems, 2000, 1000))
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.ErrorIs(t, err, ErrUnderWay, "the first one cannot end")

	p := target{view: b.f.view, pieces: piecesOf(b.mems, 2000, 1000)}
	b.sim.Fail("cudaMemcpyPeerAsync", cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidValue})
	ends, err := p.forward(0, 0, 2000, cudart.Point{})
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.Len(t, ends, 1)
	require.False(t, ends[0].Done(t.Context()))
	for _, open := range gates {
		open()
	}
	require.NoError(t, ends[0].Wait(t.Context()))
	b.requireWorks("bytes", "after")
	b.close("after")
}
