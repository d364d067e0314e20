package cudasim

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/raw"
)

func init() {
	raw.EndSim = func(sim any) error { return sim.(*Sim).end() }
	raw.TrafficOf = func(sim any) raw.ManagedTraffic { return sim.(*Sim).managedTraffic() }
}

// A TB is a *testing.T, *testing.B or *testing.F.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Start opens a simulator for a test, and a Runtime on it. The end of the test closes both, and fails the test
// for what [Sim.Check] finds. The test fails at once for the errors of [New] and of [cudart.Open].
func Start(t TB, cfg Config) (*Sim, *cudart.Runtime) {
	t.Helper()
	sim, rt, err := open(context.Background(), cfg)
	if err != nil {
		t.Fatalf("start the simulated GPU: %v", err)
		return nil, nil
	}
	t.Cleanup(func() {
		if err := errors.Join(rt.Close(), sim.end()); err != nil {
			t.Errorf("%v at the end of the test: %v", sim, err)
		}
	})
	return sim, rt
}

// Open is [cudart.Open] on a new simulator, for programs that run without a GPU. The Runtime's Close also closes
// the simulator, so everything else must have been closed before: Close waits a few seconds for that, and
// fails for what [Sim.Check] finds. The errors are those of [New] and of [cudart.Open]. Open returns when ctx ends.
func Open(ctx context.Context, cfg Config) (*cudart.Runtime, error) {
	if ctx == nil {
		return nil, errors.New("cudasim: open: the context is nil")
	}
	sim, rt, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	raw.AtClose(rt, sync.OnceValue(sim.end))
	return rt, nil
}

func open(ctx context.Context, cfg Config) (*Sim, *cudart.Runtime, error) {
	sim, err := start(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	rt, err := cudart.Open(ctx, cudart.Options{Source: sim})
	if err != nil {
		return nil, nil, errors.Join(err, sim.Close())
	}
	return sim, rt, nil
}

// end closes the simulator, and returns what Check finds. What an abandoned call has made is released by the goroutine
// that makes the call, a moment after that returns: end waits until nothing is outstanding, and closes in the same
// instant, after which a call makes nothing. It counts polls instead of time, during which the process may stand still.
func (s *Sim) end() error {
	s.mu.Lock()
	for polls := 0; s.outstanding() != (Outstanding{}) && polls < 3000; polls++ {
		s.mu.Unlock()
		time.Sleep(time.Millisecond)
		s.mu.Lock()
	}
	err := s.checkLocked()
	if s.life.Sealed() {
		s.mu.Unlock()
		return errors.Join(err, s.internalErrors())
	}
	return errors.Join(err, s.closeLocked())
}
