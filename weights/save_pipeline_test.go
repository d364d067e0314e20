package weights

import (
	"context"
	"crypto/rand"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Pieces have all bytes of the runs, in order, end at multiples of their size, and have host memory apart if asked.
func TestFilesAreCutIntoPieces(t *testing.T) {
	t.Parallel()
	dev := &cudart.Device{}
	f := &savedFile{}
	off := int64(4096)
	for _, run := range []struct {
		dev *cudart.Device
		n   int
	}{{dev, 100}, {nil, 30_000}, {nil, 7}, {dev, 50_000}, {nil, 1}, {dev, 5}, {dev, 4096}} {
		f.runs = append(f.runs, savedRun{device: run.dev, ptr: cudart.DevPtr(off), off: off, n: run.n})
		if last := &f.runs[len(f.runs)-1]; run.dev == nil {
			last.host = make([]byte, run.n)
		}
		off += int64(run.n)
	}
	for _, apart := range []bool{false, true} {
		at := int64(4096)
		for _, piece := range f.cut(8192, apart) {
			assert.Equal(t, piece[0].off/8192, (piece[len(piece)-1].end()-1)/8192)
			for _, r := range piece {
				require.Equal(t, at, r.off)
				at += int64(r.n)
				switch {
				case r.device == nil:
					assert.Len(t, r.host, r.n)
					assert.True(t, !apart || len(piece) == 1)
				default:
					assert.EqualValues(t, r.off, r.ptr, "neighbours in the file and in memory")
				}
			}
		}
		assert.Equal(t, off, at)
	}
}

// The second save from a device pins nothing. Two saves at once have a pool each, and one of the pools is kept. The pool of
// a save that fails is closed. Closing the runtime unmaps the memory of the pool that was kept.
func TestSavesUsePinnedMemoryAgain(t *testing.T) {
	t.Parallel()
	if testgpu.Real() {
		t.Skip("calls are counted on the simulated GPU")
	}
	sim, rt := testgpu.Sim(t, cudasim.Config{}) // which finds leaks at the end
	dev, err := rt.Device(0)
	require.NoError(t, err)
	const size = 1 << 20 // one lease
	ptr, err := dev.Malloc(size)
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Free(ptr)) }()
	tensors := []SavedTensor{{Name: "w", DType: U8, Shape: []int{size}, Memory: Memory{Device: dev, Ptr: ptr, Bytes: size}}}
	dir := t.TempDir()
	save := func(changed func(change) error) error {
		s := &Saving{path: filepath.Join(dir, rand.Text()+".safetensors"), changed: changed, o: SaveOptions{NoChecksums: true}} // whose list is pinned, too
		if err := s.begin(t.Context(), tensors); err != nil {
			return err
		}
		return s.Wait(t.Context())
	}
	calls := func() [2]int { return [2]int{sim.Calls("cudaHostRegister"), sim.Calls("cudaHostUnregister")} }
	require.NoError(t, save(nothing))
	assert.Equal(t, [2]int{1, 0}, calls())
	for range 3 {
		require.NoError(t, save(nothing))
	}
	assert.Equal(t, [2]int{1, 0}, calls(), "the same memory")

	var saves, writing sync.WaitGroup
	writing.Add(2)
	for range 2 {
		once := sync.OnceFunc(func() { writing.Done(); writing.Wait() })
		saves.Go(func() {
			assert.NoError(t, save(func(c change) error {
				if c.call == "write" {
					once()
				}
				return nil
			}))
		})
	}
	saves.Wait()
	assert.Equal(t, [2]int{2, 1}, calls(), "two saves at once")

	failed := errors.New("failed")
	require.ErrorIs(t, save(func(c change) error {
		if c.call == "write" {
			return failed
		}
		return nil
	}), failed)
	assert.Equal(t, [2]int{2, 2}, calls(), "a save that fails")
	require.NoError(t, save(nothing))
	assert.Equal(t, [2]int{3, 2}, calls())
	require.NoError(t, rt.Close())
	assert.Equal(t, [2]int{3, 3}, calls())
}

// A closer is a ring that is slow to close, and fails at first.
type closer struct {
	closing chan struct{}
	calls   int
}

func (c *closer) CloseContext(context.Context) error {
	c.closing <- struct{}{}
	<-c.closing
	if c.calls++; c.calls == 1 {
		return errors.New("failed")
	}
	return nil
}

// A load or save that begins while the runtime is closed does not get what that closes.
func TestIdleRingsThatAreClosed(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	var kept idle[*closer]
	first := &closer{closing: make(chan struct{})}
	require.NoError(t, kept.keep(t.Context(), false, dev, first))
	for _, fails := range []bool{true, false} {
		closed := make(chan error)
		go func() { closed <- rt.Close() }()
		<-first.closing
		other, err := kept.take(dev, func() (*closer, error) { return &closer{}, nil })
		require.NoError(t, err)
		assert.NotSame(t, first, other)
		first.closing <- struct{}{}
		assert.Equal(t, fails, <-closed != nil)
		if t.Failed() {
			return
		}
	}
	require.NoError(t, rt.Close())
	assert.Equal(t, 2, first.calls)
}
