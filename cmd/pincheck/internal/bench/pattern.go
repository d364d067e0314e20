// Patterns by which copied bytes are compared.

package bench

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/internal/bounded"
)

// patternPeriod is the number of bytes after which a pattern repeats. No power of two is a multiple of
// it, so bytes that a copy puts at another offset are a mismatch.
const patternPeriod = 1<<20 - 3

// patternBytes are two periods of a pattern: from any place in the first one on, a whole
// period follows.
var patternBytes = sync.OnceValue(func() []byte {
	b := make([]byte, 2*patternPeriod)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(b[:patternPeriod]) // never fails
	copy(b[patternPeriod:], b[:patternPeriod])
	return b
})

// A pattern is a sequence of bytes by which copies are verified. It says where the
// sequence starts: those of different patterns differ.
type pattern int

const (
	uploaded   pattern = 0
	downloaded pattern = 4099
)

// each calls do for pieces of b, which is the pattern from byte off on, with what they
// should hold, until ctx ends.
func (p pattern) each(ctx context.Context, b []byte, off int, do func(b, want []byte, off int) error) error {
	for len(b) > 0 {
		if err := bounded.Ended(ctx); err != nil {
			return err
		}
		at := (off + int(p)) % patternPeriod
		n := min(len(b), patternPeriod)
		if err := do(b[:n], patternBytes()[at:at+n], off); err != nil {
			return err
		}
		b, off = b[n:], off+n
	}
	return nil
}

// fill writes the pattern.
func (p pattern) fill(ctx context.Context, b []byte) error { return p.fillFrom(ctx, b, 0) }

// fillFrom writes the pattern from byte off of it on.
func (p pattern) fillFrom(ctx context.Context, b []byte, off int) error {
	return p.each(ctx, b, off, func(b, want []byte, _ int) error {
		copy(b, want)
		return nil
	})
}

// compare returns an error that names the first byte which is not the pattern's. b is from
// byte off of it on.
func (p pattern) compare(ctx context.Context, b []byte, off int) error {
	return p.each(ctx, b, off, firstDifference)
}

// firstDifference returns an error that names the first byte of b, from byte off of memory on, that
// is not what it should be; nil for none.
func firstDifference(b, want []byte, off int) error {
	if bytes.Equal(b, want) {
		return nil
	}
	i := 0
	for b[i] == want[i] {
		i++
	}
	return fmt.Errorf("%w: byte %d is %#02x, and %#02x was copied", measure.ErrMismatch, off+i, b[i], want[i])
}
