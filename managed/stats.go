package managed

// Counts are figures of allocations.
type Counts struct {
	Allocated int // bytes that are allocated now
	Peak      int // most bytes that were allocated at a time, since New or ResetPeaks
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

type counts struct{ Counts }

func (c *counts) alloc(n int) {
	c.Allocs++
	c.Allocated += n
	c.Peak = max(c.Peak, c.Allocated)
}

func (c *counts) free(n int) {
	c.Frees++
	c.Allocated -= n
}

// Stats returns the figures.
func (a *Allocator) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Stats{Counts: a.total.Counts, Labels: make(map[string]Counts, len(a.labels)), OnHost: a.onHost, Failures: a.failed}
	for label, c := range a.labels {
		s.Labels[label] = c.Counts
	}
	return s
}

// ResetPeaks sets all peaks to what is allocated now.
func (a *Allocator) ResetPeaks() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.total.Peak = a.total.Allocated
	for _, c := range a.labels {
		c.Peak = c.Allocated
	}
}
