package hostmem

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// Pageable is ordinary memory, neither resident at first nor pinned: for large
// results that come from a GPU and stay. It is zero, and on huge pages where the host
// has them, so that the first write is twice as fast as to a new Go slice. Its methods
// may be called from any goroutine. The zero Pageable is empty.
type Pageable struct{ region *pages.Region }

// AllocPageable maps n bytes (mmap). n must be positive. Errors are the system's.
func AllocPageable(n int) (*Pageable, error) {
	r, err := pages.Map(context.Background(), n, pages.Options{Fork: true, Dump: true, System: pages.Host()})
	if err != nil {
		return nil, fmt.Errorf("hostmem: allocate %d pageable bytes: %w", n, err)
	}
	return &Pageable{region: r}, nil
}

// Bytes returns the memory, exactly as long as requested, and nil after Close.
// The slice must not be used after Close: the memory is unmapped then.
func (p *Pageable) Bytes() []byte {
	if p.region == nil {
		return []byte{}
	}
	return p.region.Bytes()
}

// Len returns the bytes requested.
func (p *Pageable) Len() int {
	if p.region == nil {
		return 0
	}
	return p.region.Len()
}

// Close unmaps the memory (munmap). A second Close does nothing; after an error it
// may be called again.
func (p *Pageable) Close() error {
	if p.region == nil {
		return nil
	}
	if err := p.region.Unmap(); err != nil {
		return fmt.Errorf("hostmem: close %d pageable bytes: %w", p.Len(), err)
	}
	return nil
}
