package weights_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// newPool makes a pool whose memory is all returned at the end of the test.
func newPool(t *testing.T, dev *cudart.Device, o pool.Options) *pool.Pool {
	t.Helper()
	p, err := pool.New(dev, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.Empty(t, p.Outstanding())
		require.NoError(t, p.Close())
	})
	return p
}

// A snapshot has the tensors as they were when Save returned.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	for _, o := range []weights.SaveOptions{{}, {DirectIO: true}, {ShardBytes: 2 * mib}, {NoChecksums: true}} {
		s := newToSave(t, devs)
		p := newPool(t, devs[0], pool.Options{})
		o.Snapshot = p
		dir := t.TempDir()
		saving, err := weights.Save(t.Context(), filepath.Join(dir, "model.safetensors"), s.tensors, o)
		require.NoError(t, err)
		for _, tensor := range s.tensors { // which may change now
			if m := tensor.Memory; m.Device != nil && m.Bytes > 0 {
				require.NoError(t, m.Device.Memset(m.Ptr, 0xee, m.Bytes))
			}
		}
		require.NoError(t, saving.Wait(t.Context()))
		require.NoError(t, saving.Wait(t.Context()))
		s.check(t, dir)
		if !o.NoChecksums {
			require.NoError(t, weights.Verify(t.Context(), dir))
		}
		assert.Zero(t, p.Stats().InUseBytes)
	}
}

// A pool that has less memory than the tensors is enough.
func TestSnapshotThroughLittleMemory(t *testing.T) {
	t.Parallel()
	dev := devicesOf(t, 1)[0]
	const size = 80 * mib
	m := memoryOf(t, dev, size)
	require.NoError(t, dev.Memset(m.Ptr, 0x17, size))
	require.NoError(t, dev.Synchronize(t.Context()))
	p := newPool(t, dev, pool.Options{MaxBytes: 32 * mib})
	path := filepath.Join(t.TempDir(), "m.safetensors")
	var last atomic.Int64
	tensors := []weights.SavedTensor{{Name: "w", DType: weights.U8, Shape: []int{size}, Memory: m}}
	o := weights.SaveOptions{Snapshot: p, Progress: func(done, total int) {
		assert.Equal(t, size, total)
		last.Store(int64(done))
	}}
	require.NoError(t, save(t.Context(), path, tensors, o))
	assert.Equal(t, int64(size), last.Load())
	assert.LessOrEqual(t, p.Stats().PeakReservedBytes, 32*mib)
	require.NoError(t, weights.Verify(t.Context(), path))

	small := newPool(t, dev, pool.Options{MaxBytes: 8 * mib})
	before, err := os.Stat(path)
	require.NoError(t, err)
	err = save(t.Context(), path, tensors, weights.SaveOptions{Snapshot: small})
	require.ErrorContains(t, err, `tensor "w"`)
	now, err := os.Stat(path)
	require.NoError(t, err)
	assert.True(t, os.SameFile(before, now), "the model before")
}

// What goes on behind a snapshot ends with the context, and leaves the model before.
func TestSnapshotsEnd(t *testing.T) {
	t.Parallel()
	dev := devicesOf(t, 1)[0]
	s := newToSave(t, []*cudart.Device{dev})
	p := newPool(t, dev, pool.Options{})
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")

	ctx, cancel := context.WithCancel(t.Context())
	reached := make(chan struct{})
	saving, err := weights.Save(ctx, path, s.tensors, weights.SaveOptions{Snapshot: p, Progress: func(int, int) {
		select {
		case <-reached:
		default:
			close(reached)
		}
		<-ctx.Done() // so that the save has not ended
	}})
	require.NoError(t, err)
	<-reached
	ended, end := context.WithCancel(t.Context())
	end()
	err = saving.Wait(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "wait: ")
	cancel()
	require.ErrorIs(t, saving.Wait(t.Context()), context.Canceled)
	assert.Empty(t, filesOf(t, dir))
	assert.Zero(t, p.Stats().InUseBytes)

	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{Snapshot: p}))
	s.check(t, path)
	require.NoError(t, p.Close())
	err = save(t.Context(), path, s.tensors, weights.SaveOptions{Snapshot: p})
	require.ErrorIs(t, err, cudart.ErrClosed)
	s.check(t, path)
	var none *weights.Saving
	require.ErrorContains(t, none.Wait(t.Context()), "not made by Save")
}

// The pool may be closed while a save writes from its memory, and the devices may be closed after Save has returned.
func TestSnapshotsOutliveTheirPool(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("closes the Runtime of the test")
	}
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	s := newToSave(t, []*cudart.Device{dev})
	p, err := pool.New(dev, pool.Options{})
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	hold, reached := make(chan struct{}), make(chan struct{})
	saving, err := weights.Save(t.Context(), path, s.tensors, weights.SaveOptions{Snapshot: p, Progress: func(int, int) {
		select {
		case <-reached:
		default:
			close(reached)
			<-hold
		}
	}})
	require.NoError(t, err)
	<-reached
	err = p.Close()
	require.True(t, err == nil || errors.Is(err, cudart.ErrInUse), "%v", err)
	close(hold)
	require.NoError(t, saving.Wait(t.Context()))
	s.check(t, path)
	require.NoError(t, p.Close())
}

// CUDA that fails at any call of a snapshot leaves the model before, and all memory returned.
func TestSnapshotsThatFail(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls fail on the simulated GPU alone")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	s := newToSave(t, []*cudart.Device{dev})
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")
	require.NoError(t, save(t.Context(), path, s.tensors, weights.SaveOptions{}))
	p := newPool(t, dev, pool.Options{})
	failed := 0
	for at := int64(1); at <= 41; at += 4 {
		var calls atomic.Int64
		sim.OnCall(func(fn string, _ int) {
			used := strings.HasPrefix(fn, "cudaMemcpy") || fn == "cudaHostRegister" || fn == "cudaPointerGetAttributes" // by every save
			if used && calls.Add(1) == at {
				sim.Fail(fn, cudasim.Fault{Code: cudart.ErrLaunchFailure})
			}
		})
		err := save(t.Context(), path, s.tensors, weights.SaveOptions{Snapshot: p})
		sim.OnCall(nil)
		sim.ResetFaults()
		if err != nil {
			failed++
			require.ErrorIs(t, err, cudart.ErrLaunchFailure)
			require.Equal(t, []string{"m.safetensors"}, filesOf(t, dir))
		}
		s.check(t, path)
		assert.Zero(t, p.Stats().InUseBytes)
	}
	assert.Positive(t, failed)
}

// Memory to which an abandoned copy may still write is returned by a later save.
func TestSnapshotsKeepMemoryThatIsInUse(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls block on the simulated GPU alone")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	tensors := []weights.SavedTensor{{Name: "w", DType: weights.U8, Shape: []int{4 * mib}, Memory: memoryOf(t, dev, 4*mib)}}
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")
	p := newPool(t, dev, pool.Options{})
	unblock := sim.Block("cudaMemcpyAsync", cudasim.Fault{Nth: 1, Times: 1})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- save(ctx, path, tensors, weights.SaveOptions{Snapshot: p}) }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
	cancel()
	err := <-ended
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, transfer.ErrUnderWay)
	assert.Empty(t, filesOf(t, dir))
	assert.Len(t, p.Outstanding(), 1, "the copy is under way")
	unblock()
	require.Eventually(t, func() bool {
		return save(t.Context(), path, tensors, weights.SaveOptions{Snapshot: p}) == nil && len(p.Outstanding()) == 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, weights.Verify(t.Context(), path))
}
