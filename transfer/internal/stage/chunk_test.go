package stage

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

// A job ends when its memory of the ring was released, and not before: the ring may be
// closed then.
func TestAJobEndsAfterItsChunks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Copy{
		"download":                       {N: mib, Down: true},
		"upload, error before the chunk": {N: mib},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := simulated(t, cudasim.Config{})
			j := s.newJob(c)
			j.chunks.published = 1
			one := &chunk{job: j, x: s.ring.try(request{n: mib, dir: directionOf(c.Down)}), Part: Part{N: mib}}
			if !c.Down {
				j.Cut(0, errTest)
			}
			s.ring.mu.Lock()
			worked := make(chan struct{})
			go func() {
				one.copied()
				close(worked)
			}()
			assert.Eventually(t, func() bool { // it has come to the ring
				j.mu.Lock()
				defer j.mu.Unlock()
				return j.done.prefix == mib || one.N <= 0
			}, 10*time.Second, time.Millisecond)
			over := j.over()
			s.ring.mu.Unlock()
			require.False(t, over)
			<-worked
			require.True(t, j.over())
		})
	}
}

// A chunk that another goroutine is queueing may be copied at any moment: the job waits for that until the
// grace ends, whether it has failed or copied all.
func TestAJobEndsAfterWhatWasSubmitted(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	copied := s.newJob(Copy{N: mib})
	failed := s.newJob(Copy{N: mib})
	copied.pass(0, mib)
	failed.abort(0, errTest)
	for _, j := range []*Job{copied, failed} {
		j.chunks.submitted = 1
		require.False(t, j.over())
	}
	failed.driver.cancel()
	require.True(t, failed.over(), "the grace is over")
	require.False(t, copied.over())
	copied.chunks.submitted = 0
	require.True(t, copied.over())
}
