package hostmem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/gopinned/pinned/internal/linux"
)

// ErrLimit is returned when memory is not pinned because a limit forbids it.
var ErrLimit = errors.New("hostmem: limit on pinned memory")

// Limits bound how much memory this process pins through this package. The
// zero value is what a process starts with.
type Limits struct {
	// MaxBytes is the most that may be pinned at a time. Who asks for more
	// waits until enough was given back, in the order of asking, as long as
	// the context lets it. 0 is no limit.
	MaxBytes int
	// MaxShare is the share that one allocation may take of what the host, or
	// the cgroup that the process is in, can spare at that moment: pinned
	// memory cannot be swapped out, and a host without any left kills
	// processes. 0 means 0.9; more than 1 switches the guard off.
	MaxShare float64
}

const defaultShare = 0.9

// SetLimits sets the limits of the process. What is pinned already stays so.
func SetLimits(l Limits) error {
	if l.MaxBytes < 0 || l.MaxShare < 0 {
		return fmt.Errorf("hostmem: set limits %+v: must not be negative", l)
	}
	limits.set(l)
	return nil
}

// Available returns the bytes of host memory that can be had without swapping,
// and without passing a limit of the process's cgroup; ok is false where the
// system does not report it. It reads the host's state anew each time.
func Available() (bytes int, ok bool) {
	left, err := headroom(os.DirFS("/"))
	return left.Available, err == nil
}

// headroom returns what the host, or the control group that binds tighter, has
// left. A control group that cannot be read counts as no limit: there is nothing
// to compare with.
func headroom(files fs.FS) (linux.Headroom, error) {
	info, err := linux.ReadMeminfo(files)
	if err != nil {
		return linux.Headroom{}, err
	}
	left, ok := info.Headroom(0)
	if !ok {
		return linux.Headroom{}, errors.New("/proc/meminfo has no MemTotal or no MemAvailable")
	}
	groups, _ := linux.ReadCgroupMemory(files)
	if group, ok := linux.Tightest(groups, 0); ok && group.Headroom(0).Available < left.Available {
		left = group.Headroom(0)
	}
	return left, nil
}

// limits are those of the process.
var limits = newLimiter(os.DirFS("/"))

// A limiter holds the limits, and what was learnt of the host last.
type limiter struct {
	files fs.FS
	bytes *quota

	mu      sync.Mutex
	share   float64
	left    linux.Headroom
	read    time.Time // when left was
	granted int       // since then
}

func newLimiter(files fs.FS) *limiter {
	return &limiter{files: files, bytes: newQuota(0), share: defaultShare}
}

func (l *limiter) set(to Limits) {
	l.bytes.setMax(to.MaxBytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.share = to.MaxShare; l.share == 0 {
		l.share = defaultShare
	}
}

// take allows n bytes to be pinned, or says why not. give takes them back.
func (l *limiter) take(ctx context.Context, n int) error {
	if err := l.bytes.acquire(ctx, n); err != nil {
		return fmt.Errorf("%w of the process: %w", ErrLimit, err)
	}
	if err := l.guard(n); err != nil {
		l.bytes.release(n)
		return err
	}
	return nil
}

func (l *limiter) give(n int) { l.bytes.release(n) }

// What was read of the host serves for so long, and so many bytes, without
// another look: reading takes as long as pinning 64 KiB.
const (
	freshFor   = time.Second
	freshBytes = 64 << 20
)

// guard refuses what host or cgroup cannot spare.
func (l *limiter) guard(n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.share > 1 {
		return nil
	}
	fresh := false
	if l.granted+n > freshBytes || time.Since(l.read) > freshFor {
		if fresh = l.look(); !fresh {
			return nil // nothing to compare with: the kernel decides
		}
	}
	// Memory may have been given back since the last look.
	if n > l.allowed() && !fresh && !l.look() {
		return nil
	}
	if n > l.allowed() {
		return fmt.Errorf("%w: %d bytes are more than %.0f%% of what can be spared, %v; give memory back, or raise Limits.MaxShare",
			ErrLimit, n, 100*l.share, l.left)
	}
	l.granted += n
	return nil
}

// look reads what is left just now, if the host reports it.
func (l *limiter) look() bool {
	left, err := headroom(l.files)
	if err != nil {
		return false
	}
	l.left, l.read, l.granted = left, time.Now(), 0
	return true
}

// allowed is what may be granted until the next look.
func (l *limiter) allowed() int {
	return int(l.share*float64(l.left.Available)) - l.granted
}
