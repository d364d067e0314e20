package stage

import (
	"bytes"
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

// A watched Host makes its job known when it starts.
type watched struct {
	Host
	job chan<- *Job
}

func (w watched) Start(j *Job) {
	w.Host.Start(j)
	w.job <- j
}

// While the goroutine of a download is at a piece, another one drains all else.
func TestAWorkerDrivesForTheJob(t *testing.T) {
	t.Parallel()
	t.Run("once", func(t *testing.T) {
		drainBesideTheJob(t, func(_ *Stage, j *Job) { j.tryDrive() })
	})
	t.Run("while it stays", func(t *testing.T) {
		if runtime.GOMAXPROCS(0) == 1 {
			t.Skip("one processor: no worker stays")
		}
		drainBesideTheJob(t, func(s *Stage, j *Job) { s.workers.awaitPiece(j) })
	})
}

func drainBesideTheJob(t *testing.T, drive func(s *Stage, j *Job)) {
	// The last piece of a chunk is done before the next chunk lands: who did it finds nothing.
	slow := cudasim.Speed{Rate: 1}
	s, _ := simulated(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{DeviceToHost: slow}}}})
	s.workers = newWorkerPool(4, cores{}, newConcurrency(4)) // of its own: others copy too
	const n = 64 * mib                                       // more than the ring holds
	mem := device(t, s.dev, n)
	want, back := random(n, 1), make([]byte, n)
	_, err := upload(t.Context(), s, mem, want)
	require.NoError(t, err)

	busy, free := make(chan struct{}), make(chan struct{})
	var pieces, drained atomic.Int64
	drain := func(from []byte, off int) error {
		if pieces.Add(1) == 1 { // the job's own, as there are no workers
			close(busy)
			<-free
		}
		copy(back[off:], from)
		drained.Add(int64(len(from)))
		return nil
	}
	jobs := make(chan *Job, 1)
	over := make(chan error, 1)
	go func() {
		_, err := s.Run(context.Background(), Copy{N: n, Down: true, Host: watched{Memory(drain), jobs}, Queue: queueDown(mem), Workers: 1})
		over <- err
	}()
	j := <-jobs
	<-busy
	first := int64(pieceSize(minChunk))
	for begin := time.Now(); drained.Load() < n-first; runtime.Gosched() {
		drive(s, j)
		j.copyPiece()
		if !assert.Less(t, time.Since(begin), time.Minute, "%d bytes drained", drained.Load()) {
			break
		}
	}
	assert.Empty(t, over, "the job's own piece is not done")
	close(free)
	require.NoError(t, <-over)
	require.True(t, bytes.Equal(want, back))
	j.tryDrive() // has no effect any more
	require.Zero(t, s.ring.inUse())
}

// Goroutines that drive at any time leave copies what they are, whether they succeed,
// fail or are canceled.
func TestWorkersDriveConcurrently(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	s.workers = newWorkerPool(4, cores{}, newConcurrency(4)) // of its own: others copy too
	const maxN = 24 * mib
	mem := device(t, s.dev, maxN)
	r := rand.New(rand.NewPCG(5, 6))
	for round := range 60 {
		n := MaxSmall + 1 + r.IntN(maxN-MaxSmall)
		want, back := random(n, uint64(round)), make([]byte, n)
		at := n // of an error
		if r.IntN(3) == 0 {
			at = r.IntN(n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		if r.IntN(3) == 0 {
			time.AfterFunc(time.Duration(r.IntN(3000))*time.Microsecond, cancel)
		}
		fails := func(off, n int) error {
			if off <= at && at < off+n {
				return errTest
			}
			return nil
		}
		fill := func(to []byte, off int) error {
			copy(to, want[off:])
			return fails(off, len(to))
		}
		drain := func(from []byte, off int) error {
			copy(back[off:], from)
			return fails(off, len(from))
		}
		jobs := make(chan *Job, 1)
		workers := r.IntN(4)
		up := Copy{N: n, Host: watched{Memory(fill), jobs}, Queue: queueUp(mem), Workers: workers}
		down := Copy{N: n, Down: true, Host: watched{Memory(drain), jobs}, Queue: queueDown(mem), Workers: workers}
		whole := true
		for _, c := range []Copy{up, down} {
			stop := make(chan struct{})
			var others sync.WaitGroup
			for range 3 {
				others.Go(func() {
					var j *Job
					select {
					case j = <-jobs:
						jobs <- j
					case <-stop:
						return
					}
					for {
						select {
						case <-stop:
							return
						default:
							j.tryDrive()
							runtime.Gosched()
						}
					}
				})
			}
			done, err := s.Run(ctx, c)
			close(stop)
			others.Wait()
			if len(jobs) > 0 {
				<-jobs
			}
			switch {
			case err == nil:
				require.Equal(t, n, done)
				require.Equal(t, n, at)
			case ctx.Err() == nil:
				require.ErrorIs(t, err, errTest)
				require.LessOrEqual(t, done, at)
			}
			whole = whole && err == nil
		}
		cancel()
		if whole {
			require.True(t, bytes.Equal(want, back), "%d bytes", n)
		}
	}
	require.Eventually(t, func() bool {
		s.ring.mu.Lock()
		s.ring.poll()
		s.ring.mu.Unlock()
		return s.ring.inUse() == 0 && s.workers.copying.Load() == 0
	}, 10*time.Second, time.Millisecond)
}

// Workers do not spin for a job that waits for its reader, but after one that has ended.
func TestWorkersSleepWhileTheReaderIsSlow(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	p := newWorkerPool(4, cores{}, newConcurrency(4))
	s.workers = p // of its own: others copy too
	const n = 4 * mib
	mem := device(t, s.dev, n)
	assert.False(t, p.stalled())
	feed := &halves{memory: memory{mem: random(n, 3)}}
	feed.half.Store(n / 2)
	jobs := make(chan *Job, 1)
	over := make(chan error, 1)
	go func() {
		_, err := s.Run(context.Background(), Copy{N: n, Host: watched{feed, jobs}, Queue: queueUp(mem)})
		over <- err
	}()
	j := <-jobs
	require.Eventually(t, p.stalled, time.Minute, time.Millisecond, "it waits for the second half")
	took := make([]time.Duration, 1000)
	for i := range took {
		began := time.Now()
		assert.False(t, p.spin(p.published.Load()))
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	assert.Less(t, took[len(took)/2], maxSpin) // of few calls, the host may have taken the core
	feed.half.Store(n)
	j.Help() // as the reader does
	require.NoError(t, <-over)
	assert.False(t, p.stalled())
	j.Help() // has no effect any more
}
