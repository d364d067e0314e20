package probe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// What this process did is not what others did.
func TestCPUsThatOthersKeepBusy(t *testing.T) {
	t.Parallel()
	began := time.Now()
	from := &load{began, linux.CPUTime{CPUs: 8, Busy: 100 * time.Second}, time.Second}
	for _, c := range []struct {
		after, busy, own time.Duration
		want             float64
	}{
		{500 * time.Millisecond, 2 * time.Second, 500 * time.Millisecond, 3},
		{time.Second, 100 * time.Millisecond, 100 * time.Millisecond, 0},
		{time.Second, 90 * time.Millisecond, 100 * time.Millisecond, 0}, // the kernel counts in 10 ms
	} {
		got := from.othersUntil(&load{began.Add(c.after), linux.CPUTime{CPUs: 8, Busy: 100*time.Second + c.busy, Idle: c.after}, time.Second + c.own})
		require.NotNil(t, got)
		assert.InDelta(t, c.want, *got, 1e-9)
	}
	assert.Nil(t, from.othersUntil(&load{began.Add(50 * time.Millisecond), from.cpus, from.own}), "too short to say")
	assert.Nil(t, from.othersUntil(&load{began.Add(time.Second), from.cpus, from.own + time.Second}), "a file that never changes says nothing")
	assert.Nil(t, startLoad(true).others())
}
