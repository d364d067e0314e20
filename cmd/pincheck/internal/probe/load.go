package probe

import (
	"os"
	"time"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/linux"
)

// A load is the CPU time of the host and of this process at a moment.
type load struct {
	at   time.Time
	cpus linux.CPUTime
	own  time.Duration
}

// startLoad returns the current load, or nil if it is unknown. It is nil for a simulated GPU, whose
// copies use the host's CPUs.
func startLoad(simulated bool) *load {
	cpus, err := linux.ReadCPUTime(os.DirFS("/"))
	own := hostos.CPUTime()
	if err != nil || own < 0 || simulated {
		return nil
	}
	return &load{time.Now(), cpus, own}
}

// others returns the average number of CPUs that other programs used since l, or nil if unknown.
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

// minLoadTime is the shortest time that others evaluates. The kernel counts in steps of 10 ms.
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
