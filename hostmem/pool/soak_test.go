//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// TestSoak acquires and releases, copies and compares, from many goroutines,
// with random faults on the simulated GPU, for so many operations or as long as
// PINNED_SOAK says. None may ever find another's bytes, every error must be one that
// was injected, and at the end everything is unmapped.
func TestSoak(t *testing.T) {
	const workers = 16
	soakOperations := 150_000
	if testgpu.Race {
		soakOperations = 50_000
	}
	long := hostmemtest.SoakTime(0)
	g := newFixture(t)
	limit := 256 * mib
	if testgpu.Real() {
		limit = 2 << 30
	}
	before := hostmem.ReadStats()
	p, err := New(g.Dev, Options{MaxBytes: limit, IdleTime: 50 * time.Millisecond})
	require.NoError(t, err)

	var operations, failures, copies atomic.Int64
	begin := time.Now()
	progress := func() float64 {
		if long > 0 {
			return time.Since(begin).Seconds() / long.Seconds()
		}
		return max(float64(operations.Load())/float64(soakOperations), time.Since(begin).Minutes())
	}
	expected := func(err error) bool {
		if err == nil {
			return true
		}
		failures.Add(1)
		var call *cudart.Error
		return assert.False(t, testgpu.Real(), "%v", err) && assert.ErrorAs(t, err, &call, "an error that was not injected")
	}
	stop := make(chan struct{})
	var injecting sync.WaitGroup
	if g.Sim != nil {
		injecting.Go(func() { injectFaults(g.Sim, stop) })
	}

	var resident atomic.Int64 // after a quarter, when all is warm
	var working sync.WaitGroup
	for w := range workers {
		s, area := g.NewStream(), g.Device(64*kib)
		working.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(w)))
			for i := 0; progress() < 1; i++ {
				n := 1 + random.IntN(64*kib)
				if random.IntN(500) == 0 {
					n = 1 + random.IntN(4*mib)
				}
				var err error
				if random.IntN(100) == 0 {
					copies.Add(1)
					err = soakCopy(t, p, s, area, min(n, 64*kib), uint64(w)<<32|uint64(i))
				} else {
					err = soakLease(t, p, n, uint64(w)<<32|uint64(i))
				}
				if !expected(err) {
					return
				}
				operations.Add(1)
				if w == 0 && resident.Load() == 0 && progress() > 0.25 {
					resident.Store(int64(residentBytes(t)))
				}
			}
		})
	}
	working.Wait()
	close(stop)
	injecting.Wait()
	if g.Sim != nil {
		g.Sim.ResetFaults()
	}
	atEnd := residentBytes(t)
	require.NoError(t, g.Dev.Synchronize(context.Background()))
	if err := p.Close(); err != nil {
		require.NoError(t, p.Close(), "after %v", err)
	}
	debug.FreeOSMemory()
	st := p.Stats()
	t.Logf("%d operations, %d with copies, %d failed, %v; resident %d MiB after a quarter, %d MiB at the end, %d MiB after Close; %+v",
		operations.Load(), copies.Load(), failures.Load(), time.Since(begin).Round(time.Millisecond), resident.Load()>>20, atEnd>>20, residentBytes(t)>>20, st)
	assert.Equal(t, before.ReservedBytes, hostmem.ReadStats().ReservedBytes)
	assert.Zero(t, st.ReservedBytes)
	// The pool's own memory comes and goes; nothing else may grow.
	if hostmemtest.Emulated(t) {
		return // an emulator's own memory grows
	}
	assert.Less(t, int64(atEnd), resident.Load()+int64(st.PeakReservedBytes)+32*mib, "resident memory grew")
	if g.Sim != nil && long == 0 && time.Since(begin) < time.Minute {
		assert.Positive(t, failures.Load(), "no fault was met")
	}
}

// injectFaults makes a random call fail now and then.
func injectFaults(sim *cudasim.Sim, stop chan struct{}) {
	random := rand.New(rand.NewPCG(11, 13))
	calls := []string{"cudaHostRegister", "cudaHostUnregister", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaMemcpyAsync", "cudaStreamQuery"}
	codes := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrUnknown, cudart.ErrOperatingSystem}
	for {
		select {
		case <-stop:
			return
		case <-time.After(2 * time.Millisecond):
			sim.Fail(calls[random.IntN(len(calls))], cudasim.Fault{Nth: 1 + random.IntN(3), Code: codes[random.IntN(len(codes))]})
		}
	}
}

// soakLease marks both ends of a lease and finds its marks again.
func soakLease(t *testing.T, p *Pool, n int, mark uint64) error {
	l, err := p.Get(context.Background(), n)
	if err != nil {
		return err
	}
	b := l.Bytes()
	if n >= 16 {
		binary.NativeEndian.PutUint64(b, mark)
		binary.NativeEndian.PutUint64(b[n-8:], ^mark)
		if binary.NativeEndian.Uint64(b) != mark || binary.NativeEndian.Uint64(b[n-8:]) != ^mark {
			t.Errorf("a lease of %d bytes is another's too", n)
		}
	}
	return l.Release()
}

// soakCopy sends a lease's bytes to the device and back into another lease,
// releasing the first before the copy is done.
func soakCopy(t *testing.T, p *Pool, s *cudart.Stream, area cudart.DevPtr, n int, mark uint64) (err error) {
	up, err := p.Get(context.Background(), n)
	if err != nil {
		return err
	}
	b := up.Bytes()
	for i := range b {
		b[i] = byte(mark) + byte(i)*3
	}
	err = up.CopyToDevice(s, area, 0, n)
	if released := up.Release(); err == nil {
		err = released
	}
	if err != nil {
		return err
	}
	down, err := p.Get(context.Background(), n)
	if err != nil {
		return err
	}
	defer func() {
		if released := down.Release(); err == nil {
			err = released
		}
	}()
	if err := down.CopyFromDevice(s, area, 0, n); err != nil {
		return err
	}
	if err := s.Synchronize(context.Background()); err != nil {
		return err
	}
	for i, v := range down.Bytes() {
		if want := byte(mark) + byte(i)*3; v != want {
			t.Errorf("byte %d of %d came back as %#x, not %#x", i, n, v, want)
			return errors.New("wrong bytes")
		}
	}
	return nil
}
