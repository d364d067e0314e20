package hostmem

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// Pageable is ordinary memory, neither resident at first nor pinned: for large
// results that come from a GPU and stay. It is zero, and on huge pages where the host
// has them, so that the first write is twice as fast as to a new Go slice. Its methods
// may be called from any goroutine. The zero Pageable, and nil, are empty.
type Pageable struct{ region *pages.Region }

// AllocPageable maps n bytes (mmap). n must be positive. It does not block. Errors are the
// system's.
func AllocPageable(n int) (*Pageable, error) {
	r, err := pages.Map(context.Background(), n, pages.Options{Fork: true, Dump: true, System: pages.Host()})
	if err != nil {
		return nil, fmt.Errorf("hostmem: allocate %d pageable bytes: %w", n, err)
	}
	return &Pageable{region: r}, nil
}

func (p *Pageable) empty() bool { return p == nil || p.region == nil }

// Bytes returns the memory, exactly as long as requested, and nil after Close.
// The slice must not be used after Close: the memory is unmapped then.
func (p *Pageable) Bytes() []byte {
	if p.empty() {
		return []byte{}
	}
	return p.region.Bytes()
}

// Len returns the size in bytes as requested. It stays the same after Close.
func (p *Pageable) Len() int {
	if p.empty() {
		return 0
	}
	return p.region.Len()
}

// Close unmaps the memory (munmap). It does not block. A second Close does nothing; after an
// error it may be called again.
func (p *Pageable) Close() error {
	if p.empty() {
		return nil
	}
	if err := p.region.Unmap(); err != nil {
		return fmt.Errorf("hostmem: close %d pageable bytes: %w", p.Len(), err)
	}
	return nil
}
