//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"math"
	"runtime"
	"testing"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/testgpu"
)

// What is remembered of limits ends when something is unregistered. What is not
// supported stays so.
func TestWhatEndsARefusal(t *testing.T) {
	t.Parallel()
	kernel := linux.Release{Major: 6, Minor: 8}
	limit := &refusal{[]int{mib}, cudart.ErrMemoryAllocation}
	never := &refusal{[]int{mib}, cudart.ErrNotSupported}
	h := &host{}
	h.attributes.Store(&attributes{})
	accepted := func(n int) { h.learned.Store(&learned{span: n}) }
	remember := func(err error) { h.learned.Store(&learned{refusal: err}) }
	accepted(mib)
	require.Equal(t, mib, h.limit(kernel))
	remember(limit)
	require.Equal(t, error(limit), h.refused())
	require.Equal(t, maxSpan, h.limit(kernel))
	h.unregistered()
	require.NoError(t, h.refused())
	remember(never)
	h.unregistered()
	require.Equal(t, error(never), h.refused())
	h.learned.Store(nil)
	require.NoError(t, h.refused())
	accepted(math.MaxInt)
	require.Equal(t, maxSpanLinux6, h.limit(linux.Release{Major: 6, Minor: 11}), "the kernel's limit stays")
	h.attributes.Store(&attributes{shared: true})
	remember(never)
	require.NoError(t, h.refused(), "nothing is to be registered")
}

// What is recorded for a device does not keep it alive.
func TestADeviceIsForgottenWithItsRuntime(t *testing.T) {
	t.Parallel()
	use := func() weak.Pointer[cudart.Device] {
		sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
		require.NoError(t, err)
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		b, err := Alloc(t.Context(), dev, kib, Options{})
		require.NoError(t, err)
		require.NoError(t, b.Close())
		key := weak.Make(dev)
		require.NoError(t, rt.Close())
		testgpu.End(t, sim)
		return key
	}
	key := use()
	eventually(t, "the device is forgotten", func() bool {
		runtime.GC()
		return key.Value() == nil
	})
}

func TestSizesInMessages(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "a registration of 1 MiB was", sizes([]int{mib}))
	assert.Equal(t, "registrations of 2 MiB, 1 MiB were", sizes([]int{2 * mib, mib}))
}
