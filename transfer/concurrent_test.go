package transfer

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Many copies of all kinds at once share few slots, and every byte is right.
func TestCopiesAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Workers: 2})
	const goroutines, rounds, most = 8, 8, 3*mib + 3
	var group sync.WaitGroup
	for g := range goroutines {
		mem := r.device(most)
		s := r.stream()
		group.Go(func() {
			for i := range rounds {
				n := []int{100, stage.Alone, 700 * kib, most}[(g+i)%4]
				want, got := bytesOf(uint64(g*100+i), n), make([]byte, n)
				c := &r.c.View
				if i%2 == 1 {
					c = c.With(Call{Stream: s})
				}
				var err error
				switch (g + i) % 3 {
				case 0:
					err = c.Upload(t.Context(), mem, want)
				case 1:
					_, err = c.UploadFrom(t.Context(), mem, bytes.NewReader(want), 0, n)
				case 2:
					err = c.UploadAll(t.Context(), cutUp(want, mem, 0, 3000))
				}
				if !assert.NoError(t, err) {
					return
				}
				switch i % 3 {
				case 0:
					err = c.Download(t.Context(), got, mem)
				case 1:
					var w bytes.Buffer
					_, err = c.DownloadWriter(t.Context(), &w, mem, n)
					got = w.Bytes()
				case 2:
					err = c.DownloadAll(t.Context(), cutUp(got, mem, 0, 7000))
				}
				if !assert.NoError(t, err) || !assert.True(t, bytes.Equal(want, got), "goroutine %d, round %d, %d bytes", g, i, n) {
					return
				}
			}
		})
	}
	group.Wait()
	st := r.c.Stats()
	assert.Equal(t, 2*goroutines*rounds, st.Copies)
	assert.Zero(t, st.Failures)
}

// A warm copier makes little garbage, and keeps what it has.
func TestCopiesStayWithinBounds(t *testing.T) {
	dev, before := testgpu.Device(t), hostmem.ReadStats().ReservedBytes
	r := rigOn(t, dev, Options{Workers: 2})
	mem, host := r.device(mib), make([]byte, mib)
	pinned := hostmem.ReadStats().ReservedBytes
	for _, n := range []int{4096, mib} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			var before, after runtime.MemStats
			const copies = 300
			runtime.ReadMemStats(&before)
			for range copies {
				require.NoError(t, r.c.Upload(t.Context(), mem, host[:n]))
				require.NoError(t, r.c.Download(t.Context(), host[:n], mem))
			}
			runtime.ReadMemStats(&after)
			t.Logf("%d bytes and %d objects a copy", (after.TotalAlloc-before.TotalAlloc)/(2*copies), (after.Mallocs-before.Mallocs)/(2*copies))
			assert.Less(t, (after.TotalAlloc-before.TotalAlloc)/(2*copies), uint64(64*kib), "bytes a copy, the simulated GPU's included")
		})
	}
	require.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
	require.Equal(t, pinned-before, r.c.Stats().RingBytes)
	require.LessOrEqual(t, r.c.Stats().RingBytes, 41*mib)
	require.NoError(t, r.c.Close())
	require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
	require.Zero(t, r.c.Stats().RingBytes)
}
