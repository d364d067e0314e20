package cudasim

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// A Sim is one simulated CUDA runtime library with its driver and devices. It
// is a [cudart.Source]. Its methods may be called from several goroutines.
type Sim struct {
	cfg      Config
	slot     *slot
	start    time.Time
	names    map[string]int // exported name -> export
	exported []string       // export -> name, "" where not exported
	threads  *threadKey
	base     uintptr   // of the device addresses and handles
	earlier  []uintptr // those of the Sims that had the slot before

	closed  atomic.Bool
	closing chan struct{}
	active  atomic.Int64  // calls and streams that run
	idle    chan struct{} // receives when active falls to 0 after Close

	faults faults

	// mu guards the simulated machine below. What waits for it to change waits
	// on the condition of a stream, on gate or on blockedMore.
	mu          sync.Mutex
	gate        *sync.Cond // held or running changed
	held        bool
	running     int            // operations that move data now
	blocked     map[string]int // calls that are blocked, by function
	blockedMore *sync.Cond     // blocked changed
	devices     []*device
	contexts    map[uint64]*thread
	blocks      blocks
	streams     map[uintptr]*stream
	events      map[uintptr]*event
	lastHandle  uintptr
	freeHandles []uintptr     // of streams that were destroyed, if they are reused
	lastStream  uint64        // number of the last stream
	leaked      int           // bytes that failed registrations left pinned
	hostClock   time.Duration // virtual time that the host has seen
	misuses     []Misuse

	arrivals                                uint64 // pages of managed memory that came to a device
	faultsOnDevice, faultsOnHost, evictions int    // pages
	misused                                 int
	internal                                []error
}

var _ cudart.Source = (*Sim)(nil)

// sims counts the simulators of the process, so that each has addresses and
// handles of its own.
var sims atomic.Uint64

// New starts a simulator. The caller must close it. At most 16 can be open in
// one process: New waits up to a minute for one to be closed, and then fails. It
// also fails for a Config with values out of range, and with an error that
// wraps [errors.ErrUnsupported] on platforms other than Linux on amd64 and arm64.
func New(cfg Config) (*Sim, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	key, err := threads()
	if err != nil {
		return nil, err
	}
	s := &Sim{
		cfg:      cfg,
		start:    time.Now(),
		names:    make(map[string]int),
		exported: make([]string, len(exports)),
		threads:  key,
		closing:  make(chan struct{}),
		idle:     make(chan struct{}, 1),
		blocked:  make(map[string]int),
		contexts: make(map[uint64]*thread),
		streams:  make(map[uintptr]*stream),
		events:   make(map[uintptr]*event),
	}
	s.base = addressSpace(sims.Add(1))
	s.blocks.next = s.base
	s.blocks.limit = s.base + addressSpaceSize/2
	s.lastHandle = s.blocks.limit
	s.gate, s.blockedMore = sync.NewCond(&s.mu), sync.NewCond(&s.mu)
	for i := range exports {
		if name := exports[i].nameIn(cfg.Version); name != "" {
			s.names[name] = i
			s.exported[i] = name
		}
	}
	s.faults.calls = make([]atomic.Int64, len(exports))
	for i := range cfg.Devices {
		s.devices = append(s.devices, newDevice(s, i, &cfg.Devices[i]))
	}
	if s.slot, err = takeSlot(s); err != nil {
		return nil, err
	}
	return s, nil
}

// Symbol returns the address of a C function, 0 for a name that the version does
// not export and after Close.
func (s *Sim) Symbol(name string) uintptr {
	i, ok := s.names[name]
	if !ok || s.closed.Load() {
		return 0
	}
	return s.slot.entries[i]
}

// String names what is simulated: "simulated libcudart 13.0".
func (s *Sim) String() string { return "simulated libcudart " + s.cfg.Version.String() }

// closeTimeout bounds how long Close waits for host functions and calls.
const closeTimeout = 10 * time.Second

// Close stops the streams. Calls that wait or are blocked, and all later ones,
// return cudaErrorCudartUnloading. A later Sim may use the same function
// pointers.
//
// Close returns an error that lists what is outstanding (see [Outstanding]) and
// what went wrong inside the simulator. Host and managed memory that is still
// allocated stays mapped and reads as zeros, so that a late access does not
// crash. Close waits up to 10 seconds for host functions and calls that run, and
// fails if one does not end. A second Close returns nil.
func (s *Sim) Close() error {
	if !s.closed.CompareAndSwap(false, true) {
		return nil
	}
	s.slot.release()
	s.mu.Lock()
	left := s.outstandingError()
	close(s.closing)
	s.wakeAll()
	s.mu.Unlock()

	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	for s.active.Load() > 0 {
		select {
		case <-s.idle:
			continue
		case <-timeout.C:
		}
		return errors.Join(left, s.internalErrors(),
			fmt.Errorf("%s: a host function or a call is still running %v after Close", s, closeTimeout))
	}
	s.mu.Lock()
	s.blocks.drop()
	s.mu.Unlock()
	return errors.Join(left, s.internalErrors())
}

// Check returns an error that lists what is outstanding (see [Outstanding]),
// each misuse that was recorded, and what went wrong inside the simulator; nil
// if there is nothing of the kind. It is meant for the end of a test:
//
//	t.Cleanup(func() { require.NoError(t, sim.Check()); require.NoError(t, sim.Close()) })
func (s *Sim) Check() error {
	s.mu.Lock()
	errs := []error{s.outstandingError()}
	for _, m := range s.misuses {
		errs = append(errs, errors.New(m.String()))
	}
	if more := s.misused - len(s.misuses); more > 0 {
		errs = append(errs, fmt.Errorf("and %d more misuses", more))
	}
	s.mu.Unlock()
	return errors.Join(append(errs, s.internalErrors())...)
}

// enter counts a call that runs. It is false when the Sim is closed.
func (s *Sim) enter() bool {
	s.active.Add(1)
	if s.closed.Load() {
		s.leave()
		return false
	}
	return true
}

func (s *Sim) leave() {
	if s.active.Add(-1) == 0 && s.closed.Load() {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// wakeAll makes everything that waits look again. It needs mu.
func (s *Sim) wakeAll() {
	s.gate.Broadcast()
	s.blockedMore.Broadcast()
	for _, d := range s.devices {
		for st := range d.streams {
			st.changed.Broadcast()
		}
	}
}

// now is the time since the simulator's start.
func (s *Sim) now() time.Duration { return time.Since(s.start) }

// handle makes a handle that was never used before. It needs mu.
func (s *Sim) handle() uintptr {
	s.lastHandle += 64
	return s.lastHandle
}

// fail records an error of the simulator itself. It needs mu.
func (s *Sim) fail(format string, args ...any) {
	if len(s.internal) < maxMisuses {
		s.internal = append(s.internal, fmt.Errorf(format, args...))
	}
}

func (s *Sim) internalErrors() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.internal...)
}

// Hold stops all streams after the operations that run now. What is enqueued
// waits for [Sim.Release], so that a test can examine the state before it runs.
// Calls that wait for a device, such as synchronous copies, wait for Release
// too, and a stream that is held fills (see Config.QueueDepth).
func (s *Sim) Hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = true
	for s.running > 0 {
		s.gate.Wait()
	}
}

// Release lets the streams run again after [Sim.Hold].
func (s *Sim) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = false
	s.gate.Broadcast()
}
