package transfer

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

func (r *fixture) stream() *cudart.Stream {
	r.Helper()
	s, err := r.dev.NewStream(cudart.StreamOptions{})
	require.NoError(r, err)
	r.Cleanup(func() { require.NoError(r, s.Close()) })
	return s
}

// newSimFixture is for tests that block streams by host functions: with a real GPU
// the calls of other tests that wait for the device would wait for them.
func newSimFixture(t testing.TB, o Options) *fixture {
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return fixtureOn(t, dev, o)
}

// blocked makes a stream wait until open is called, or the test ends.
func blocked(t testing.TB, s *cudart.Stream) (open func()) {
	blocked := make(chan struct{})
	open = sync.OnceFunc(func() { close(blocked) })
	t.Cleanup(open)
	require.NoError(t, s.LaunchHostFunc(func() { <-blocked }))
	return open
}

// A small upload on a stream returns when its source may be changed, comes after
// what was queued before, and before what is queued then.
func TestUploadsInTheOrderOfAStream(t *testing.T) {
	t.Parallel()
	r := newSimFixture(t, Options{Workers: 4})
	s := r.stream()
	for _, n := range []int{1000, stage.MaxSmall, maxQueued} {
		dst, other := r.device(n), r.device(n)
		src := bytesOf(1, n)
		want := bytes.Clone(src)
		open := blocked(t, s)
		require.NoError(t, s.Memset(dst, 7, n))
		require.NoError(t, r.c.With(Call{Stream: s}).Upload(t.Context(), dst, src))
		clear(src)
		require.NoError(t, s.CopyOnDevice(other, dst, n))
		done, err := s.Query()
		require.NoError(t, err)
		require.False(t, done, "the stream was not waited for")
		open()
		require.NoError(t, s.Synchronize(t.Context()))
		require.True(t, bytes.Equal(want, r.onDevice(other, n)), "%d bytes", n)
	}
}

// A large upload waits for what the stream holds, and so does a small one that finds
// no memory: they come after it all the same.
func TestUploadsThatWaitForAStream(t *testing.T) {
	t.Parallel()
	r := newSimFixture(t, Options{Workers: 4})
	s := r.stream()
	open := blocked(t, s)
	for range queuedBytes / maxQueued {
		require.NoError(t, r.c.With(Call{Stream: s}).Upload(t.Context(), r.device(maxQueued), make([]byte, maxQueued)))
	}
	for _, n := range []int{100, 3*mib + 1} {
		dst, other := r.device(n), r.device(n)
		src := bytesOf(1, n)
		want := bytes.Clone(src)
		require.NoError(t, s.Memset(dst, 7, n))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		require.ErrorIs(t, r.c.With(Call{Stream: s}).Upload(ctx, dst, src), context.DeadlineExceeded)
		cancel()
		time.AfterFunc(5*time.Millisecond, open)
		require.NoError(t, r.c.With(Call{Stream: s}).Upload(t.Context(), dst, src))
		clear(src)
		require.NoError(t, s.CopyOnDevice(other, dst, n))
		require.NoError(t, s.Synchronize(t.Context()))
		require.True(t, bytes.Equal(want, r.onDevice(other, n)), "%d bytes", n)
		open = blocked(t, s)
	}
	open()
	require.NoError(t, s.Synchronize(t.Context()))
}

// A call that the stream's full queue blocks ends with the context.
func TestAStreamWhoseQueueIsFull(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{QueueDepth: 4})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{})
	s := r.stream()
	mem, src := r.device(100), bytesOf(1, 100)
	open := blocked(t, s)
	ended := 0
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if err := r.c.With(Call{Stream: s}).Upload(ctx, mem, src); err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			ended++
		}
		cancel()
	}
	require.NotZero(t, ended)
	require.NoError(t, r.c.Upload(t.Context(), mem, src), "without the stream nothing is in its way")
	open()
	require.NoError(t, s.Synchronize(t.Context()))
	require.Equal(t, src, r.onDevice(mem, 100))
	r.closeSoon()
}

func TestDownloadsInTheOrderOfAStream(t *testing.T) {
	t.Parallel()
	r := newSimFixture(t, Options{Workers: 2})
	s := r.stream()
	buf, err := hostmem.Alloc(t.Context(), r.dev, 9*mib, hostmem.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, buf.Close()) }()
	for _, n := range []int{1000, 9 * mib} {
		for name, dst := range map[string][]byte{"pageable": make([]byte, n), "pinned": buf.Bytes()[:n]} {
			src := r.device(n)
			open := blocked(t, s)
			require.NoError(t, s.Memset(src, 7, n))
			time.AfterFunc(20*time.Millisecond, open)
			require.NoError(t, r.c.With(Call{Stream: s}).Download(t.Context(), dst, src))
			require.True(t, bytes.Equal(bytes.Repeat([]byte{7}, n), dst), "%s, %d bytes", name, n)
		}
	}
}

func TestAPinnedSourceMayBeChangedToo(t *testing.T) {
	t.Parallel()
	r := newSimFixture(t, Options{Workers: 2})
	s := r.stream()
	const n = 2 * mib
	buf, err := hostmem.Alloc(t.Context(), r.dev, n, hostmem.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, buf.Close()) }()
	want := bytesOf(2, n)
	copy(buf.Bytes(), want)
	dst := r.device(n)
	open := blocked(t, s)
	time.AfterFunc(20*time.Millisecond, open)
	require.NoError(t, r.c.With(Call{Stream: s}).Upload(t.Context(), dst, buf.Bytes()))
	clear(buf.Bytes())
	require.NoError(t, s.Synchronize(t.Context()))
	require.True(t, bytes.Equal(want, r.onDevice(dst, n)))
}

func TestStreamsOfOtherDevicesAreRefused(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	other, err := rt.Device(1)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 1})
	s, err := other.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.ErrorContains(t, r.c.With(Call{Stream: s}).Upload(t.Context(), r.device(1), []byte{1}), "is not of the copier on device 0")
}

func TestProgressEndsAtTheTotal(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	const n = 5*mib + 7
	mem := r.device(n)
	buf, err := hostmem.Alloc(t.Context(), r.dev, n, hostmem.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, buf.Close()) }()
	host := make([]byte, n)
	for name, call := range map[string]func(c *Copier) error{
		"upload":          func(c *Copier) error { return c.Upload(t.Context(), mem, host) },
		"download":        func(c *Copier) error { return c.Download(t.Context(), host, mem) },
		"upload pinned":   func(c *Copier) error { return c.Upload(t.Context(), mem, buf.Bytes()) },
		"download pinned": func(c *Copier) error { return c.Download(t.Context(), buf.Bytes(), mem) },
		"reader": func(c *Copier) error {
			_, err := c.UploadReader(t.Context(), mem, bytes.NewReader(host), n)
			return err
		},
		"readerAt": func(c *Copier) error {
			_, err := c.UploadFrom(t.Context(), mem, bytes.NewReader(host), 0, n)
			return err
		},
		"writer": func(c *Copier) error {
			_, err := c.DownloadWriter(t.Context(), new(bytes.Buffer), mem, n)
			return err
		},
		"parts": func(c *Copier) error { return c.UploadAll(t.Context(), cutUp(host, mem, 0, 5000)) },
	} {
		var seen []int
		require.NoError(t, call(r.c.With(Call{Progress: func(done, total int) {
			assert.Equal(t, n, total)
			seen = append(seen, done)
		}})), name)
		assert.IsIncreasing(t, append([]int{0}, seen...), name)
		assert.Equal(t, n, seen[len(seen)-1], name)
	}
}

// A copy that is canceled returns the context's error and the cause, also when Progress blocks. Nothing is in
// flight afterwards, and the next copy works.
func TestCancelledCopies(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	const n = 9 * mib
	mem, host := r.device(n), bytesOf(1, n)
	cause := assert.AnError
	for name, call := range map[string]func(ctx context.Context, c *Copier) error{
		"upload":   func(ctx context.Context, c *Copier) error { return c.Upload(ctx, mem, host) },
		"download": func(ctx context.Context, c *Copier) error { return c.Download(ctx, make([]byte, n), mem) },
		"reader": func(ctx context.Context, c *Copier) error {
			_, err := c.UploadReader(ctx, mem, bytes.NewReader(host), n)
			return err
		},
		"writer": func(ctx context.Context, c *Copier) error {
			_, err := c.DownloadWriter(ctx, new(bytes.Buffer), mem, n)
			return err
		},
		"parts": func(ctx context.Context, c *Copier) error {
			return c.DownloadAll(ctx, cutUp(make([]byte, n), mem, 0, 4096))
		},
	} {
		for _, before := range []bool{false, true} {
			ctx, cancel := context.WithCancelCause(t.Context())
			if before {
				cancel(cause)
			}
			returned := make(chan struct{})
			err := call(ctx, r.c.With(Call{Progress: func(int, int) {
				cancel(cause)
				<-returned
			}}))
			close(returned)
			require.ErrorIs(t, err, cause, "%s, before: %t", name, before)
			require.ErrorIs(t, err, context.Canceled, "%s, before: %t", name, before)
			require.Zero(t, sim.PendingCopies(), "%s, before: %t", name, before)
			require.NoError(t, r.c.Upload(t.Context(), mem, host))
			require.True(t, bytes.Equal(host, r.onDevice(mem, n)))
		}
	}
}
