package stage

import (
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Of a copy that the GPU may still do, bytes that arrived on the host count, and those for the device do not.
func TestTheCountOfAnAbandonedCopy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		down, failed bool
		want         int
	}{
		{down: false, want: 0},
		{down: false, failed: true, want: 0},
		{down: true, want: 4},
		{down: true, failed: true, want: 3},
	} {
		var o outcome
		o.init(10, c.down)
		o.pass(0, 4)
		o.pass(6, 2) // behind a gap
		if c.failed {
			o.fail(3, io.ErrUnexpectedEOF)
		}
		o.abandon(errStuck)
		n, err := o.result()
		assert.Equal(t, c.want, n, "%+v", c)
		require.ErrorIs(t, err, ErrUnderWay)
		assert.Equal(t, c.failed, errors.Is(err, io.ErrUnexpectedEOF))
	}
}
