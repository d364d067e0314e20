package cudasim

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/gopinned/pinned/internal/raw"
)

// managedPage is the size in which managed memory moves.
const managedPage = 64 << 10

// A pageState is the state of one page of managed memory. Places are sets of bits: bit 0
// is the host, bit i+1 device i.
type pageState struct {
	resident   uint32 // set of locations that have the bytes, 0 if the page was never touched
	accessedBy uint32 // advised
	preferred  int8   // advised: ordinal, hostLocation or noLocation
	prefetched int8   // where it was prefetched to last
	readMostly bool   // advised
	since      uint64 // when it came to its device: see Sim.arrivals
}

// locationBit is the bit of a location in a set.
func locationBit(location int) uint32 { return 1 << (location + 1) }

// locationsOf lists the locations of a set, the host last.
func locationsOf(set uint32) []int {
	var locations []int
	for at := set &^ 1; at != 0; at &= at - 1 {
		locations = append(locations, bits.TrailingZeros32(at)-1)
	}
	if set&1 != 0 {
		locations = append(locations, hostLocation)
	}
	return locations
}

func newPages(size int) []pageState {
	pages := make([]pageState, (size+managedPage-1)/managedPage)
	for i := range pages {
		pages[i].preferred, pages[i].prefetched = noLocation, noLocation
	}
	return pages
}

// pages are those of a range of a managed block, also those that it has a part of.
func (s span) pages() []pageState {
	first := int(s.addr-s.block.addr) / managedPage
	last := (int(s.addr-s.block.addr) + s.n - 1) / managedPage
	return s.block.pages[first : last+1]
}

// put sets the locations that have a page.
func (s *Sim) put(p *pageState, locations uint32) {
	for _, d := range s.devices {
		bit := locationBit(d.ordinal)
		switch {
		case p.resident&bit == locations&bit:
		case locations&bit != 0:
			d.managed += managedPage
		default:
			d.managed -= managedPage
		}
	}
	if locations&^p.resident&^1 != 0 {
		s.arrivals++
		p.since = s.arrivals
	}
	p.resident = locations
}

// bring puts a page at a place. If keep is set, the other locations keep theirs.
func (s *Sim) bring(p *pageState, location int, keep bool) {
	locations := locationBit(location)
	if d := s.device(location); d != nil && p.resident&locations == 0 && d.free() < managedPage {
		s.evict(d)
	}
	if keep {
		locations |= p.resident
	}
	s.put(p, locations)
}

// evict moves the page that came to the device first to the host, or drops it there if
// another place has it. It does nothing if there is none.
func (s *Sim) evict(d *device) {
	var oldest *pageState
	for _, b := range s.blocks.list {
		for i := range b.pages {
			if p := &b.pages[i]; p.resident&locationBit(d.ordinal) != 0 && (oldest == nil || p.since < oldest.since) {
				oldest = p
			}
		}
	}
	if oldest == nil {
		return
	}
	others := oldest.resident &^ locationBit(d.ordinal)
	if others == 0 {
		others = locationBit(hostLocation)
	}
	s.traffic.Evictions++
	s.put(oldest, others)
}

// touch is an access to pages by a place, a device or the host. It returns how many of
// them moved or were made there by page faults.
func (s *Sim) touch(pages []pageState, location int, write bool) (faults int) {
	bit := locationBit(location)
	for i := range pages {
		p := &pages[i]
		switch {
		case p.resident&bit != 0:
			if write && p.resident != bit {
				s.put(p, bit) // the copies of others are not valid any more
			}
			continue
		case p.resident == 0 && p.preferred != noLocation && int(p.preferred) != location && p.accessedBy&bit != 0:
			s.bring(p, int(p.preferred), false)
			continue
		case p.resident != 0 && (p.accessedBy&bit != 0 || p.atPreferred()):
			if write {
				s.put(p, p.resident&-p.resident) // accessed where it lies
			}
			continue
		}
		s.bring(p, location, p.readMostly && !write)
		faults++
	}
	if location == hostLocation {
		s.traffic.FaultsOnHost += faults
	} else {
		s.traffic.FaultsOnDevice += faults
	}
	return faults
}

// atPreferred reports whether the page's preferred location has it.
func (p *pageState) atPreferred() bool {
	return p.preferred != noLocation && p.resident&locationBit(int(p.preferred)) != 0
}

// dropPages removes all pages of a block that is released.
func (b *block) dropPages() {
	for i := range b.pages {
		b.dev.sim.put(&b.pages[i], 0)
	}
	b.pages = nil
}

// free returns the bytes of device memory that are neither allocated nor have managed
// pages.
func (d *device) free() int { return d.cfg.Memory - d.used - d.managed }

// managed returns a range of managed memory, and false unless one allocation contains all of it. It needs mu.
func (s *Sim) managed(addr uintptr, n int) (span, bool) {
	b := s.blocks.find(addr)
	return span{addr: addr, n: n, block: b}, b != nil && b.kind == managedBlock && n > 0 && addr+uintptr(n) <= b.end()
}

// ManagedResidence counts where the n bytes of managed memory at addr lie, by place:
// device ordinals, -1 for the host, -2 for bytes that were never touched. Memory that
// is read mostly may lie at several. It is nil if they are not managed memory.
func (s *Sim) ManagedResidence(addr uintptr, n int) map[int]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.managed(addr, n)
	if !ok {
		return nil
	}
	at, b := make(map[int]int), m.block
	first := int(addr-b.addr) / managedPage
	for i, p := range m.pages() {
		begin := max(addr, b.addr+uintptr((first+i)*managedPage))
		end := min(addr+uintptr(n), b.addr+uintptr((first+i+1)*managedPage))
		if p.resident == 0 {
			at[noLocation] += int(end - begin)
		}
		for _, location := range locationsOf(p.resident) {
			at[location] += int(end - begin)
		}
	}
	return at
}

func (s *Sim) managedTraffic() raw.ManagedTraffic {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.traffic
}

// TouchManaged tells the simulator that the CPU reads or writes n bytes of managed memory
// at addr: it cannot see accesses of the process. The pages move to the host as page
// faults move them. Where the attribute ConcurrentManagedAccess is 0 and work is pending,
// a real process crashes: that is a [Misuse] of the kind "busy managed memory". It is false if they are not
// managed memory.
func (s *Sim) TouchManaged(addr uintptr, n int, write bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	accessed, ok := s.managed(addr, n)
	if !ok {
		return false
	}
	if d := accessed.block.dev; !d.concurrent() {
		for _, m := range d.marks() {
			if m.stream.waiting(m.seq) {
				s.record(Misuse{Kind: busyManagedMemory, Call: "access by the CPU", Current: -1, Want: -1,
					Detail: "the device works, and cannot access managed memory at the same time as the CPU"})
				break
			}
		}
		return true
	}
	s.touch(accessed.pages(), hostLocation, write)
	return true
}

// same returns what all pages have in common, or otherwise other.
func same[T cmp.Ordered](pages []pageState, of func(pageState) T, other T) T {
	first := of(pages[0])
	if slices.ContainsFunc(pages, func(p pageState) bool { return of(p) != first }) {
		return other
	}
	return first
}
