//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A reuse is a loop that has one lease at a time, and waits until the GPU is idle
// before the next.
type reuse struct {
	name string
	// arm prepares a fault, if any.
	arm func(sim *cudasim.Sim)
	// round copies from the lease, releases it, and waits until the copy is done.
	round func(r *reuseFixture, l Lease)
}

type reuseFixture struct {
	*fixture
	fast          *cudart.Stream
	dst           cudart.DevPtr
	idle, streams int // operations that are pending when the fast streams have none; streams beside these
	ended         chan struct{}
}

// onOneStream copies on the same stream each time. The wait makes no call that queries
// for the pool's events.
func onOneStream(r *reuseFixture, l Lease) {
	queueCopy(r, l, r.fast, r.dst, 64)
	require.NoError(r, l.Release())
	require.NoError(r, r.fast.LaunchHostFunc(func() { r.ended <- struct{}{} }))
	<-r.ended
}

func onANewStream(end func(r *reuseFixture, l Lease, s *cudart.Stream)) func(r *reuseFixture, l Lease) {
	return func(r *reuseFixture, l Lease) {
		s, err := r.Dev.NewStream(cudart.StreamOptions{})
		require.NoError(r, err)
		queueCopy(r, l, s, r.dst, 64)
		end(r, l, s)
		eventually(r, "the copy is done", func() bool { return r.Sim.Outstanding().PendingOps <= r.idle })
	}
}

// However many streams are busy, whichever call fails, and also if the stream is
// closed or lost, one lease at a time needs a handful of blocks: those that are done are found.
// Not parallel, because it sets GOMAXPROCS.
func TestOneLeaseAtATimeUsesFewBlocks(t *testing.T) {
	rounds, processors, busy := 60, []int{2, 1, 8, 16}, []int{8, 0, 1, 32, 64}
	if hostmemtest.Soak() {
		rounds = 200
	}
	loops := []reuse{{name: "no fault", round: onOneStream}}
	for _, fn := range []string{"cudaEventRecord", "cudaEventQuery", "cudaEventCreateWithFlags"} {
		for _, nth := range []int{1, 2, 40} {
			loops = append(loops, reuse{
				name:  fmt.Sprintf("%s #%d fails", fn, nth),
				round: onOneStream,
				arm: func(sim *cudasim.Sim) {
					sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrUnknown})
				},
			})
		}
	}
	loops = append(loops,
		reuse{name: "stream closed before the release", round: onANewStream(func(r *reuseFixture, l Lease, s *cudart.Stream) {
			require.NoError(r, s.Close())
			require.NoError(r, l.Release())
		})},
		reuse{name: "stream closed after the release", round: onANewStream(func(r *reuseFixture, l Lease, s *cudart.Stream) {
			require.NoError(r, l.Release())
			require.NoError(r, s.Close())
		})},
		reuse{name: "stream lost before the release", round: onANewStream(func(r *reuseFixture, l Lease, s *cudart.Stream) {
			runtime.KeepAlive(s)
			s = nil
			runtime.GC()
			require.NoError(r, l.Release())
			eventually(r, "the stream is collected", func() bool { runtime.GC(); return r.Sim.Outstanding().Streams == r.streams })
		})},
		reuse{name: "stream lost after the release", round: onANewStream(func(r *reuseFixture, l Lease, s *cudart.Stream) {
			require.NoError(r, l.Release())
		})},
	)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	var table strings.Builder
	for _, loop := range loops {
		rounds := rounds
		switch {
		case strings.HasPrefix(loop.name, "stream lost before"):
			rounds /= 20 // a garbage collection each
		case loop.name != "no fault":
			rounds /= 2
		}
		for i, n := range processors {
			runtime.GOMAXPROCS(n)
			fmt.Fprintf(&table, "\n%-36s %2d processors:", loop.name, n)
			for j, streams := range busy {
				// Every fault, and every number of processors and of streams without one.
				if !hostmemtest.Soak() && i+j > 0 && (loop.arm != nil || strings.HasPrefix(loop.name, "stream") || i*j > 0) {
					continue
				}
				made := blocksMade(t, loop, rounds, streams)
				fmt.Fprintf(&table, " %3d beside %d", made, streams)
				assert.LessOrEqual(t, made, 8, "%s, %d processors, %d busy streams: blocks made in %d rounds", loop.name, n, streams, rounds)
			}
		}
	}
	t.Logf("blocks made, beside those of busy streams:%s", &table)
}

// blocksMade returns how many blocks a loop has needed, beside those of the busy
// streams.
func blocksMade(t *testing.T, loop reuse, rounds, busy int) (made int) {
	t.Run("", func(t *testing.T) {
		const n = 4 * mib
		r := &reuseFixture{fixture: newSimFixture(t, cudasim.Config{}), ended: make(chan struct{})}
		r.fast, r.dst = r.Stream, r.Device(64)
		sys := hostmemtest.NewSystem()
		sys.Unpopulated()
		// It cannot end, so the pool queries on this goroutine: on a machine with more to do, an
		// answer of another one can take longer than the pool waits for it.
		ctx := context.WithoutCancel(sys.Context(t))
		p, err := New(r.Dev, Options{IdleTime: -1, Buffer: hostmem.Options{HugePages: hostmem.HugePagesNever}})
		require.NoError(t, err)
		get := func() Lease {
			l, err := p.Get(ctx, n)
			require.NoError(t, err)
			return l
		}
		if loop.arm != nil {
			loop.arm(r.Sim)
		}
		var open []func()
		var leases []Lease
		for range busy {
			s := r.NewStream()
			open = append(open, r.Stall(s))
			l := get()
			queueCopy(t, l, s, r.dst, 64)
			leases = append(leases, l)
		}
		for _, l := range leases {
			require.NoError(t, l.Release())
		}
		r.idle, r.streams = r.Sim.Outstanding().PendingOps, 1+busy
		for range rounds {
			loop.round(r, get())
		}
		made = p.Stats().Misses - busy
		for _, f := range open {
			f()
		}
		r.Sim.ResetFaults()
		require.NoError(t, p.Close())
		requireEmpty(t, p)
		eventually(t, "all is done, and lost streams are collected", func() bool {
			left := r.Sim.Outstanding()
			if left.Streams > r.streams {
				runtime.GC()
			}
			return left.PendingOps == 0 && left.Streams == r.streams
		})
	})
	return made
}

// The same on a real GPU. The loop sees that a copy is done by what a later one writes
// into host memory, so that no call finds the pool's events done before it queries them. CUDA
// maps streams onto 8 queues unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise, and a
// stream that waits holds up the others of its queue, so there are few busy ones.
func TestOneLeaseAtATimeOnARealGPU(t *testing.T) {
	if !testgpu.Real() {
		t.Skip("needs PINNED_TEST_GPU=1: the simulated form is TestOneLeaseAtATimeUsesFewBlocks")
	}
	const rounds, n = 2000, 4 * mib
	ctx := t.Context()
	r := newFixture(t)
	dst := r.Device(64)
	host, err := hostmem.Alloc(ctx, r.Dev, 4096, hostmem.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, host.Close()) }()
	seen := (*uint32)(unsafe.Pointer(unsafe.SliceData(host.Bytes())))
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	var table strings.Builder
	defer func() { t.Logf("blocks made in %d rounds, beside those of busy streams:%s", rounds, &table) }()
	for _, processors := range []int{1, 2, 8, 16} {
		runtime.GOMAXPROCS(processors)
		fmt.Fprintf(&table, "\n%2d processors:", processors)
		for _, busy := range []int{0, 1, 2, 3} {
			p, err := New(r.Dev, Options{IdleTime: -1})
			require.NoError(t, err)
			// One stream waits for a channel, the busy ones for that stream. While it does,
			// cudaStreamCreate may block, so all is made before.
			stalled, s := r.NewStream(), r.NewStream()
			var streams []*cudart.Stream
			var leases []Lease
			for range busy {
				streams, leases = append(streams, r.NewStream()), append(leases, get(t, p, n))
			}
			first := get(t, p, n)
			open := r.Stall(stalled)
			end := stalled.Point()
			for i, l := range leases {
				require.NoError(t, streams[i].WaitPoint(end))
				queueCopy(t, l, streams[i], dst, 64)
				require.NoError(t, l.Release())
			}
			require.NoError(t, first.Release())
			began := time.Now()
			for i := range rounds {
				l := get(t, p, n)
				queueCopy(t, l, s, dst, 64)
				require.NoError(t, l.Release())
				value := byte(i%255 + 1)
				require.NoError(t, s.Memset(dst, value, 4))
				require.NoError(t, host.CopyFromDevice(s, dst, 0, 4))
				for atomic.LoadUint32(seen) != 0x01010101*uint32(value) {
					if time.Since(began) > 20*time.Second {
						open() // else nothing ends
						require.FailNow(t, "the copies take long", "%d processors, %d busy streams, round %d", processors, busy, i)
					}
				}
			}
			made := p.Stats().Misses - busy
			fmt.Fprintf(&table, " %3d beside %d", made, busy)
			assert.LessOrEqual(t, made, 4, "%d processors, %d busy streams: blocks made in %d rounds", processors, busy, rounds)
			open()
			require.NoError(t, p.Close())
		}
	}
}
