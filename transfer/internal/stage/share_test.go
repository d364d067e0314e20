package stage

import (
	"cmp"
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// sharing are jobs of stages that are only counted: nothing is copied.
type sharing struct {
	workers *workerPool
	stages  []*Stage
}

func newSharing(devices int) *sharing {
	s := &sharing{workers: newWorkerPool(64, cores{}, newConcurrency(64))}
	for range devices {
		stage := &Stage{workers: s.workers}
		stage.self[0] = stage
		s.stages = append(s.stages, stage)
	}
	return s
}

// job has something to copy on a device.
func (s *sharing) job(device int, c Copy) *Job {
	c.N = cmp.Or(c.N, 64*mib)
	j := s.stages[device].newJob(c)
	j.setActive(true)
	return j
}

func TestWorkersAreDividedAmongActiveJobs(t *testing.T) {
	t.Parallel()
	s := newSharing(3)
	limits := func(jobs ...*Job) (list []int32) {
		for _, j := range jobs {
			list = append(list, s.workers.workersOf(j))
		}
		return list
	}
	up := s.job(0, Copy{})
	require.Equal(t, []int32{uploadWorkers}, limits(up))

	down := s.job(0, Copy{Down: true})
	require.Equal(t, []int32{uploadWorkers, nonTemporalWorkers}, limits(up, down))

	// Uploads to several devices take of the memory's bandwidth.
	other := s.job(1, Copy{})
	file := s.job(2, Copy{Kernel: true})
	require.Equal(t, []int32{severalWorkers, severalWorkers, severalWorkers, nonTemporalWorkers}, limits(up, other, file, down))
	other.setActive(false)
	file.setActive(false)
	file.setActive(false) // once is enough
	down.setActive(false)
	require.Equal(t, []int32{uploadWorkers}, limits(up))

	for n, want := range map[int]int32{minSpread - 1: nonTemporalWorkers, minSpread: uploadWorkers} {
		past := s.job(1, Copy{NonTemporal: true, N: n})
		past.setActive(false)
		require.Equal(t, []int32{want}, limits(past), "%d bytes", n)
	}

	// Many on one device share, down to none besides themselves.
	jobs := []*Job{up}
	for _, want := range []struct{ jobs, limit int32 }{{2, 4}, {4, 2}, {8, 1}, {16, 0}, {1000, 0}} {
		for int32(len(jobs)) < want.jobs {
			jobs = append(jobs, s.job(0, Copy{}))
		}
		require.Equal(t, want.limit, s.workers.workersOf(up), "%d jobs", want.jobs)
	}
	many := s.job(0, Copy{Workers: 5})
	require.EqualValues(t, 4, s.workers.workersOf(many), "what the caller asks for is not shared")
	for _, j := range append(jobs[1:], many) {
		j.setActive(false)
	}
	require.Equal(t, []int32{uploadWorkers}, limits(up))

	// A copy onto several devices has workers for each.
	up.setActive(false)
	fan := s.job(0, Copy{Stages: s.stages, Groups: [][]int{{0, 1, 2}}})
	require.Equal(t, []int32{3 * severalWorkers}, limits(fan))
	fan.setActive(false)
	for _, stage := range s.stages {
		require.Zero(t, stage.active[toDevice].Load())
	}
	require.Zero(t, s.workers.active[toDevice].Load())
}

// A worker leaves its job for one that has work and fewer workers, and not otherwise.
func TestWorkersMoveToJobsWithFewer(t *testing.T) {
	t.Parallel()
	s := newSharing(2)
	j, other := s.job(0, Copy{}), s.job(1, Copy{Down: true})
	s.workers.jobs.Store(&[]*Job{j, other})
	j.work.workers.Store(4)
	require.False(t, s.workers.wanted(j), "the other one has no work")
	other.work.pieces.Store(1)
	for n, want := range []bool{true, true, true, false} { // 3 and 3 is as good as 4 and 2
		other.work.workers.Store(int32(n))
		require.Equal(t, want, s.workers.wanted(j), "%d workers of the other one", n)
	}
	j.work.workers.Store(1)
	require.False(t, s.workers.wanted(j))
	other.work.workers.Store(0)
	require.True(t, s.workers.wanted(j), "they take turns")
	j.work.workers.Store(7)
	other.work.workers.Store(nonTemporalWorkers)
	require.False(t, s.workers.wanted(j), "the other one has all that it may have")
	other.work.workers.Store(0)
	s.workers.slow.Store(s.workers.max / 2)
	other.Slow = true
	require.False(t, s.workers.wanted(j), "enough of them wait for a disk")
	other.work.pieces.Store(0)
	for range 7 {
		s.job(0, Copy{})
	}
	require.True(t, s.workers.wanted(j), "its share is smaller by now")
}

// slowFeed has nothing ready until give is called.
type slowFeed struct {
	memory
	mu    sync.Mutex
	ready bool
	job   *Job
}

func (f *slowFeed) Start(j *Job) { f.job = j }

func (f *slowFeed) Ready() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ready {
		return 0
	}
	return f.memory.Ready()
}

func (f *slowFeed) give() {
	f.mu.Lock()
	f.ready = true
	f.mu.Unlock()
	f.job.Wake()
}

// Copies that wait for their readers leave the workers to others.
func TestReadersThatAreSlowTakeNoShare(t *testing.T) {
	t.Parallel()
	s := newSharing(1)
	feed := &slowFeed{memory: memory{mem: make([]byte, mib)}}
	waits := s.stages[0].newJob(Copy{N: mib, Host: feed})
	feed.Start(waits)
	require.False(t, waits.openNext())
	require.Zero(t, s.stages[0].active[toDevice].Load())

	stage, _ := acquire(t)
	waits = stage.newJob(Copy{N: mib, Host: feed})
	feed.give()
	require.True(t, waits.openNext())
	require.EqualValues(t, 1, stage.active[toDevice].Load())
	waits.abort(0, context.Canceled)
	require.False(t, waits.openNext())
	require.EqualValues(t, 1, stage.active[toDevice].Load(), "until it ends")
	waits.setActive(false)
	waits.dropPieces()
	require.Zero(t, stage.active[toDevice].Load())
}

// An upload with non-temporal stores has chunks of a sixteenth, because the GPU waits for the first ones.
func TestChunksInTheMiddleOfACopy(t *testing.T) {
	t.Parallel()
	s := newSharing(1)
	r := &ring{unit: ringUnit, units: maxRing / ringUnit, maxChunk: maxChunk / ringUnit}
	for _, c := range []struct{ n, plain, nonTemporal int }{{16 * mib, 4 * mib, 2 * mib}, {64 * mib, 8 * mib, 4 * mib}, {128 * mib, 8 * mib, 8 * mib}} {
		require.Equal(t, c.plain, s.job(0, Copy{N: c.n}).chunkSize(r, c.n/2, c.n), "%d bytes", c.n)
		require.Equal(t, c.nonTemporal, s.job(0, Copy{N: c.n, NonTemporal: true}).chunkSize(r, c.n/2, c.n), "%d bytes", c.n)
	}
}
