//go:build linux && !android && (amd64 || arm64)

package hostmemtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// An Operation is something that can fail halfway.
type Operation struct {
	Name   string
	Tried  string // text that its errors contain
	Start  func(s *Stage) Act
	Leaves Leaves
	Once   bool // it cannot be repeated after it failed
}

// Leaves is the state after an operation that failed.
type Leaves int

const (
	Everything Leaves = iota // as before
	InLedger                 // as before, but memory in the ledger may not be registered any more
	Less                     // less than before, but all mapped memory is in the ledger
)

// An Act is an operation prepared.
type Act struct {
	Do    func() error // the operation
	Check func()       // checks its effects, after it succeeded
	End   func()       // releases everything
}

// A Stage is where operations act: a simulated GPU, this host's system calls, and
// faults in both.
type Stage struct {
	*Fixture
	Sys *System
	Mem cudart.DevPtr // of StageMem bytes

	ledger Ledger

	mu       sync.Mutex
	fault    *fault
	calls    []string       // of CUDA
	sysCalls []string       // of the system
	owed     map[int]string // functions whose errors are pending, by thread
	pending  []string       // errors that stayed pending
}

// StageMem is the device memory of a stage in bytes.
const StageMem = 64 << 10

// A Ledger reads the figures of hostmem. Reserved returns the bytes of buffers.
type Ledger struct {
	Figures  func() any // all figures that must be as before
	Reserved func() int
}

// NewStage makes a stage.
func NewStage(t *testing.T, cfg cudasim.Config, l Ledger) *Stage {
	g := NewSim(t, cfg)
	if len(cfg.Devices) > 1 {
		dev, err := g.Dev.Runtime().Device(1) // not the one that fresh threads have
		require.NoError(t, err)
		g = g.On(dev)
	}
	s := &Stage{Fixture: g, Sys: NewSystem(), ledger: l, owed: make(map[int]string)}
	s.Mem = s.Device(StageMem)
	s.Sys.THP, s.Sys.HugePage = "madvise", 2<<20 // on every host
	s.Sys.Unpopulated()                          // a sweep makes thousands of buffers
	s.Sys.Calls = s.Sys.Calls.Before(s.beforeSystemCall)
	s.Sim.OnCall(s.onCall)
	return s
}

func (s *Stage) beforeSystemCall(call string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sysCalls = append(s.sysCalls, call)
	if f := s.fault; f != nil && f.fn == "" && len(s.sysCalls) == f.nth {
		f.met = true
		return f.want
	}
	return nil
}

// onCall runs at the start of each CUDA call, on its thread. After a failure the next
// call there must be the one that clears the error: otherwise another call would
// return it.
func (s *Stage) onCall(fn string, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	thread := unix.Gettid()
	if of, owes := s.owed[thread]; owes {
		delete(s.owed, thread)
		if fn != "cudaGetLastError" {
			s.pending = append(s.pending, fmt.Sprintf("%s was called with the error of %s pending", fn, of))
		}
	}
	if fn != "cudaGetLastError" {
		s.calls = append(s.calls, fn)
	}
}

// requireNoPendingError requires that all errors of CUDA were cleared.
func (s *Stage) requireNoPendingError() {
	s.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(s, s.pending)
	require.Empty(s, s.owed, "threads with an error pending")
}

// observe makes an act without a fault, and returns which calls it made.
func (s *Stage) observe(op Operation) (cuda, system []string) {
	a := op.Start(s)
	s.arm(nil)
	err := a.Do()
	s.mu.Lock()
	cuda, system = slices.Clone(s.calls), slices.Clone(s.sysCalls)
	s.mu.Unlock()
	require.NoError(s, err, "without any fault")
	a.Check()
	a.End()
	return cuda, system
}

// A fault makes one call fail: of CUDA, or of the system.
type fault struct {
	name string
	fn   string // of CUDA; empty for the system
	nth  int    // call of fn, or of the system, from 1 on
	want error
	met  bool // guarded by Stage.mu
}

// arm makes the calls from now on count, and one of them fail.
func (s *Stage) arm(f *fault) {
	s.mu.Lock()
	s.fault, s.calls, s.sysCalls = f, nil, nil
	s.mu.Unlock()
	if f == nil || f.fn == "" {
		return
	}
	s.Sim.Fail(f.fn, cudasim.Fault{Nth: f.nth, Code: f.want.(cudart.Code), After: func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.met = true
		if s.Sim.Symbol("cudaGetLastError") != 0 { // libcuda keeps no error for the thread
			s.owed[unix.Gettid()] = f.fn
		}
	}})
}

// disarm ends the fault, and reports whether it was met.
func (s *Stage) disarm(f *fault) (met bool) {
	s.Sim.ResetFaults()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = nil
	return f.met
}

// Synchronize waits for the stage's stream. An error that a fence found by asking for a
// place in the stream may be one of the stream's work, which CUDA returns once: the
// stream returns it then, and has none left.
func (s *Stage) Synchronize() {
	s.Helper()
	if err := s.Stream.Synchronize(context.Background()); err != nil {
		var call *cudart.Error
		require.ErrorAs(s, err, &call)
		require.NoError(s, s.Stream.Synchronize(context.Background()))
	}
}

// A Holding has the figures of everything that is open.
type Holding struct {
	CUDA    cudasim.Outstanding
	Mapped  int64
	Figures any
}

// Holding returns the present figures.
func (s *Stage) Holding() Holding {
	h := Holding{CUDA: s.Sim.Outstanding(), Mapped: s.Sys.Mapped.Load(), Figures: s.ledger.Figures()}
	h.CUDA.PendingOps, h.CUDA.Events = 0, 0 // a runtime keeps events for the next wait
	return h
}

// outcome counts the outcomes of faults.
type outcome struct{ met, failed, absorbed int }

// runWithFault makes an act under one fault.
func (s *Stage) runWithFault(op Operation, prefix string, f *fault, o *outcome) {
	s.Helper()
	start := s.Holding()
	reserved := s.ledger.Reserved()
	a := op.Start(s)
	before := s.Holding()
	s.arm(f)
	err := a.Do()
	met := s.disarm(f)
	s.requireNoPendingError()
	if met {
		o.met++
	}
	if err != nil {
		o.failed++
		require.True(s, met, "failed without the fault: %v", err)
		require.ErrorIs(s, err, f.want)
		require.True(s, strings.HasPrefix(err.Error(), prefix), "%v", err)
		require.ErrorContains(s, err, op.Tried)
		after := s.Holding()
		switch op.Leaves {
		case InLedger:
			before.CUDA.Registrations, before.CUDA.RegisteredBytes = after.CUDA.Registrations, after.CUDA.RegisteredBytes
			fallthrough
		case Everything:
			require.Equal(s, before, after, "not rolled back: %v", err)
		case Less:
			allocated := after.CUDA.HostBytes - start.CUDA.HostBytes
			require.Equal(s, s.ledger.Reserved()-reserved, int(after.Mapped-start.Mapped)+allocated, "what is mapped and what the ledger has of it")
		}
		if !op.Once {
			require.NoError(s, a.Do(), "the next try")
		}
	} else if met {
		o.absorbed++
	}
	if err == nil || !op.Once {
		a.Check()
	}
	a.End()
	require.Equal(s, start, s.Holding(), "not released")
	require.Empty(s, s.Sim.Misuses())
}

// maxQueries is the number of calls of a query that fail, of all that repeat it.
const maxQueries = 3

var (
	sweepCodes  = []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrInvalidValue, cudart.ErrNotSupported}
	sweepErrnos = []unix.Errno{unix.ENOMEM, unix.EAGAIN, unix.EINVAL, unix.ENOSYS}
)

// GPUs are hosts that refuse nothing: with one GPU, and with two.
var GPUs = map[string]cudasim.Config{
	"one GPU":  {},
	"two GPUs": {Devices: make([]cudasim.DeviceConfig, 2)},
}

// Sweep makes every call of CUDA and of the system fail, at every position, for every
// operation, on each of the hosts. The outcome is a clear error, with this prefix, and everything as
// before, or all that was requested. The faults that are met must be more than these,
// for one code and one errno. The test must not be parallel, because the ledger is
// the process's. Each position has one code or errno in turn, or all of them if Soak.
func Sweep(t *testing.T, prefix string, hosts map[string]cudasim.Config, ops []Operation, l Ledger, moreCUDA, moreSystem int) {
	var cuda, system outcome
	for host, cfg := range hosts {
		for _, op := range ops {
			t.Run(host+"/"+op.Name, func(t *testing.T) {
				// Each fault has a stage of its own: what hostmem has found out about
				// a device is not remembered from one to the next.
				calls, sysCalls := NewStage(t, cfg, l).observe(op)
				counts := make(map[string]int)
				for i, fn := range calls {
					counts[fn]++
					if counts[fn] > maxQueries && strings.HasSuffix(fn, "Query") {
						continue
					}
					for _, code := range OneOf(sweepCodes, i) {
						f := &fault{name: fmt.Sprintf("%s #%d: %s", fn, counts[fn], code.Name()), fn: fn, nth: counts[fn], want: code}
						if !t.Run(f.name, func(t *testing.T) { NewStage(t, cfg, l).runWithFault(op, prefix, f, &cuda) }) {
							return
						}
					}
				}
				if len(cfg.Devices) > 1 {
					return // the system calls are those with one
				}
				for i, call := range sysCalls {
					for _, errno := range OneOf(sweepErrnos, i) {
						f := &fault{name: fmt.Sprintf("system call %d, %s: %s", i+1, call, unix.ErrnoName(errno)), nth: i + 1, want: errno}
						if !t.Run(f.name, func(t *testing.T) { NewStage(t, cfg, l).runWithFault(op, prefix, f, &system) }) {
							return
						}
					}
				}
			})
		}
	}
	t.Logf("%d faults of CUDA calls: %d operations failed and were rolled back, %d worked all the same", cuda.met, cuda.failed, cuda.absorbed)
	t.Logf("%d faults of system calls: %d operations failed and were rolled back, %d worked all the same", system.met, system.failed, system.absorbed)
	assert.Greater(t, cuda.met/len(OneOf(sweepCodes, 0)), moreCUDA)
	assert.Greater(t, system.met/len(OneOf(sweepErrnos, 0)), moreSystem)
	assert.Equal(t, cuda.met, cuda.failed+cuda.absorbed)
}

// Context returns a context with which hostmem maps memory by the stage's system
// calls.
func (s *Stage) Context() context.Context { return s.Sys.With(s.TB.Context()) }
