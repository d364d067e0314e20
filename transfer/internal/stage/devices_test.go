package stage

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// filling is memory of which a test sees each piece.
type filling struct {
	memory
	fill func(off int)
}

func (f *filling) Take(off, n int) Part {
	s := f.memory.Take(off, n)
	into := s.Copy
	s.Copy = func(to []byte, off int) error {
		f.fill(off)
		return into(to, off)
	}
	return s
}

// twoDevices are stages of two simulated devices, with workers of their own: on one
// NUMA node, or on one each.
func twoDevices(t *testing.T, procs, nodes int) (list []*Stage, mems []cudart.DevPtr) {
	t.Helper()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	copying := newConcurrency(procs)
	c := newWorkerPool(procs, cores{}, copying)
	for i, dev := range rt.Devices() {
		s, err := Acquire(t.Context(), dev)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Release(context.Background())) })
		if i > 0 && nodes > 1 {
			c = newWorkerPool(procs, cores{}, copying)
		}
		s.workers = c
		list, mems = append(list, s), append(mems, device(t, dev, 24*mib))
	}
	return list, mems
}

// begun is how many workers there are.
func (p *workerPool) begun() int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// uploadTo uploads src, of which fill sees each piece.
func uploadTo(t *testing.T, s *Stage, mem cudart.DevPtr, src []byte, fill func(off int)) {
	feed := &filling{memory: memory{mem: src}, fill: fill}
	_, err := s.Run(t.Context(), Copy{N: len(src), Host: feed, Queue: func(on *cudart.Stream, _ int, from []byte, off int) error {
		return on.CopyToDevice(mem+cudart.DevPtr(off), unsafe.Pointer(&from[0]), len(from))
	}})
	assert.NoError(t, err)
	back := make([]byte, len(src))
	_, err = download(t.Context(), s, back, mem)
	assert.NoError(t, err)
	assert.True(t, bytes.Equal(src, back))
}

// Two devices' copies go on side by side without any helpers: each waits for the
// other one at every MiB.
func TestTwoDevicesCopyWithoutWorkers(t *testing.T) {
	t.Parallel()
	list, mems := twoDevices(t, 1, 1)
	const n = 20 * mib
	var mu sync.Mutex
	moved := sync.NewCond(&mu)
	var at [2]int // MiB
	var all sync.WaitGroup
	for i, s := range list {
		all.Go(func() {
			uploadTo(t, s, mems[i], random(n, uint64(i)), func(off int) {
				mu.Lock()
				defer mu.Unlock()
				at[i] = max(at[i], off/mib)
				moved.Broadcast()
				for at[1-i] < at[i]-1 {
					moved.Wait()
				}
			})
		})
	}
	all.Wait()
	require.Equal(t, [2]int{n/mib - 1, n/mib - 1}, at)
	require.Zero(t, list[0].workers.begun())
}

// Copies of several devices share the workers of the process, whatever the NUMA
// node: no more of them copy at once than there are to be, beside the jobs' own
// goroutines.
func TestTwoDevicesShareWorkers(t *testing.T) {
	t.Parallel()
	for nodes := 1; nodes <= 2; nodes++ {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			t.Parallel()
			const procs, jobs, n = 3, 2, 20 * mib
			list, mems := twoDevices(t, procs, nodes)
			var copying, maxN atomic.Int32
			enough := make(chan struct{}) // closed when a helper has come
			var once sync.Once
			fill := func(int) {
				now := copying.Add(1)
				defer copying.Add(-1)
				for before := maxN.Load(); now > before && !maxN.CompareAndSwap(before, now); {
					before = maxN.Load()
				}
				if now == procs {
					once.Do(func() { close(enough) })
				}
				<-enough
			}
			var all sync.WaitGroup
			for i, s := range list {
				all.Go(func() { uploadTo(t, s, mems[i], random(n, uint64(i)), fill) })
			}
			all.Wait()
			require.LessOrEqual(t, maxN.Load(), int32(procs+jobs))
			for _, s := range list {
				require.LessOrEqual(t, s.workers.begun(), int32(procs))
				for s.workers.copying.Load() > 0 { // a worker is about to look for more
					runtime.Gosched()
				}
			}
		})
	}
}

// No more goroutines copy than the limit says, also when they begin at once.
func TestConcurrencyIsLimited(t *testing.T) {
	t.Parallel()
	s := newConcurrency(4)
	var all sync.WaitGroup
	var got, maxN atomic.Int32
	for range 8 {
		all.Go(func() {
			for range 2000 {
				if !s.TryBegin(s.max) {
					continue
				}
				now := got.Add(1)
				for before := maxN.Load(); now > before && !maxN.CompareAndSwap(before, now); {
					before = maxN.Load()
				}
				got.Add(-1)
				s.Add(-1)
			}
		})
	}
	all.Wait()
	require.LessOrEqual(t, maxN.Load(), int32(4))
	require.EqualValues(t, 4, s.free())
	for range 4 {
		require.False(t, (&workerPool{copying: s}).saturated())
		require.True(t, s.TryBegin(s.max))
	}
	require.False(t, s.TryBegin(s.max))
	require.True(t, (&workerPool{copying: s}).saturated())
}
