package cudasim

import "slices"

// StructSize returns the size of the struct that a function fills.
func (s *Sim) StructSize(fn string) int { return s.structSize(fn) }

// ManagedState is the state of a page of a managed allocation after prefetches, accesses
// and advice. Pages have 64 KiB.
type ManagedState struct {
	Bytes             int // of the allocation
	Location          int // where the page lies: device ordinal, -1 for the host or if it was never touched
	ReadMostly        bool
	PreferredLocation int   // device ordinal, -1 for the host, -2 for none
	AccessedBy        []int // device ordinals and -1 for the host, sorted
}

// Managed returns the state of the page that contains an address, and false if the address is
// not in managed memory. If several locations have the page, Location is a device.
func (s *Sim) Managed(addr uintptr) (ManagedState, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks.find(addr)
	if b == nil || b.kind != managedBlock {
		return ManagedState{}, false
	}
	p := b.pages[int(addr-b.addr)/managedPage]
	m := ManagedState{Bytes: b.size, Location: hostLocation, ReadMostly: p.readMostly, PreferredLocation: int(p.preferred),
		AccessedBy: locationsOf(p.accessedBy)}
	if at := locationsOf(p.resident); len(at) > 0 {
		m.Location = at[0]
	}
	slices.Sort(m.AccessedBy)
	return m, true
}
