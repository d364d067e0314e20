package pool

import (
	"fmt"
	"slices"
	"time"

	"github.com/gopinned/pinned/hostmem"
)

// Stats are figures of a pool's memory. ReservedBytes is the sum of InUseBytes,
// PendingBytes, CachedBytes and SlackBytes.
type Stats struct {
	Leases            int // leases that are not released
	RequestedBytes    int // bytes of these leases
	InUseBytes        int // bytes of their blocks
	PeakInUseBytes    int // maximum of InUseBytes
	PendingBytes      int // bytes of released blocks that the GPU may use
	CachedBytes       int // bytes of idle blocks
	SlackBytes        int // bytes of arenas without blocks, and of memory being pinned or unmapped
	ReservedBytes     int // pinned bytes
	PeakReservedBytes int // maximum of ReservedBytes
	MaxBytes          int // Options.MaxBytes
	Hits, Misses      int // leases that found a block, and that needed a new one
	Waits             int // Gets that reached a limit
	Waiting           int // Gets that wait now
	TrimmedBytes      int // bytes unmapped since New
	Failures          int // calls that failed to pin or unmap
	Lost              int // leases whose handles were garbage collected without Release, in debug mode
}

// Stats returns the present figures. It does not block. It reads them one after the other
// while other goroutines change them.
func (p *Pool) Stats() Stats { return p.impl().stats() }

func (p *core) stats() Stats {
	if p == nil {
		return Stats{}
	}
	p.mu.Lock()
	reserved, peak := p.reserved, p.peakReserved
	p.mu.Unlock()
	st := Stats{
		ReservedBytes: reserved, PeakReservedBytes: peak,
		MaxBytes: p.o.MaxBytes, PendingBytes: p.pending.Bytes(),
		Waits: int(p.waits.Load()), Waiting: int(p.waiting.Load()),
		TrimmedBytes: int(p.trimmed.Load()), Failures: int(p.failures.Load()), Lost: int(p.lost.Load()),
	}
	if p.closed() {
		st.Waiting = max(0, st.Waiting-1) // Close
	}
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		st.Leases += s.leases
		st.RequestedBytes += s.requested
		st.InUseBytes += s.inUse
		st.PeakInUseBytes = p.peakInUse
		st.CachedBytes += s.cached
		st.Hits += s.hits
		st.Misses += s.misses
		s.mu.Unlock()
	}
	st.SlackBytes = max(0, st.ReservedBytes-st.InUseBytes-st.PendingBytes-st.CachedBytes)
	return st
}

// Outstanding lists the leases that are not released, the largest first, by the
// bytes of their blocks. A lost lease stays in the list: its memory may be in use and is
// never reused. In debug mode (PINNED_DEBUG=1, or cudart.Options.Debug) the list has the time
// and the stack of each Get, and reports which leases are lost. It does not block.
func (p *Pool) Outstanding() []hostmem.Holding { return p.impl().outstanding() }

func (p *core) outstanding() []hostmem.Holding {
	if p == nil {
		return nil
	}
	var out []hostmem.Holding
	add := func(b *block) {
		if b.requested == 0 {
			return
		}
		h := hostmem.Holding{Kind: "lease", Label: p.o.Buffer.Label, Bytes: b.Size}
		if t := b.trace.Load(); t != nil {
			h.Since, h.Stack, h.Lost = t.since, t.stack, t.lost.Load()
		}
		out = append(out, h)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.shards { // so that no lease begins or ends
		p.shards[i].mu.Lock()
		defer p.shards[i].mu.Unlock()
	}
	for b := range p.large {
		add(b)
	}
	for _, a := range p.arenas {
		for s := range a.slabs {
			for _, b := range s.blocks {
				add(b)
			}
		}
	}
	slices.SortFunc(out, func(a, b hostmem.Holding) int { return b.Bytes - a.Bytes })
	for i := range out {
		out[i].ID = uint64(i + 1)
	}
	return out
}

// whose returns where the largest outstanding lease was made, in debug mode.
func (p *core) whose() string {
	if !p.debug {
		return " (PINNED_DEBUG=1 shows whose)"
	}
	out := p.outstanding()
	if len(out) == 0 || out[0].Stack == "" {
		return ""
	}
	return fmt.Sprintf(", such as %v since %v, made by\n%s", out[0], out[0].Since.Format(time.RFC3339), out[0].Stack)
}
