package cudasim

import (
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// managedState is the state of managed memory after prefetches and advice.
type managedState struct {
	resident   *device // nil is the host
	readMostly bool
	preferred  int // ordinal, host or nowhere
	accessedBy []int
}

// Places of managed memory that are not a device.
const (
	hostPlace = -1 // cudaCpuDeviceId
	noPlace   = -2
)

// ManagedState is the state of a managed allocation after prefetches and advice.
type ManagedState struct {
	Bytes             int
	Location          int // where the last prefetch that ran put it: device ordinal, -1 for the host
	ReadMostly        bool
	PreferredLocation int   // device ordinal, -1 for the host, -2 for none
	AccessedBy        []int // device ordinals and -1 for the host, sorted
}

// Managed returns the state of the managed allocation that contains an address,
// and false if there is none. A prefetch or advice for a part of an allocation
// changes the state of all of it.
func (s *Sim) Managed(addr uintptr) (ManagedState, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks.find(addr)
	if b == nil || b.kind != managedBlock {
		return ManagedState{}, false
	}
	m := ManagedState{Bytes: b.size, Location: hostPlace, ReadMostly: b.managed.readMostly,
		PreferredLocation: b.managed.preferred, AccessedBy: slices.Clone(b.managed.accessedBy)}
	if d := b.managed.resident; d != nil {
		m.Location = d.ordinal
	}
	slices.Sort(m.AccessedBy)
	return m, true
}

func (c *call) mallocManaged() cudart.Code {
	flags := c.u32(2)
	switch {
	case c.ptr(0) == 0, c.num(1) <= 0, flags != 1 && flags != 2:
		return cudart.ErrInvalidValue
	case c.dev.cfg.Attributes[cudart.AttrManagedMemory] == 0:
		return cudart.ErrNotSupported
	}
	b, err := c.blocks.newHost(managedBlock, c.num(1), c.dev, flags)
	if err != nil {
		return cudart.ErrMemoryAllocation
	}
	b.managed.preferred = noPlace
	return put(c, 0, b.addr)
}

// managedRange returns the managed block that contains the range of the first two
// arguments.
func (c *call) managedRange() (*block, cudart.Code) {
	s, code := c.span(c.ptr(0), c.num(1))
	if code != cudart.Success {
		return nil, code
	}
	if c.num(1) <= 0 || s.block == nil || s.block.kind != managedBlock {
		return nil, cudart.ErrInvalidValue
	}
	return s.block, cudart.Success
}

// place checks a place as an ordinal, which is how the ABI up to 12.1 passes it.
func (c *call) place(ordinal int) (int, cudart.Code) {
	if ordinal != hostPlace && c.device(ordinal) == nil {
		return noPlace, cudart.ErrInvalidDevice
	}
	return ordinal, cudart.Success
}

// Types of cudaMemLocation.
const (
	locationDevice          = 1
	locationHost            = 2
	locationHostNUMA        = 3
	locationHostNUMACurrent = 4
)

// location unpacks a cudaMemLocation, two ints in one register.
func (c *call) location(i int) (int, cudart.Code) {
	id := int(int32(uint64(c.ptr(i)) >> 32))
	switch c.i32(i) {
	case locationDevice:
		if c.device(id) == nil {
			return noPlace, cudart.ErrInvalidDevice
		}
		return id, cudart.Success
	case locationHost, locationHostNUMACurrent:
		return hostPlace, cudart.Success
	case locationHostNUMA:
		if id >= 0 {
			return hostPlace, cudart.Success
		}
	}
	return noPlace, cudart.ErrInvalidValue
}

func (c *call) prefetchToOrdinal() cudart.Code {
	place, code := c.place(c.i32(2))
	if code != cudart.Success {
		return code
	}
	return c.prefetch(place, c.ptr(3))
}

func (c *call) prefetchToLocation() cudart.Code {
	place, code := c.location(2)
	switch {
	case code != cudart.Success:
		return code
	case c.u32(3) != 0:
		return cudart.ErrInvalidValue
	}
	return c.prefetch(place, c.ptr(4))
}

func (c *call) prefetch(place int, stream uintptr) cudart.Code {
	st, code := c.stream(stream)
	if code != cudart.Success {
		return code
	}
	b, code := c.managedRange()
	if code != cudart.Success {
		return code
	}
	d := c.device(place)
	at := d
	if at == nil {
		at = st.dev
	}
	if at.cfg.Attributes[cudart.AttrConcurrentManagedAccess] == 0 {
		return cudart.ErrInvalidDevice
	}
	o := &operation{engine: &at.toHost, uses: []*block{b}, finish: func() { b.managed.resident = d }}
	switch {
	case b.managed.resident == d:
	case d != nil:
		o.engine, o.took = &d.toDevice, d.cfg.Link.PrefetchToDevice.time(c.num(1))
	default:
		o.took = at.cfg.Link.PrefetchToHost.time(c.num(1))
	}
	return c.enqueue(st, o)
}

func (c *call) adviseOrdinal() cudart.Code {
	place, code := c.place(c.i32(3))
	return c.advise(place, code)
}

func (c *call) adviseLocation() cudart.Code {
	place, code := c.location(3)
	return c.advise(place, code)
}

// Kinds of cudaMemoryAdvise.
const (
	setReadMostly = iota + 1
	unsetReadMostly
	setPreferredLocation
	unsetPreferredLocation
	setAccessedBy
	unsetAccessedBy
)

// advise ignores the place for advice that needs none.
func (c *call) advise(place int, placed cudart.Code) cudart.Code {
	b, code := c.managedRange()
	if code != cudart.Success {
		return code
	}
	advice := c.i32(2)
	if advice == setPreferredLocation || advice == setAccessedBy || advice == unsetAccessedBy {
		if placed != cudart.Success {
			return placed
		}
	}
	m := &b.managed
	switch advice {
	case setReadMostly, unsetReadMostly:
		m.readMostly = advice == setReadMostly
	case setPreferredLocation:
		m.preferred = place
	case unsetPreferredLocation:
		m.preferred = noPlace
	case setAccessedBy:
		if !slices.Contains(m.accessedBy, place) {
			m.accessedBy = append(m.accessedBy, place)
		}
	case unsetAccessedBy:
		m.accessedBy = slices.DeleteFunc(m.accessedBy, func(p int) bool { return p == place })
	default:
		return cudart.ErrInvalidValue
	}
	return cudart.Success
}
