package stage

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPutCopiesExactly(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, minNonTemporal - 1, minNonTemporal, minNonTemporal + 1, 3*minNonTemporal + 7} {
		to, from := make([]byte, n+2), random(n, uint64(n))
		Put(to[1:n+1], from)
		require.Equal(t, from, to[1:n+1], "%d bytes", n)
		require.Zero(t, to[0]|to[n+1], "around %d bytes", n)
	}
}
