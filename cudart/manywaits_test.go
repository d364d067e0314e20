//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Many waiting goroutines must occupy neither threads nor a core.
func TestManyWaitsShareThreads(t *testing.T) {
	const streams, goroutines = 100, 1000
	dev := testgpu.Device(t)
	var all []*cudart.Stream
	const n = 64 << 20
	mem, host := device(t, dev, n), pinned(t, dev, n)
	for range streams {
		all = append(all, stream(t, dev))
	}
	copies := 8 // 800 copies of 64 MiB are a second of work for 55 GB/s
	if !testgpu.Real() {
		copies = 1
	}
	for _, s := range all {
		for range copies {
			require.NoError(t, s.CopyToHost(pointer(host), mem, n))
		}
	}
	threads := func() int {
		list, err := os.ReadDir("/proc/self/task")
		require.NoError(t, err)
		return len(list)
	}
	before, cpu, begin := threads(), hostos.CPUTime(), time.Now()
	var wg sync.WaitGroup
	for i := range goroutines {
		wg.Go(func() { assert.NoError(t, all[i%streams].Synchronize(context.Background())) })
	}
	maximum := before
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		case <-time.After(5 * time.Millisecond):
			maximum = max(maximum, threads())
		}
	}
	took := time.Since(begin)
	cores := (hostos.CPUTime() - cpu).Seconds() / took.Seconds()
	t.Logf("%d goroutines waited %v for %d streams: %d threads more, %.2f cores", goroutines, took, streams, maximum-before, cores)
	if testgpu.Real() { // the simulated library uses threads and cores of this process itself
		assert.LessOrEqual(t, maximum-before, max(20, runtime.GOMAXPROCS(0)), "threads beyond those that were there")
		assert.Less(t, cores, 1.0)
	}
}

// The cost of waiting itself, with a GPU that does nothing.
func TestWaitingCostsLittle(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	mem, host := device(t, dev, 64), pinned(t, dev, 64)
	sim.Hold()
	var wg sync.WaitGroup
	for range 20 {
		s := stream(t, dev)
		require.NoError(t, s.CopyToHost(pointer(host), mem, 64))
		for range 10 {
			wg.Go(func() { assert.NoError(t, s.Synchronize(context.Background())) })
		}
	}
	require.Eventually(t, func() bool { return rt.Waiting() == 200 }, 10*time.Second, time.Millisecond)
	time.Sleep(100 * time.Millisecond) // the older the waits, the rarer they are asked for
	cpu, begin := hostos.CPUTime(), time.Now()
	time.Sleep(200 * time.Millisecond)
	cores := (hostos.CPUTime() - cpu).Seconds() / time.Since(begin).Seconds()
	sim.Release()
	wg.Wait()
	assert.Less(t, cores, 0.75, "cores used by 200 waits on 20 streams")
}
