package cudasim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/raw"
)

// A Sim is one simulated CUDA runtime library with its driver and devices. It
// is a [cudart.Source]. Its methods may be called from several goroutines.
type Sim struct {
	library
	life    lifetime.Lifetime // of calls, and of streams that run
	closing chan struct{}     // closed by Close

	faults faults

	// mu guards the simulated machine below. What waits for it to change waits
	// on the condition of a stream, on gate or on blockedMore.
	mu sync.Mutex
	schedule
	machine
	handles
	paging
	diary
}

// A library is the simulated libcudart. It does not change after New.
type library struct {
	cfg      Config
	slot     *slot
	start    time.Time
	symbols  map[string]int // exported name -> export
	names    map[string]int // function, as faults and counts name it -> export
	exported []string       // export -> function, "" where not exported
	counted  []int          // export -> export as which faults and counts take it
	threads  *threadKey
	base     uintptr   // of the device addresses and handles
	earlier  []uintptr // those of the Sims that had the slot before
}

// A schedule says what runs now.
type schedule struct {
	gate        *sync.Cond // held or running changed
	held        bool
	running     int            // operations that move data now
	blocked     map[string]int // calls that are blocked, by function
	blockedMore *sync.Cond     // blocked changed
	hostClock   time.Duration  // virtual time that the host has seen
}

// A machine is what the calls have made of the devices.
type machine struct {
	devices   []*device
	contexts  map[uint64]*thread
	blocks    blocks
	streams   map[uintptr]*stream
	events    map[uintptr]*event
	modules   map[uintptr]*module
	functions map[uintptr]*function
	leaked    int // bytes that failed registrations left pinned

	initialized bool // by cuInit
}

// The handles of streams and events.
type handles struct {
	lastHandle  uintptr
	freeHandles []uintptr // of streams that were destroyed, if they are reused
	lastStream  uint64    // number of the last stream
}

// The paging of managed memory, in pages.
type paging struct {
	arrivals uint64 // that came to a device
	traffic  raw.ManagedTraffic
}

// A diary has what Check reports.
type diary struct {
	misuses  []Misuse
	misused  int
	internal []error
}

var _ cudart.Source = (*Sim)(nil)

// sims counts the simulators of the process, so that each has addresses and
// handles of its own.
var sims atomic.Uint64

// New starts a simulator. The caller must close it. At most 16 can be open in
// one process: New waits up to a minute for one to be closed, and then fails. It
// also fails for a Config with values out of range, and with an error that
// wraps [errors.ErrUnsupported] on platforms other than Linux on amd64 and arm64.
func New(cfg Config) (*Sim, error) { return start(context.Background(), cfg) }

func start(ctx context.Context, cfg Config) (*Sim, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	key, err := threads()
	if err != nil {
		return nil, err
	}
	s := &Sim{
		library:  library{cfg: cfg, start: time.Now(), threads: key},
		closing:  make(chan struct{}),
		schedule: schedule{blocked: make(map[string]int)},
		machine: machine{contexts: make(map[uint64]*thread), streams: make(map[uintptr]*stream), events: make(map[uintptr]*event),
			modules: make(map[uintptr]*module), functions: make(map[uintptr]*function)},
	}
	s.base = addressSpace(sims.Add(1))
	s.blocks.next = s.base
	s.blocks.limit = s.base + addressSpaceSize/2
	s.lastHandle = s.blocks.limit
	s.gate, s.blockedMore = sync.NewCond(&s.mu), sync.NewCond(&s.mu)
	s.export()
	s.faults.calls = make([]atomic.Int64, len(exports))
	for i := range cfg.Devices {
		s.devices = append(s.devices, newDevice(s, i, &cfg.Devices[i]))
	}
	if s.slot, err = takeSlot(ctx, s); err != nil {
		return nil, err
	}
	return s, nil
}

// export fills the tables of the library. A function of libcuda has the name of the one of
// libcudart that it stands for, and its own name if it stands for none.
func (l *library) export() {
	l.symbols, l.names = make(map[string]int), make(map[string]int)
	l.exported, l.counted = make([]string, len(exports)), make([]int, len(exports))
	version := l.cfg.Version
	if l.cfg.API == cudart.DriverAPI {
		version = l.cfg.DriverVersion
	}
	for i := range exports {
		e := &exports[i]
		name := e.nameIn(l.cfg.API, version)
		if name == "" {
			continue
		}
		l.symbols[name] = i
		l.exported[i], l.counted[i] = cmp.Or(e.as, e.name, name), i
		if e.as != "" {
			l.counted[i] = slices.IndexFunc(exports, func(o export) bool { return o.name == e.as })
		}
		l.names[l.exported[i]], l.names[name] = l.counted[i], l.counted[i]
	}
}

// Symbol returns the address of a C function, 0 for a name that the version does
// not export and after Close.
func (s *Sim) Symbol(name string) uintptr {
	i, ok := s.symbols[name]
	if !ok || s.life.Sealed() {
		return 0
	}
	return s.slot.entries[i]
}

// String names what is simulated: "simulated libcudart 13.0", or "simulated libcuda 13.0".
func (s *Sim) String() string {
	if s.cfg.API == cudart.DriverAPI {
		return "simulated libcuda " + s.cfg.DriverVersion.String()
	}
	return "simulated libcudart " + s.cfg.Version.String()
}

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
	s.mu.Lock()
	if s.life.Sealed() {
		s.mu.Unlock()
		return nil
	}
	return errors.Join(s.outstandingError(), s.closeLocked())
}

// closeLocked needs mu, which it unlocks.
func (s *Sim) closeLocked() error {
	s.life.Seal()
	s.slot.release()
	close(s.closing)
	s.wakeAll()
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if s.life.Wait(ctx) != nil {
		return errors.Join(s.internalErrors(),
			fmt.Errorf("%s: a host function or a call is still running %v after Close", s, closeTimeout))
	}
	s.mu.Lock()
	s.blocks.drop()
	s.mu.Unlock()
	return s.internalErrors()
}

// Check returns an error that lists what is outstanding (see [Outstanding]),
// each misuse that was recorded, and what went wrong inside the simulator; nil
// if there is nothing of the kind. It is meant for the end of a test:
//
//	t.Cleanup(func() { require.NoError(t, sim.Check()); require.NoError(t, sim.Close()) })
func (s *Sim) Check() error {
	s.mu.Lock()
	err := s.checkLocked()
	s.mu.Unlock()
	return errors.Join(err, s.internalErrors())
}

// checkLocked is Check without the internal errors. It needs mu.
func (s *Sim) checkLocked() error {
	errs := []error{s.outstandingError()}
	for _, m := range s.misuses {
		errs = append(errs, errors.New(m.String()))
	}
	if more := s.misused - len(s.misuses); more > 0 {
		errs = append(errs, fmt.Errorf("and %d more misuses", more))
	}
	return errors.Join(errs...)
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
