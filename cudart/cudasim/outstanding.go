package cudasim

import (
	"errors"
	"fmt"
	"iter"
	"strings"
)

// Outstanding counts what has not been freed, unregistered, destroyed, unloaded, disabled
// or run.
type Outstanding struct {
	DeviceAllocs, DeviceBytes      int // cudaMalloc, cudaMallocAsync
	HostAllocs, HostBytes          int // cudaHostAlloc
	Registrations, RegisteredBytes int // cudaHostRegister
	ManagedAllocs, ManagedBytes    int // cudaMallocManaged
	Streams, Events                int
	Modules                        int // cuModuleLoadDataEx
	PeerAccesses                   int // cudaDeviceEnablePeerAccess
	PendingOps                     int // operations enqueued and not run; of destroyed streams, all but records of events
}

// String lists the counts that are not zero: "1 stream, 2 registrations (8192 bytes)".
func (o Outstanding) String() string {
	var parts []string
	add := func(n int, what string, bytes int) {
		if n == 0 {
			return
		}
		part := fmt.Sprintf("%d %s", n, what)
		if n != 1 {
			part += "s"
		}
		if bytes > 0 {
			part += fmt.Sprintf(" (%d bytes)", bytes)
		}
		parts = append(parts, part)
	}
	add(o.DeviceAllocs, "device allocation", o.DeviceBytes)
	add(o.HostAllocs, "host allocation", o.HostBytes)
	add(o.Registrations, "registration", o.RegisteredBytes)
	add(o.ManagedAllocs, "managed allocation", o.ManagedBytes)
	add(o.Streams, "stream", 0)
	add(o.Events, "event", 0)
	add(o.Modules, "module", 0)
	add(o.PeerAccesses, "enabled peer", 0)
	add(o.PendingOps, "pending operation", 0)
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// Outstanding counts what has not been released yet.
func (s *Sim) Outstanding() Outstanding {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.outstanding()
}

// PendingCopies returns how many of the pending operations use memory: copies, what fills
// it, and kernels. Records of events do not.
func (s *Sim) PendingCopies() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.queued() {
		if o.move != nil {
			n++
		}
	}
	return n
}

// queued iterates over the operations that have not run, with their streams. It needs mu.
func (s *Sim) queued() iter.Seq2[*stream, *operation] {
	return func(yield func(*stream, *operation) bool) {
		for _, d := range s.devices {
			for st := range d.streams {
				for _, o := range st.queue {
					if !yield(st, o) {
						return
					}
				}
			}
		}
	}
}

func (s *Sim) outstanding() Outstanding {
	o := Outstanding{Streams: len(s.streams), Events: len(s.events), Modules: len(s.modules)}
	for st, op := range s.queued() {
		if !st.destroyed || op.record == nil { // the last event of a stream that was destroyed uses nothing
			o.PendingOps++
		}
	}
	for _, d := range s.devices {
		o.PeerAccesses += len(d.peers)
	}
	for _, b := range s.blocks.list {
		count, bytes := &o.DeviceAllocs, &o.DeviceBytes
		switch b.kind {
		case hostBlock:
			count, bytes = &o.HostAllocs, &o.HostBytes
		case registeredBlock:
			count, bytes = &o.Registrations, &o.RegisteredBytes
		case managedBlock:
			count, bytes = &o.ManagedAllocs, &o.ManagedBytes
		}
		if b.freeing {
			continue
		}
		*count++
		*bytes += b.size
	}
	return o
}

// detailed is the number of blocks that an error lists one by one.
const detailed = 5

// outstandingError is nil if nothing is outstanding. It needs mu.
func (s *Sim) outstandingError() error {
	o := s.outstanding()
	if o == (Outstanding{}) {
		return nil
	}
	var parts []string
	for _, b := range s.blocks.list {
		if len(parts) < detailed && !b.freeing {
			what := [...]string{"device memory", "managed memory", "host memory", "registration"}[b.kind]
			parts = append(parts, fmt.Sprintf("%s of device %d at %#x, %d bytes", what, b.dev.ordinal, b.addr, b.size))
		}
	}
	msg := fmt.Sprintf("%s: not released: %s", s, o)
	if len(parts) > 0 {
		msg += ": " + strings.Join(parts, "; ")
	}
	return errors.New(msg)
}
