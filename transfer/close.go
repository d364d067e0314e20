package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/sentinel"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// ErrClosed is returned by methods of a Copier or a Fanout that was closed, and of
// its views. errors.Is reports that it is [os.ErrClosed].
var ErrClosed = sentinel.New("already closed", os.ErrClosed)

// ErrUnderWay is in the errors of copies that were given up while the GPU may still
// be copying. What they copy to has bytes of any kind until it is done. Pinned memory
// that they copy from or to must stay until then, and memory outside of Go's heap that
// was uploaded must stay mapped.
var ErrUnderWay = stage.ErrUnderWay

// closeLifetime seals a lifetime of copies, and calls release when none runs any more.
func closeLifetime(ctx context.Context, l *lifetime.Lifetime, release func(context.Context) error) error {
	if ctx == nil {
		return errNilContext
	}
	err := l.Close(ctx, release)
	switch n := l.Seal(); {
	case n > 0:
		return fmt.Errorf("still copying (calls: %d): %w", n, err)
	case errors.Is(err, bounded.ErrStuck):
		return fmt.Errorf("%w: %w", ErrUnderWay, err)
	}
	return err
}
