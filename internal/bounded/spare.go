package bounded

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/internal/poll"
)

// A spare is a goroutine that has made a short call soon after another one, and polls for the next before it ends. A
// goroutine that is started wakes a thread, which takes some microseconds of the caller's time on a
// virtual machine; the spare is on a core already. At most one polls at a time.
//
//	a spare is | entered by              | left by
//	working    | Go, pass                | the end of the call
//	polling    | poll, sets polling      | claimed, or ends after pollTime
//	claimed    | pass, clears polling    | working, when called is true
type spare struct {
	next   func() // set before called
	called atomic.Bool
	serve  func() // made once: work
	stays  bool   // it polls after its first call
}

var (
	polling atomic.Pointer[spare]
	spares  sync.Pool    // of *spare, so that starting a goroutine allocates nothing
	started atomic.Int64 // when Go started a goroutine last, in ns after loaded
	loaded  = time.Now()
)

const (
	// pollTime is some times as long as waking a thread takes.
	pollTime = 20 * time.Microsecond
	// maxGap is the maximum time between two calls for which Go starts goroutines, after which the second
	// becomes a spare: it would poll in vain after calls that are rare.
	maxGap = 5 * pollTime
	// minProcs is the minimum of GOMAXPROCS with which goroutines poll.
	minProcs = 4
)

// short polls for the end of a short call, or for the next one.
var short = poll.Memory(pollTime, nil)

// Go calls f, which mostly takes some microseconds, on another goroutine. f must not belong to a bubble of
// testing/synctest. polled reports whether the call has begun on a core of its own: then polling finds
// out about its end sooner than a wait.
func Go(f func()) (polled bool) {
	if pass(f) {
		return true
	}
	s, _ := spares.Get().(*spare)
	if s == nil {
		s = new(spare)
		s.serve = s.work
	}
	now := time.Since(loaded)
	s.next, s.stays = f, now-time.Duration(started.Swap(int64(now))) < maxGap
	go s.serve()
	return false
}

// pass has the spare that polls call f, and returns false if none polls.
func pass(f func()) bool {
	s := polling.Load()
	if s == nil || !polling.CompareAndSwap(s, nil) {
		return false
	}
	s.next = f
	s.called.Store(true)
	return true
}

// work makes the first call, and is a spare afterwards.
func (s *spare) work() {
	s.call()
	if s.stays && polling.Load() == nil && runtime.GOMAXPROCS(0) >= minProcs {
		runtime.Gosched() // the caller may be waiting for this processor
		for s.poll() {
			began := time.Now()
			if s.call(); time.Since(began) > pollTime {
				runtime.Gosched() // the caller polls no more
			}
		}
	}
	spares.Put(s)
}

// call calls next. A spare keeps nothing from being collected.
func (s *spare) call() {
	f := s.next
	s.next = nil
	f()
}

// poll waits for a call, and returns false if none comes, or another goroutine polls.
func (s *spare) poll() bool {
	if s.called.Store(false); !polling.CompareAndSwap(nil, s) {
		return false
	}
	if short.Until(s.called.Load) {
		return true
	}
	if polling.CompareAndSwap(s, nil) {
		return false
	}
	for !s.called.Load() { // claimed
		runtime.Gosched()
	}
	return true
}
