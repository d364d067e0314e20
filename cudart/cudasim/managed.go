package cudasim

import "github.com/gopinned/pinned/cudart"

// Places of managed memory that are not a device.
const (
	hostLocation = -1 // cudaCpuDeviceId
	noLocation   = -2 // cudaInvalidDeviceId
)

// concurrent reports whether the device can access managed memory while the CPU does.
func (d *device) concurrent() bool {
	return d.cfg.Attributes[cudart.AttrConcurrentManagedAccess] != 0
}

// mallocManaged populates nothing, except for a device without concurrent access: it
// holds all its managed memory.
func (c *call) mallocManaged() cudart.Code {
	flags, n := c.u32(2), c.num(1)
	switch {
	case c.ptr(0) == 0, n <= 0, flags != 1 && flags != 2:
		return cudart.ErrInvalidValue
	case c.dev.cfg.Attributes[cudart.AttrManagedMemory] == 0:
		return cudart.ErrNotSupported
	case !c.dev.concurrent() && n > c.dev.free():
		return cudart.ErrMemoryAllocation
	}
	b, err := c.blocks.newHost(managedBlock, n, c.dev, flags)
	if err != nil {
		return cudart.ErrMemoryAllocation
	}
	b.pages = newPages(n)
	if !c.dev.concurrent() {
		for i := range b.pages {
			c.Sim.put(&b.pages[i], locationBit(c.dev.ordinal))
		}
	}
	return put(c, 0, b.addr)
}

// managedRange checks that a range is managed memory.
func (c *call) managedRange(at uintptr, n int) (span, cudart.Code) {
	s, code := c.span(at, n)
	if code != success {
		return span{}, code
	}
	if n <= 0 || s.block == nil || s.block.kind != managedBlock {
		return span{}, cudart.ErrInvalidValue
	}
	return s, success
}

// checkOrdinal checks a location that is an ordinal, as the ABI up to 12.1 passes it.
func (c *call) checkOrdinal(ordinal int) (int, cudart.Code) {
	if ordinal != hostLocation && c.device(ordinal) == nil {
		return noLocation, cudart.ErrInvalidDevice
	}
	return ordinal, success
}

// Types of cudaMemLocation.
const (
	locationDevice          = 1
	locationHost            = 2
	locationHostNUMA        = 3
	locationHostNUMACurrent = 4
)

// memLocation is cudaMemLocation.
type memLocation struct{ kind, id int32 }

// location unpacks a cudaMemLocation, two ints in one register.
func (c *call) location(i int) (int, cudart.Code) {
	return c.ordinalOf(memLocation{int32(c.i32(i)), int32(uint64(c.ptr(i)) >> 32)})
}

func (c *call) ordinalOf(l memLocation) (int, cudart.Code) {
	switch l.kind {
	case locationDevice:
		if c.device(int(l.id)) == nil {
			return noLocation, cudart.ErrInvalidDevice
		}
		return int(l.id), success
	case locationHost, locationHostNUMACurrent:
		return hostLocation, success
	case locationHostNUMA:
		if l.id >= 0 {
			return hostLocation, success
		}
	}
	return noLocation, cudart.ErrInvalidValue
}

func (c *call) prefetchToOrdinal() cudart.Code {
	location, code := c.checkOrdinal(c.i32(2))
	if code != success {
		return code
	}
	return c.prefetch(location, c.ptr(3))
}

func (c *call) prefetchToLocation() cudart.Code {
	location, code := c.location(2)
	switch {
	case code != success:
		return code
	case c.u32(3) != 0:
		return cudart.ErrInvalidValue
	}
	return c.prefetch(location, c.ptr(4))
}

func (c *call) prefetch(location int, stream uintptr) cudart.Code {
	st, code := c.stream(stream)
	if code != success {
		return code
	}
	s, code := c.managedRange(c.ptr(0), c.num(1))
	if code != success {
		return code
	}
	o, code := c.migration(s, location, st)
	if code != success {
		return code
	}
	return c.enqueue(st, o)
}

// migration returns the stream operation of a prefetch.
func (c *call) migration(s span, location int, st *stream) (*operation, cudart.Code) {
	d := c.device(location)
	at := d
	if at == nil {
		at = st.dev
	}
	if !at.concurrent() {
		return nil, cudart.ErrInvalidDevice
	}
	o := &operation{engine: &at.toHost, uses: []*block{s.block}}
	speed := at.cfg.Link.PrefetchToHost
	if d != nil {
		o.engine, speed = &d.toDevice, d.cfg.Link.PrefetchToDevice
	}
	o.measure = func() {
		if s.block.gone {
			return
		}
		moves := 0
		for _, p := range s.pages() {
			if p.resident&locationBit(location) == 0 {
				moves++
			}
		}
		if moves > 0 {
			o.took = speed.time(min(moves*managedPage, s.n))
		}
	}
	o.finish = func() {
		if s.block.gone {
			return
		}
		pages := s.pages()
		for i := range pages {
			p := &pages[i]
			c.Sim.bring(p, location, p.readMostly)
			p.prefetched = int8(location)
		}
	}
	return o, success
}

// discardJunk fills memory whose contents were discarded.
const discardJunk = 0xd5

// discardBatch takes the contents of ranges away.
func (c *call) discardBatch(st *stream) cudart.Code {
	count := c.num(2)
	switch {
	case c.ptr(4) <= streamLegacy, count <= 0, c.ptr(3) != 0, c.ptr(0) == 0 || c.ptr(1) == 0:
		return cudart.ErrInvalidValue
	case !st.dev.concurrent():
		return cudart.ErrInvalidDevice
	}
	ptrs, sizes := array[uintptr](c.ptr(0), count), array[int](c.ptr(1), count)
	spans, code := make([]span, count), success
	for i := range spans {
		if spans[i], code = c.managedRange(ptrs[i], sizes[i]); code != success {
			return code
		}
	}
	for _, s := range spans {
		o := &operation{uses: []*block{s.block}, move: func() cudart.Code {
			set(s.bytes(), discardJunk)
			return success
		}, finish: func() {
			if s.block.gone {
				return
			}
			// A page that the range has a part of keeps its place.
			at := int(s.addr - s.block.addr)
			for i := (at + managedPage - 1) / managedPage; (i+1)*managedPage <= at+s.n || at+s.n == s.block.size && i < len(s.block.pages); i++ {
				c.Sim.put(&s.block.pages[i], 0)
			}
		}}
		if code := c.enqueue(st, o); code != success {
			return code
		}
	}
	return success
}

func (c *call) adviseOrdinal() cudart.Code {
	location, code := c.checkOrdinal(c.i32(3))
	return c.advise(location, code)
}

func (c *call) adviseLocation() cudart.Code {
	location, code := c.location(3)
	return c.advise(location, code)
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
func (c *call) advise(location int, placed cudart.Code) cudart.Code {
	s, code := c.managedRange(c.ptr(0), c.num(1))
	if code != success {
		return code
	}
	advice := c.i32(2)
	if advice == setPreferredLocation || advice == setAccessedBy || advice == unsetAccessedBy {
		if placed != success {
			return placed
		}
	}
	if advice < setReadMostly || advice > unsetAccessedBy {
		return cudart.ErrInvalidValue
	}
	at := c.device(location)
	if (advice == setPreferredLocation || advice == setAccessedBy) && at != nil && !at.concurrent() {
		return cudart.ErrInvalidDevice
	}
	pages := s.pages()
	for i := range pages {
		c.advisePage(&pages[i], advice, location)
	}
	return success
}

// advisePage applies advice to a page. As with the real driver, a page that is not read
// mostly any more stays at its preferred location if that has it, else on the host if that
// has it, else on one of the devices.
func (s *Sim) advisePage(p *pageState, advice, location int) {
	switch advice {
	case setReadMostly:
		p.readMostly = true
	case unsetReadMostly:
		p.readMostly = false
		stay := p.resident & -p.resident
		if p.atPreferred() {
			stay = locationBit(int(p.preferred))
		}
		s.put(p, stay)
	case setPreferredLocation:
		p.preferred = int8(location)
	case unsetPreferredLocation:
		p.preferred = noLocation
	case setAccessedBy:
		p.accessedBy |= locationBit(location)
	case unsetAccessedBy:
		p.accessedBy &^= locationBit(location)
	}
}

// Attributes of cudaMemRangeGetAttribute.
const (
	rangeReadMostly = iota + 1
	rangePreferredLocation
	rangeAccessedBy
	rangeLastPrefetchLocation
)

func (c *call) memRangeGetAttribute() cudart.Code {
	s, code := c.managedRange(c.ptr(3), c.num(4))
	size := c.num(1)
	switch {
	case code != success:
		return code
	case c.ptr(0) == 0, size < 4, size%4 != 0:
		return cudart.ErrInvalidValue
	}
	to, pages := array[int32](c.ptr(0), size/4), s.pages()
	switch attribute := c.i32(2); {
	case attribute == rangeAccessedBy:
		set := same(pages, func(p pageState) uint32 { return p.accessedBy }, 0)
		locations := locationsOf(set)
		for i := range to {
			to[i] = noLocation
			if i < len(locations) {
				to[i] = int32(locations[i])
			}
		}
	case size != 4:
		return cudart.ErrInvalidValue
	case attribute == rangeReadMostly:
		to[0] = same(pages, func(p pageState) int32 {
			if p.readMostly {
				return 1
			}
			return 0
		}, 0)
	case attribute == rangePreferredLocation:
		to[0] = int32(same(pages, func(p pageState) int8 { return p.preferred }, noLocation))
	case attribute == rangeLastPrefetchLocation:
		to[0] = int32(same(pages, func(p pageState) int8 { return p.prefetched }, noLocation))
	default:
		return cudart.ErrInvalidValue
	}
	return success
}
