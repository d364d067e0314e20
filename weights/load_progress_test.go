package weights_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

var errStop = errors.New("stop")

// planOnto plans all tensors of a bench onto two simulated devices, in turn.
func planOnto(t testing.TB, b *bench) (*planned, *cudasim.Sim) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	plan, err := weights.NewPlan(slices.Values(b.tensors), func(t *weights.Tensor) int { return int(t.Name[len(t.Name)-1]) % 2 }, weights.PlanOptions{})
	require.NoError(t, err)
	return b.planned(t, rt.Devices(), plan), sim
}

// A Progress that never returns holds up no load whose context ends, whether bytes are
// missing or not.
func TestCanceledLoadAbandonsProgress(t *testing.T) {
	t.Parallel()
	for name, blocks := range map[string]func(done, total int) bool{
		"at first": func(int, int) bool { return true },
		"at last":  func(done, total int) bool { return done == total },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, sim := planOnto(t, smallBench(t))
			ctx, cancel := context.WithCancelCause(t.Context())
			reached, block := make(chan struct{}), make(chan struct{})
			defer close(block)
			result := make(chan error, 1)
			go func() {
				result <- p.plan.Load(ctx, p.memory, weights.LoadOptions{Progress: func(done, total int) {
					if blocks(done, total) {
						close(reached) // panics if Progress is called again
						<-block
						panic("too late to be reported")
					}
				}})
			}()
			<-reached
			for name == "at last" && sim.Outstanding().Registrations > 0 {
				runtime.Gosched() // until all reads have returned, and the rings are released
			}
			cancel(errStop)
			err := <-result
			require.ErrorIs(t, err, errStop)
			require.ErrorIs(t, err, context.Canceled)
			var failed *weights.LoadError
			require.ErrorAs(t, err, &failed)
			p.requireComplete(t, failed)
			if name == "at last" {
				require.Nil(t, failed.Tensor)
				require.True(t, slices.Equal(p.tensors, failed.Complete))
				require.EqualError(t, err, "weights: load: progress has not returned: context canceled: stop")
			}
		})
	}
}

// Nor does it hold up a load that fails.
func TestFailedLoadAbandonsProgress(t *testing.T) {
	t.Parallel()
	boom := errors.New("the disk is on fire")
	data := makeSafetensors(t, nil, u8("a", 4*mib), u8("b", 4*mib))
	reached, block := make(chan struct{}), make(chan struct{})
	defer close(block)
	var broken int64 = maxInt
	f, err := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
		if off >= broken {
			<-reached
			return 0, boom
		}
		return bytes.NewReader(data).ReadAt(p, off)
	}), int64(len(data)), "file")
	require.NoError(t, err)
	tensors := slices.Collect(f.Tensors())
	broken = tensors[1].Offset
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	plan, err := weights.NewPlan(f.Tensors(), func(t *weights.Tensor) int { return int(t.Name[0] - 'a') }, weights.PlanOptions{})
	require.NoError(t, err)
	p := (&bench{}).planned(t, rt.Devices(), plan)
	err = plan.Load(t.Context(), p.memory, weights.LoadOptions{Progress: func(int, int) {
		close(reached)
		<-block
	}})
	require.ErrorIs(t, err, boom)
	var failed *weights.LoadError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, tensors[1], failed.Tensor)
}

// A Progress that panics or ends its goroutine is an error of the load.
func TestProgressFailureEndsTheLoad(t *testing.T) {
	t.Parallel()
	p, _ := planOnto(t, smallBench(t))
	for want, end := range map[string]func(){
		"progress: panic: boom":                        func() { panic("boom") },
		"progress: a callback ended its goroutine (ru": runtime.Goexit,
	} {
		for _, atLast := range []bool{false, true} {
			err := p.plan.Load(t.Context(), p.memory, weights.LoadOptions{Progress: func(done, total int) {
				if !atLast || done == total {
					end()
				}
			}})
			var failed *weights.LoadError
			require.ErrorAs(t, err, &failed)
			require.ErrorContains(t, err, "weights: load")
			require.ErrorContains(t, err, want)
			p.requireComplete(t, failed)
		}
	}
}

// All errors of an ended context answer for its Err and for its cause, whenever it ends.
func TestEndedContextErrorsHaveErrAndCause(t *testing.T) {
	t.Parallel()
	data := makeSafetensors(t, nil, u8("a", 4*mib))
	_, rt := testgpu.Sim(t, cudasim.Config{})
	for name, end := range map[string]func(context.Context) (context.Context, func()){
		"canceled": func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancelCause(ctx)
			return ctx, func() { cancel(errStop) }
		},
		"deadline": func(ctx context.Context) (context.Context, func()) {
			ctx = &endingContext{Context: ctx, done: make(chan struct{})}
			return ctx, func() { close(ctx.(*endingContext).done) }
		},
	} {
		for _, before := range []bool{true, false} {
			ctx, stop := end(t.Context())
			var reading atomic.Bool
			returned := make(chan struct{})
			f, err := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
				if reading.Swap(false) {
					stop()
					<-returned // else all bytes may be there before the end is seen
				}
				return bytes.NewReader(data).ReadAt(p, off)
			}), int64(len(data)), "file")
			require.NoError(t, err)
			a, _ := f.Tensor("a")
			memory := memoryOf(t, rt.Devices()[0], a.Size)
			if reading.Store(!before); before {
				stop()
			}
			err = weights.Place(ctx, []weights.Placement{{Part: a.Whole(), To: memory}}, weights.LoadOptions{})
			close(returned)
			require.ErrorIs(t, err, ctx.Err(), name)
			require.ErrorIs(t, err, context.Cause(ctx), name)
			require.ErrorContains(t, err, "weights: load")
			var failed *weights.LoadError
			require.Equal(t, !before, errors.As(err, &failed), name)
		}
	}
}

// An endingContext ends as one whose deadline is exceeded.
type endingContext struct {
	context.Context
	done chan struct{}
}

func (c *endingContext) Done() <-chan struct{} { return c.done }

func (c *endingContext) Err() error {
	select {
	case <-c.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// All devices are copied to at once: each one's read waits for the other one's.
func TestDevicesAreLoadedConcurrently(t *testing.T) {
	t.Parallel()
	data := makeSafetensors(t, nil, u8("a", mib), u8("b", mib))
	var first, second sync.WaitGroup
	first.Add(1)
	second.Add(1)
	firstBegins, secondBegins := sync.OnceFunc(first.Done), sync.OnceFunc(second.Done)
	middle := int64(maxInt)
	f, err := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
		switch {
		case middle == maxInt: // the header is read
		case off < middle:
			firstBegins()
			second.Wait()
		default:
			secondBegins()
			first.Wait()
		}
		return bytes.NewReader(data).ReadAt(p, off)
	}), int64(len(data)), "file")
	require.NoError(t, err)
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	b, _ := f.Tensor("b")
	middle = b.Offset
	place := func(t *weights.Tensor) int { return int(t.Name[0] - 'a') }
	plan, err := weights.NewPlan(f.Tensors(), place, weights.PlanOptions{})
	require.NoError(t, err)
	p := (&bench{}).planned(t, rt.Devices(), plan)
	require.NoError(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{}))
	assert.Equal(t, data[b.Offset:], onDevice(t, p.memory[1]))
}
