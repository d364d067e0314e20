package weights_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// One call loads a model, one gives a tensor's address, and Close frees the memory.
func TestLoadModelGivesAddressesByName(t *testing.T) {
	dev := devicesOf(t, 1)[0]
	path := filepath.Join(t.TempDir(), "m.safetensors")
	specs := specsOf("")
	file := makeSafetensors(t, nil, specs...)
	require.NoError(t, os.WriteFile(path, file, 0o600))
	l, err := weights.LoadModel(t.Context(), dev, path, weights.LoadOptions{})
	require.NoError(t, err)
	n := 0
	for p := range l.All() {
		at, err := l.Ptr(p.Tensor.Name)
		require.NoError(t, err)
		same, err := p.Ptr()
		require.NoError(t, err)
		require.Equal(t, same, at)
		require.Equal(t, dev, p.Memory.Device())
		got := make([]byte, p.Size)
		if p.Size > 0 {
			require.NoError(t, dev.CopyToHost(unsafe.Pointer(&got[0]), at, p.Size))
		}
		require.Equal(t, file[p.Tensor.Offset:][:p.Size], got, p.Tensor.Name)
		n++
	}
	require.Equal(t, len(specs), n)
	_, err = l.Ptr("no such tensor")
	require.ErrorIs(t, err, cudart.ErrInvalidValue)
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	_, err = l.Ptr("embed")
	require.ErrorIs(t, err, cudart.ErrClosed)

	_, err = weights.LoadModel(t.Context(), dev, filepath.Join(t.TempDir(), "none"), weights.LoadOptions{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Of a tensor that is split or replicated there are parts, and no single address.
func TestPartsOfATensorOnSeveralDevices(t *testing.T) {
	devs := devicesOf(t, 2)
	if len(devs) < 2 {
		t.Skip("needs two GPUs")
	}
	f := mustParse(t, makeSafetensors(t, nil, u8("split", 10), u8("both", 4), u8("one", 3)), "f")
	split, _ := f.Tensor("split")
	both, _ := f.Tensor("both")
	one, _ := f.Tensor("one")
	head, err := split.Rows(0, 6)
	require.NoError(t, err)
	tail, err := split.Rows(6, 10)
	require.NoError(t, err)
	plan, err := weights.PlanShares([]weights.Share{{head, 0}, {tail, 1}, {both.Whole(), 0}, {both.Whole(), 1}, {one.Whole(), 1}}, weights.PlanOptions{})
	require.NoError(t, err)
	l, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	for name, want := range map[string][]weights.Part{"split": {head, tail}, "both": {both.Whole(), both.Whole()}, "one": {one.Whole()}, "none": nil} {
		var got []weights.Part
		for _, p := range l.Parts(name) {
			got = append(got, p.Part)
		}
		require.Equal(t, want, got, name)
		_, err := l.Ptr(name)
		require.Equal(t, name != "one", errors.Is(err, cudart.ErrInvalidValue), name)
	}
	require.Equal(t, devs[1], l.Parts("one")[0].Memory.Device())
}

// Memory of a load that fails is freed, and a cudaMalloc that never returns holds up no load past
// its context.
func TestLoadNewFreesWhatItAllocated(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}) // which finds leaks at the end
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 1000), u8("b", 1000)), "f")
	plan, err := weights.NewPlan(f.Tensors(), func(t *weights.Tensor) int { return int(t.Name[0] - 'a') }, weights.PlanOptions{})
	require.NoError(t, err)
	sim.Fail("cudaMalloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation, Nth: 2})
	_, err = plan.LoadNew(t.Context(), rt.Devices(), weights.LoadOptions{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	sim.ResetFaults()

	_, err = plan.LoadNew(t.Context(), rt.Devices()[:1], weights.LoadOptions{})
	require.ErrorContains(t, err, "weights: load: the plan has device 1, of 1 devices")

	unblock := sim.Block("cudaMalloc", cudasim.Fault{})
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the cause")
	over := make(chan error)
	go func() {
		_, err := plan.LoadNew(ctx, rt.Devices(), weights.LoadOptions{})
		over <- err
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMalloc", 1))
	cancel(cause)
	err = <-over
	for _, want := range []error{context.Canceled, cause, bounded.ErrStuck} {
		assert.ErrorIs(t, err, want)
	}
	unblock()
	for sim.Calls("cudaFree") < 2 { // of the first failure, and of this one
	}
}

// Memory that an abandoned copy may still write to is not freed, and the caller can free it later.
func TestLoadNewReturnsMemoryThatIsInUse(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{}) // which finds leaks at the end
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 1000)), "f")
	plan, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{})
	require.NoError(t, err)
	unblock := sim.Block("cudaMemcpyAsync", cudasim.Fault{Nth: 1, Times: 1})
	ctx, cancel := context.WithCancel(t.Context())
	type result struct {
		loaded *weights.Loaded
		err    error
	}
	over := make(chan result, 1)
	go func() {
		l, err := plan.LoadNew(ctx, rt.Devices(), weights.LoadOptions{})
		over <- result{l, err}
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
	cancel()
	r := <-over
	require.ErrorIs(t, r.err, transfer.ErrUnderWay)
	require.NotNil(t, r.loaded)
	require.Zero(t, sim.Calls("cudaFree"))
	_, err = r.loaded.Ptr("a")
	require.NoError(t, err)
	unblock()
	require.Eventually(t, func() bool { // what could not be released is by the next loads
		l, err := plan.LoadNew(t.Context(), rt.Devices(), weights.LoadOptions{})
		return err == nil && l.Close() == nil && sim.Outstanding().Registrations == 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, r.loaded.Close())
}
