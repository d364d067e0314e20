package bench

import (
	"errors"
	"math"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

// What cannot be locked is left out, with the reason.
func TestFramesSaysWhatTheLimitForbids(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	b, err := measure.Run(t.Context(), frames(wall(), func(n int, way string) ([]byte, func() error, error) {
		return nil, nil, lockLimited(way, unix.ENOMEM, 64<<10)
	}), short(dev, 1<<20), nil)
	require.NoError(t, err)
	assert.Empty(t, b.Errors)
	assert.Len(t, b.Select(result.View{Series: roundTrip}), len(framesMethods)-2)
	notes := strings.Join(b.Notes, "\n")
	for _, want := range []string{"1 MiB, reused mlock, on device 0: not measured: mlock: cannot allocate memory: RLIMIT_MEMLOCK is 64 KiB: raise it (ulimit -l)", "not measured: mmap with MAP_LOCKED"} {
		assert.Contains(t, notes, want)
	}
	assert.NotContains(t, strings.Join(b.Answers, "\n"), "mlock")

	assert.ErrorIs(t, lockLimited(byMlock, unix.EPERM, 0), errors.ErrUnsupported)
	assert.ErrorIs(t, lockLimited(byMapLocked, unix.EAGAIN, 8<<20), errors.ErrUnsupported)
	assert.NotErrorIs(t, lockLimited(byMlock, unix.ENOMEM, math.MaxUint64), errors.ErrUnsupported, "without a limit memory is short")
	assert.NotErrorIs(t, lockLimited(byMlock, unix.EINVAL, 64<<10), errors.ErrUnsupported)
}

func TestLockedMemoryIsLocked(t *testing.T) {
	t.Parallel()
	hosttest.StartsPrograms(t)
	for _, way := range []string{byMlock, byMapLocked} {
		b, unmap, err := mapLocked(4096, way)
		require.NoError(t, err)
		s, err := linux.ReadSMaps(os.DirFS("/"), uintptr(unsafe.Pointer(&b[0])), len(b))
		require.NoError(t, err)
		assert.True(t, s.HasFlag("lo"), "%s: %v", way, s.Flags)
		require.NoError(t, unmap())
	}
}
