package hostmem

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// PoolStats account for a pool's memory. KeptBytes is the sum of InUseBytes,
// PendingBytes, CachedBytes and SpareBytes.
type PoolStats struct {
	Leases         int // out now
	AskedBytes     int // that they asked for
	InUseBytes     int // that their blocks hold
	PeakInUseBytes int // most that InUseBytes ever was
	PendingBytes   int // released, and not known to be done with by the GPU
	CachedBytes    int // ready to be lent
	SpareBytes     int // of arenas and not cut into blocks, or what could not be given back
	KeptBytes      int // pinned
	PeakKeptBytes  int // most that KeptBytes ever was
	MaxBytes       int // PoolOptions.MaxBytes
	Hits, Misses   int // leases that found a block, and that needed a new one
	Waits          int // Gets that met the limit
	Waiting        int // of these, those that wait now
	TrimmedBytes   int // given back to the system so far
	Failures       int // pinning, giving back, or recording an event failed
	Lost           int // leases that nobody can release any more, in debug mode
}

// A gauge is a number that knows how large it was at most.
type gauge struct{ now, peak atomic.Int64 }

func (g *gauge) add(n int) {
	now := g.now.Add(int64(n))
	for peak := g.peak.Load(); now > peak && !g.peak.CompareAndSwap(peak, now); peak = g.peak.Load() {
	}
}

func (g *gauge) value() int { return int(g.now.Load()) }

// Stats returns the account of now. Its numbers are read one after the other
// while others work on.
func (p *Pool) Stats() PoolStats { return p.core.stats() }

func (p *poolCore) stats() PoolStats {
	st := PoolStats{
		KeptBytes: p.kept.value(), PeakKeptBytes: int(p.kept.peak.Load()),
		MaxBytes: p.o.MaxBytes,
		Waits:    int(p.waits.Load()), Waiting: int(p.gate.Load() % gateClosed),
		TrimmedBytes: int(p.trimmed.Load()), Failures: int(p.failures.Load()), Lost: int(p.lost.Load()),
	}
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		st.Leases += s.leases
		st.AskedBytes += s.asked
		st.InUseBytes += s.inUse
		st.PeakInUseBytes = p.peakInUse
		st.PendingBytes += s.waiting
		st.CachedBytes += s.cached
		st.Hits += s.hits
		st.Misses += s.misses
		s.mu.Unlock()
	}
	st.SpareBytes = max(0, st.KeptBytes-st.InUseBytes-st.PendingBytes-st.CachedBytes)
	return st
}

// Outstanding lists the leases that are out, the largest first, by the bytes
// of their blocks. A lease that was lost stays in the list: its memory may be
// in use and is never taken back. In debug mode (PINNED_DEBUG=1, or
// cudart.Options.Debug) the list tells since when, who, and which are lost.
func (p *Pool) Outstanding() []Holding { return p.core.outstanding() }

func (p *poolCore) outstanding() []Holding {
	home := make(map[*block]bool)
	for i := range p.shards {
		s := &p.shards[i]
		s.mu.Lock()
		for class := range classes {
			for b := s.free[class].first; b != nil; b = b.next {
				home[b] = true
			}
			for b := s.pending[class].first; b != nil; b = b.next {
				home[b] = true
			}
		}
		s.mu.Unlock()
	}
	var out []Holding
	add := func(b *block) {
		if home[b] {
			return
		}
		h := Holding{Kind: "lease", Label: p.o.Buffer.Label, Bytes: b.size}
		if t := b.trace.Load(); t != nil {
			h.Since, h.Stack, h.Lost = t.since, t.stack, t.lost.Load()
		}
		out = append(out, h)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
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
	slices.SortFunc(out, func(a, b Holding) int { return b.Bytes - a.Bytes })
	for i := range out {
		out[i].ID = uint64(i + 1)
	}
	return out
}

// whose tells where the largest outstanding lease was made, in debug mode.
func (p *poolCore) whose() string {
	if !p.debug {
		return " (PINNED_DEBUG=1 tells whose)"
	}
	out := p.outstanding()
	if len(out) == 0 || out[0].Stack == "" {
		return ""
	}
	return fmt.Sprintf(", such as %v since %v, made by\n%s", out[0], out[0].Since.Format(time.RFC3339), out[0].Stack)
}
