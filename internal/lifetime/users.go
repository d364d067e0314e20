package lifetime

import (
	"runtime"
	"sync/atomic"
)

// Users counts the calls that use something. The use can be ended once ("retired"); when
// no call is in progress any more, one goroutine is told so, and what was used is its own:
// to be released, or to be used again as the next generation.
//
//	state    entered by  | Begin        | Retire           | End
//	open     Renew       | counts, true | true; idle if no | false
//	                     |              | call is counted  |
//	retired  Retire      | false        | false            | true for the last call
//
// Begin and Retire of an earlier generation behave as in a retired one. The zero Users is
// open, in generation 0. Methods may be called from any goroutine.
type Users struct{ state atomic.Uint64 } // from the low bits up: calls, retired, generation

const (
	usersCalls      = 1<<31 - 1
	usersRetired    = 1 << 31
	usersGeneration = 1 << 32 // one generation
)

// Generation returns the number of times that Renew was called, modulo 2^32.
func (u *Users) Generation() uint32 { return uint32(u.state.Load() / usersGeneration) }

// Open reports whether a generation is not retired.
func (u *Users) Open(generation uint32) bool { return isOpen(u.state.Load(), generation) }

func isOpen(state uint64, generation uint32) bool {
	return uint32(state/usersGeneration) == generation && state&usersRetired == 0
}

// Begin counts a call. If it returns true, End must be called; if false, the generation
// is over.
func (u *Users) Begin(generation uint32) bool {
	for {
		s := u.state.Load()
		switch {
		case !isOpen(s, generation):
			return false
		case s&usersCalls == usersCalls:
			runtime.Gosched()
		case u.state.CompareAndSwap(s, s+1):
			return true
		}
	}
}

// Hold counts a call although the generation may be over. It is for those who have what
// was used to themselves, or work for one who has.
func (u *Users) Hold() {
	for {
		s := u.state.Load()
		switch {
		case s&usersCalls == usersCalls:
			runtime.Gosched()
		case u.state.CompareAndSwap(s, s+1):
			return
		}
	}
}

// End ends a call. It returns true to the last one of a retired generation.
func (u *Users) End() (last bool) {
	return u.state.Add(^uint64(0))&(usersRetired|usersCalls) == usersRetired
}

// Calls returns the number of calls in progress.
func (u *Users) Calls() int { return int(u.state.Load() & usersCalls) }

// Retire ends a generation. It returns true to the one caller that has ended it; idle
// reports that no call is in progress, so that no End returns true.
func (u *Users) Retire(generation uint32) (retired, idle bool) { return u.retire(generation, false) }

// RetireAndRenew is Retire, and Renew if no call is in progress, in one step.
func (u *Users) RetireAndRenew(generation uint32) (retired, idle bool) {
	return u.retire(generation, true)
}

func (u *Users) retire(generation uint32, renew bool) (retired, idle bool) {
	for {
		s := u.state.Load()
		if !isOpen(s, generation) {
			return false, false
		}
		next := s | usersRetired
		if idle = s&usersCalls == 0; idle && renew {
			next = s + usersGeneration
		}
		if u.state.CompareAndSwap(s, next) {
			return true, idle
		}
	}
}

// Renew begins the next generation. It is for the goroutine that was told that the last
// one is over.
func (u *Users) Renew() (generation uint32) {
	s := u.state.Load()/usersGeneration*usersGeneration + usersGeneration
	u.state.Store(s)
	return uint32(s / usersGeneration)
}
