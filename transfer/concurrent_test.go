package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Many copies of all kinds at once share few slots, and every byte is right.
func TestCopiesAtOnce(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const goroutines, rounds, maxN = 8, 8, 3*mib + 3
	var group sync.WaitGroup
	for g := range goroutines {
		mem := r.device(maxN)
		s := r.stream()
		group.Go(func() {
			for i := range rounds {
				n := []int{100, stage.MaxSmall, 700 * kib, maxN}[(g+i)%4]
				want, got := bytesOf(uint64(g*100+i), n), make([]byte, n)
				c := r.c
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
	r := fixtureOn(t, dev, Options{Workers: 2})
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
	require.LessOrEqual(t, r.c.Stats().RingBytes, 40*mib)
	require.NoError(t, r.c.Close())
	require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
	require.Zero(t, r.c.Stats().RingBytes)
}

// A pipe from a download to an upload works on one core, though each blocks the other
// again and again. Not parallel: it sets GOMAXPROCS.
func TestDownloadAndUploadConnectedByAPipe(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	r := newFixture(t, Options{Workers: 1})
	const n, pipes = 5*mib + 3, 6
	var group sync.WaitGroup
	for i := range pipes {
		want := bytesOf(uint64(i), n)
		from, to := r.device(n), r.device(n)
		r.fill(from, want)
		read, write := io.Pipe()
		group.Go(func() {
			_, err := r.c.DownloadWriter(t.Context(), write, from, n)
			assert.NoError(t, err)
		})
		group.Go(func() {
			_, err := r.c.UploadReader(t.Context(), to, read, n)
			assert.NoError(t, err)
			assert.True(t, bytes.Equal(want, r.onDevice(to, n)))
		})
	}
	group.Wait()
}

// A thousand small copies at once, of a hundred goroutines, each with and without a
// context that can end.
func TestSmallCopiesAtOnce(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const goroutines, copies = 100, 10
	const capacity = 4 * stage.MaxSmall
	mem := r.device(goroutines * capacity)
	var group sync.WaitGroup
	for g := range goroutines {
		group.Go(func() {
			at := mem + cudart.DevPtr(g*capacity)
			for i := range copies {
				ctx := t.Context()
				if i%2 == 0 {
					ctx = context.Background()
				}
				n := 1 + (g*7919+i*104729)%capacity
				want, got := bytesOf(uint64(g*copies+i), n), make([]byte, n)
				assert.NoError(t, r.c.Upload(ctx, at, want))
				assert.NoError(t, r.c.Download(ctx, got, at))
				assert.True(t, bytes.Equal(want, got), "%d bytes", n)
			}
		})
	}
	group.Wait()
	require.Equal(t, 2*goroutines*copies, r.c.Stats().Copies)
}

// Copiers of several devices come and go while others copy.
func TestCopiersOfSeveralDevices(t *testing.T) {
	t.Parallel()
	const devices, copiers, n = 3, 12, 3*mib + 1
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, devices)})
	var group sync.WaitGroup
	for i := range copiers {
		group.Go(func() {
			dev, err := rt.Device(i % devices)
			assert.NoError(t, err)
			want := bytesOf(uint64(i), n)
			for range 4 {
				c, err := NewCopier(t.Context(), dev, Options{Workers: i % 4})
				if !assert.NoError(t, err) {
					return
				}
				mem, err := dev.Malloc(n)
				assert.NoError(t, err)
				got := make([]byte, n)
				assert.NoError(t, c.Upload(t.Context(), mem, want))
				assert.NoError(t, c.Download(t.Context(), got, mem))
				assert.True(t, bytes.Equal(want, got))
				assert.NoError(t, dev.Free(mem))
				assert.NoError(t, c.Close())
			}
		})
	}
	group.Wait()
}

// Close while copies run: those end well, later ones are refused, and the memory goes
// when the last one has ended.
func TestCloseWhileCopiesRun(t *testing.T) {
	t.Parallel()
	const n, goroutines = 2*mib + 5, 8
	dev := testgpu.Device(t)
	for range 5 {
		c, err := NewCopier(t.Context(), dev, Options{Workers: 2})
		require.NoError(t, err)
		r := &fixture{TB: t, dev: dev, c: c}
		var group sync.WaitGroup
		var begun sync.WaitGroup
		begun.Add(goroutines)
		for g := range goroutines {
			mem := r.device(n)
			group.Go(func() {
				want, got := bytesOf(uint64(g), n), make([]byte, n)
				for i := 0; ; i++ {
					err := c.Upload(t.Context(), mem, want)
					if i == 0 {
						begun.Done()
					}
					if errors.Is(err, cudart.ErrClosed) {
						return
					}
					assert.NoError(t, err)
					if err := c.Download(t.Context(), got, mem); !errors.Is(err, cudart.ErrClosed) {
						assert.NoError(t, err)
						assert.True(t, bytes.Equal(want, got))
					}
				}
			})
		}
		begun.Wait()
		require.NoError(t, c.CloseContext(t.Context()))
		group.Wait()
		require.Zero(t, c.Stats().RingBytes)
	}
}
