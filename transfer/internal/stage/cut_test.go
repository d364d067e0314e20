package stage

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// cutting is memory that ends, or fails, at a byte while a chunk is being opened.
type cutting struct {
	memory
	job *Job
	end func(j *Job)
}

func (c *cutting) Start(j *Job) { c.job = j }

func (c *cutting) Ready() int {
	ready := c.memory.Ready()
	if c.next > 0 {
		c.end(c.job)
	}
	return ready
}

func TestASourceThatEndsWhileAChunkIsOpened(t *testing.T) {
	s, dev := acquire(t)
	const n = 4 * mib
	mem, src := device(t, dev, n), random(n, 1)
	boom := errors.New("boom")
	for name, end := range map[string]func(j *Job){
		"cut":           func(j *Job) { j.Cut(minChunk, boom) },
		"cut at a byte": func(j *Job) { j.Cut(5, boom) },
		"abort":         func(j *Job) { j.abort(minChunk, boom) },
	} {
		feed := &cutting{memory: memory{mem: src}, end: end}
		done, err := s.Run(t.Context(), Copy{N: n, Host: feed, Queue: func(on *cudart.Stream, _ int, chunk []byte, off int) error {
			return on.CopyToDevice(mem+cudart.DevPtr(off), unsafe.Pointer(&chunk[0]), len(chunk))
		}})
		require.ErrorIs(t, err, boom, name)
		require.LessOrEqual(t, done, minChunk, name)
	}
}
