package cudasim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
)

// Blocked returns how many calls of each C function are blocked now: by
// [Sim.Block], or because their stream is full. Calls that wait for work, as
// cudaStreamSynchronize does, are not counted.
func (s *Sim) Blocked() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.blocked)
}

// AwaitBlocked waits until n or more calls of the C function fn are blocked, as
// [Sim.Blocked] counts them. An empty fn stands for all functions together. It
// returns the context's error, with the calls that were blocked, when that ends
// first, and one that wraps [os.ErrClosed] when the Sim is closed.
func (s *Sim) AwaitBlocked(ctx context.Context, fn string, n int) error {
	if ctx == nil {
		return errors.New("cudasim: AwaitBlocked: no context")
	}
	if _, ok := s.names[fn]; !ok && fn != "" {
		return fmt.Errorf("%s: AwaitBlocked(%q): no such function in this version", s, fn)
	}
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.blockedMore.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.blockedCalls(fn) < n {
		err := ctx.Err()
		if s.life.Sealed() {
			err = os.ErrClosed
		}
		if err != nil {
			return fmt.Errorf("%s: AwaitBlocked(%q, %d): blocked are %v: %w", s, fn, n, s.blocked, err)
		}
		s.blockedMore.Wait()
	}
	return nil
}

// blockedCalls needs mu.
func (s *Sim) blockedCalls(fn string) int {
	if fn != "" {
		return s.blocked[fn]
	}
	all := 0
	for _, n := range s.blocked {
		all += n
	}
	return all
}

// addBlocked counts a call as blocked, or with -1 as going on. It needs mu.
func (s *Sim) addBlocked(fn string, n int) {
	s.blocked[fn] += n
	if s.blocked[fn] == 0 {
		delete(s.blocked, fn)
	}
	s.blockedMore.Broadcast()
}
