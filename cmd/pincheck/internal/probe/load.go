package probe

import (
	"os"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/internal/linux"
)

// A load is what the host's CPUs and this process had done at some moment.
type load struct {
	at   time.Time
	cpus linux.CPUTime
	own  time.Duration
}

// startLoad returns the load now, or nil if it is not known. A simulated GPU copies with the
// host's CPUs, which are not other programs'.
func startLoad(simulated bool) *load {
	cpus, err := linux.ReadCPUTime(os.DirFS("/"))
	own, known := measure.CPUTime()
	if err != nil || !known || simulated {
		return nil
	}
	return &load{time.Now(), cpus, own}
}

// others returns how many CPUs other programs have kept busy since l; nil if that is not known.
func (l *load) others() *float64 {
	if l == nil {
		return nil
	}
	now := startLoad(false)
	if now == nil {
		return nil
	}
	return l.othersUntil(now)
}

// minLoadTime is the time from which on the counts, which the kernel makes in steps of 10 ms, are
// exact enough.
const minLoadTime = 100 * time.Millisecond

func (l *load) othersUntil(now *load) *float64 {
	took := now.at.Sub(l.at)
	if took < minLoadTime || now.cpus.Busy+now.cpus.Idle == l.cpus.Busy+l.cpus.Idle {
		return nil // some sandboxes show a /proc/stat that never changes
	}
	busy := (now.cpus.Busy - l.cpus.Busy) - (now.own - l.own)
	n := max(0, busy.Seconds()/took.Seconds())
	return &n
}
