package managed

// Counts are figures of allocations.
type Counts struct {
	Allocated int // bytes that are allocated now
	Peak      int // maximum of Allocated since New or ResetPeaks
	Allocs    int // allocations so far
	Frees     int // memory closed so far
}

// Stats are the figures of an Allocator. They are of one moment.
type Stats struct {
	Counts
	Labels   map[string]Counts // by label; their peaks may be of different moments
	OnHost   int               // bytes that are allocated now and stay on the host: see Options.Oversubscribe
	Failures int               // of Alloc and AllocLabel, so far
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

// Stats returns the figures.
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

// ResetPeaks sets all peaks to the bytes that are allocated now.
func (a *Allocator) ResetPeaks() {
	if !a.made() {
		return
	}
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	a.total.Peak = a.total.Allocated
	for _, c := range a.labels {
		c.Peak = c.Allocated
	}
}
