package transfer

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Copies work on every kind of host: through a ring that is pinned as the host allows,
// and directly from a buffer, however that is pinned.
func TestCopiesOnEveryHost(t *testing.T) {
	t.Parallel()
	for name, cfg := range cudasim.Hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cfg)
			dev, err := rt.Device(0)
			require.NoError(t, err)
			r := fixtureOn(t, dev, Options{})
			const n = 5<<20 + 3
			want, p := bytesOf(1, n), r.device(n)
			require.NoError(t, r.c.Upload(t.Context(), p, want))
			back := make([]byte, n)
			require.NoError(t, r.c.Download(t.Context(), back, p))
			require.True(t, bytes.Equal(want, back))

			buf, err := hostmem.Alloc(t.Context(), dev, n, hostmem.Options{})
			require.NoError(t, err)
			before := r.c.Stats()
			require.NoError(t, r.c.Download(t.Context(), buf.Bytes(), p))
			require.NoError(t, r.c.Upload(t.Context(), p, buf.Bytes()))
			require.True(t, bytes.Equal(want, buf.Bytes()))
			require.Equal(t, 2*n, r.c.Stats().DirectBytes-before.DirectBytes)
			require.NoError(t, buf.Close())
			if name == "shared page tables" {
				require.Zero(t, sim.Calls("cudaHostRegister")+sim.Calls("cudaHostAlloc"))
			}
		})
	}
}
