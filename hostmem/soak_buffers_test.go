//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// Many goroutines make, use and close buffers, with random faults of CUDA and of the system on the
// simulated GPU, for a second or as long as PINNED_SOAK says. None may find another's bytes,
// every error must be one that was made, and resident memory stays flat.
func TestSoakBuffers(t *testing.T) {
	total := hostmemtest.SoakTime(time.Second)
	g := newFixture(t)
	before := ReadStats()
	sys := g.watch()
	var faults, met, cycles atomic.Int64
	errFault := errors.New("fault of the soak")
	sys.Calls = sys.Calls.Before(func(call string) error {
		// If unmapping fails while Alloc undoes its work, memory is leaked for good.
		if g.Sim == nil || call == "Unmap" || rand.IntN(300) != 0 {
			return nil
		}
		faults.Add(1)
		return fmt.Errorf("%w: %w", errFault, unix.ENOMEM)
	})
	// Before calls fail:
	streams := []*cudart.Stream{g.Stream, g.NewStream(), g.NewStream()}
	workers := 4 * runtime.GOMAXPROCS(0)
	const place = 4 * mib
	mem := g.Device(workers * place)
	require.NoError(t, g.Dev.Memset(mem, 0, workers*place))
	require.NoError(t, g.Dev.Synchronize(t.Context()))
	if g.Sim != nil {
		failAtRandom(g.Sim, &faults)
	}
	expected := func(err error) bool {
		met.Add(1)
		var code cudart.Code
		return g.Sim != nil && (errors.Is(err, errFault) || errors.As(err, &code))
	}
	insist := func(f func() error) {
		for err := f(); err != nil && assert.True(t, expected(err), "%v", err); err = f() {
		}
	}

	cycle := func(random *rand.Rand, place cudart.DevPtr) {
		n := 1 + random.IntN(100*kib)
		if random.IntN(16) == 0 {
			n = 1 + random.IntN(4*mib)
		}
		b, err := Alloc(sys.With(context.Background()), g.Dev, n, Options{Workers: random.IntN(3)})
		if err != nil {
			assert.True(t, expected(err), "%v", err)
			return
		}
		s := streams[random.IntN(len(streams))]
		insist(func() error { return b.CopyFromDevice(s, place, 0, n) })
		insist(func() error { return s.Synchronize(context.Background()) })
		assert.Zero(t, b.Bytes()[n-1], "what was left there")
		seed := byte(1 + random.IntN(255))
		for i := range b.Bytes() {
			b.Bytes()[i] = byte(i) ^ seed
		}
		insist(func() error { return b.CopyToDevice(s, place, 0, n) })
		insist(func() error { return s.Synchronize(context.Background()) })
		clear(b.Bytes())
		insist(func() error { return b.CopyFromDevice(s, place, 0, n) })
		insist(func() error { return s.Synchronize(context.Background()) })
		for i, v := range b.Bytes() {
			if v != byte(i)^seed {
				assert.Failf(t, "wrong byte", "%d of %d: %d, want %d", i, n, v, byte(i)^seed)
				break
			}
		}
		clear(b.Bytes())
		insist(func() error { return b.CopyToDevice(s, place, 0, n) })
		insist(b.Close) // with the copy under way
		cycles.Add(1)
	}

	run := func(d time.Duration) {
		until := time.Now().Add(d)
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), uint64(d)))
				for time.Now().Before(until) && !t.Failed() {
					cycle(random, mem+cudart.DevPtr(i*place))
				}
			})
		}
		wg.Wait()
		debug.FreeOSMemory()
	}
	run(total / 4)
	warm := residentBytes(t)
	run(total * 3 / 4)
	atEnd := residentBytes(t)
	if g.Sim != nil {
		g.Sim.OnCall(nil)
		g.Sim.ResetFaults()
		assert.Positive(t, faults.Load())
		assert.Zero(t, g.Registrations())
	}
	t.Logf("%d buffers, %d faults, %d errors; resident %d MiB when warm, %d MiB at the end",
		cycles.Load(), faults.Load(), met.Load(), warm>>20, atEnd>>20)
	requireIdle(t, before)
	assert.Zero(t, sys.Mapped.Load(), "bytes mapped")
	if !emulated(t) { // an emulator's own memory grows as it translates
		assert.Less(t, atEnd, warm+16*mib, "resident memory grew")
	}
}

// failAtRandom makes one call in 200 fail.
func failAtRandom(sim *cudasim.Sim, faults *atomic.Int64) {
	codes := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrNotSupported, cudart.ErrInvalidValue}
	var calls atomic.Int64
	sim.OnCall(func(fn string, _ int) {
		if fn == "cudaGetLastError" {
			return
		}
		if calls.Add(1)%5000 == 0 {
			sim.ResetFaults() // those that were met are kept otherwise
		}
		if rand.IntN(200) == 0 {
			faults.Add(1)
			sim.Fail(fn, cudasim.Fault{Code: codes[rand.IntN(len(codes))]})
		}
	})
}
