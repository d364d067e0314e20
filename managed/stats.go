package managed

// Counts count allocations.
type Counts struct {
	Allocated int // bytes that are allocated now
	Peak      int // maximum of Allocated since New
	Allocs    int // number of allocations since New
	Frees     int // number of closed allocations since New
}

// Stats are the counts of an Allocator at one moment.
type Stats struct {
	Counts
	Labels   map[string]Counts // by label; the peaks may belong to different moments
	OnHost   int               // bytes that are allocated now and stay on the host: see Options.Oversubscribe
	Failures int               // number of failed Alloc
}

func (c *Counts) alloc(n int) {
	c.Allocs++
	c.Allocated += n
	c.Peak = max(c.Peak, c.Allocated)
}

func (c *Counts) free(n int) {
	c.Frees++
	c.Allocated -= n
}

// Stats returns the counts. It does not block.
func (a *Allocator) Stats() Stats {
	if !a.made() {
		return Stats{}
	}
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	s := Stats{Counts: a.total, Labels: make(map[string]Counts, len(a.labels)), OnHost: a.onHost, Failures: a.failed}
	for label, c := range a.labels {
		s.Labels[label] = *c
	}
	return s
}
