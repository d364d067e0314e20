//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

func TestCopiesStayWithinTheBuffer(t *testing.T) {
	t.Parallel()
	const n = 10_000
	g := newFixture(t)
	p := g.Device(n)
	b := g.alloc(n, Options{})
	fill(b.Bytes(), 1)
	for _, tc := range []struct{ off, n int }{
		{-1, 1}, {0, -1}, {-1, -1}, {-1, 2}, {0, n + 1}, {1, n}, {n, 1}, {n + 1, 0}, {n + 1, -1},
		{math.MaxInt, 1}, {1, math.MaxInt}, {math.MaxInt, math.MaxInt}, {math.MinInt, 0}, {0, math.MinInt},
		{math.MinInt, math.MinInt}, {math.MaxInt, math.MinInt}, {math.MinInt, math.MaxInt},
	} {
		err := b.CopyToDevice(g.Stream, p, tc.off, tc.n)
		require.EqualError(t, err, fmt.Sprintf("hostmem: copy to device: %d bytes at offset %d are not all within buffer of 10000 bytes", tc.n, tc.off))
		err = b.CopyFromDevice(g.Stream, p, tc.off, tc.n)
		require.EqualError(t, err, fmt.Sprintf("hostmem: copy from device: %d bytes at offset %d are not all within buffer of 10000 bytes", tc.n, tc.off))
	}
	if g.Sim != nil {
		assert.Zero(t, g.Sim.Calls("cudaMemcpyAsync"))
	}
	for _, tc := range []struct{ off, n int }{{0, n}, {n - 1, 1}, {n, 0}, {0, 0}, {1, n - 1}} {
		require.NoError(t, b.CopyToDevice(g.Stream, p+cudart.DevPtr(tc.off), tc.off, tc.n), "%+v", tc)
	}
	g.Synchronize()
	assert.Equal(t, filled(n, 1), g.Download(p, n))
}

func TestCopiesNeedAStream(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	p := g.Device(1)
	b := g.alloc(1, Options{})
	require.ErrorContains(t, b.CopyToDevice(nil, p, 0, 1), "copy to device: buffer of 1 bytes: the stream is nil")
	require.ErrorContains(t, b.CopyFromDevice(nil, p, 0, 1), "copy from device: buffer of 1 bytes: the stream is nil")
}

// A copy may start and end anywhere near the ends of registrations. CUDA itself refuses one that
// crosses from one to the next.
func TestCopiesAcrossSeams(t *testing.T) {
	t.Parallel()
	const chunk, n = 2 * mib, 3*2*mib + 12_345
	g := newFixture(t)
	up, down := g.alloc(n, Options{Chunk: chunk}), g.alloc(n, Options{Chunk: chunk})
	require.Equal(t, []Span{{0, chunk}, {chunk, chunk}, {2 * chunk, chunk}, {3 * chunk, n - 3*chunk}}, slices.Collect(up.Spans(0, up.Len())))
	p := g.Device(n)
	fill(up.Bytes(), 2)
	require.NoError(t, up.CopyToDevice(g.Stream, p, 0, n))
	g.Synchronize()
	require.True(t, bytes.Equal(up.Bytes(), g.Download(p, n)))

	var points []int
	for _, seam := range []int{chunk, 3 * chunk} {
		for _, by := range []int{-4097, -4096, -1, 0, 1, 4095, 4096} {
			points = append(points, seam+by)
		}
	}
	points = append(points, 0, 1, n-1)
	var copied int
	for i, off := range points {
		for _, size := range []int{1, 2, 4095, 4097, chunk - 1, chunk, chunk + 1, 2*chunk + 2, n - off} {
			if off+size > n {
				continue
			}
			t.Run(fmt.Sprintf("%d at %d", size, off), func(t *testing.T) {
				calls := g.Copies()
				// The device's place for it has another offset than the buffer's.
				from := cudart.DevPtr(i % (n - size + 1))
				want := up.Bytes()[from : int(from)+size]
				clear(down.Bytes()[max(0, off-64):min(n, off+size+64)])
				require.NoError(t, down.CopyFromDevice(g.Stream, p+from, off, size))
				g.Synchronize()
				require.True(t, bytes.Equal(want, down.Bytes()[off:off+size]), "from the device")
				require.Equal(t, make([]byte, off-max(0, off-64)), down.Bytes()[max(0, off-64):off], "before")
				require.Equal(t, make([]byte, min(n, off+size+64)-off-size), down.Bytes()[off+size:min(n, off+size+64)], "after")
				if g.Sim != nil {
					require.Equal(t, (off+size-1)/chunk-off/chunk+1, g.Copies()-calls, "one copy a registration that it touches")
				}
				copied++
			})
		}
	}
	assert.Greater(t, copied, 100)

	// The other way, where every copy leaves its trace.
	for i, off := range points {
		size := min(n-off, 4097+i*chunk/4)
		fill(up.Bytes()[off:off+size], byte(i))
		require.NoError(t, up.CopyToDevice(g.Stream, p+cudart.DevPtr(off), off, size))
		g.Synchronize()
	}
	assert.True(t, bytes.Equal(up.Bytes(), g.Download(p, n)))
}

// CUDA refuses what Buffer's copies split: were it otherwise, splitting would be of no use.
func TestCUDARefusesACopyAcrossASeam(t *testing.T) {
	t.Parallel()
	g := newFixture(t)
	b := g.alloc(4*mib, Options{Chunk: 2 * mib})
	p := g.Device(4 * mib)
	assert.ErrorIs(t, g.Stream.CopyToDevice(p, b.Pointer(), 4*mib), cudart.ErrInvalidValue)
	assert.NoError(t, g.Stream.CopyToDevice(p, b.Pointer(), 2*mib))
	g.Synchronize()
}

// A registration that is refused for its size is made of smaller ones, and copies hide it.
func TestARefusedRegistrationIsMadeOfSmallerOnes(t *testing.T) {
	const n = 200*mib + 1
	g := newSimFixture(t, cudasim.Config{MaxRegister: 64 * mib})
	b := g.alloc(n, Options{})
	spans := slices.Collect(b.Spans(0, b.Len()))
	require.Greater(t, len(spans), 3)
	end := 0
	for _, s := range spans {
		assert.Equal(t, end, s.Off)
		assert.LessOrEqual(t, s.Len, 64*mib)
		end += s.Len
	}
	assert.Equal(t, n, end)
	p := g.Device(3 * mib)
	at := spans[1].Off - mib
	fill(b.Bytes()[at:at+3*mib], 3)
	require.NoError(t, b.CopyToDevice(g.Stream, p, at, 3*mib))
	g.Synchronize()
	assert.True(t, bytes.Equal(b.Bytes()[at:at+3*mib], g.Download(p, 3*mib)))

	// When even small ones are, and cudaHostAlloc too, the error lists them all.
	small := newSimFixture(t, cudasim.Config{MaxRegister: mib})
	small.Sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	_, err := Alloc(t.Context(), small.Dev, n, Options{})
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.ErrorContains(t, err, "registrations of 200 MiB + 1 B, 100 MiB, 64 MiB were refused")
	assert.ErrorContains(t, err, "in its place cudaHostAlloc: 209719296 bytes")
	assert.Equal(t, 1, strings.Count(err.Error(), "hostmem: "))
}

// A buffer is every device's, and Close waits for the streams of all of them.
func TestABufferServesAllDevices(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
	b := g.alloc(mib, Options{})
	fill(b.Bytes(), 4)
	var places []cudart.DevPtr
	g.Hold()
	for _, dev := range g.Dev.Runtime().Devices() {
		one := g.on(dev)
		p := one.Device(mib)
		require.NoError(t, b.CopyToDevice(one.Stream, p, 0, mib))
		places = append(places, p)
	}
	require.ErrorIs(t, b.CloseContext(hostmemtest.Ended()), context.Canceled)
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	g.Sim.Release()
	require.NoError(t, <-closed)
	assert.Empty(t, g.Sim.Misuses())
	for i, dev := range g.Dev.Runtime().Devices() {
		one := g.on(dev)
		assert.True(t, bytes.Equal(filled(mib, 4), one.Download(places[i], mib)), "device %d", i)
	}
}

func TestCopiesFromManyGoroutines(t *testing.T) {
	t.Parallel()
	const each, chunk = 300_000, 2 * mib
	g := newFixture(t)
	const n = 16 * each
	b := g.alloc(n, Options{Chunk: chunk})
	p := g.Device(n)
	streams := []*cudart.Stream{g.Stream, g.NewStream(), g.NewStream()}
	fill(b.Bytes(), 5)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			s := streams[i%len(streams)]
			off := i * each
			assert.NoError(t, b.CopyToDevice(s, p+cudart.DevPtr(off), off, each))
			assert.NoError(t, s.Synchronize(context.Background()))
			clear(b.Bytes()[off : off+each])
			assert.NoError(t, b.CopyFromDevice(s, p+cudart.DevPtr(off), off, each))
		})
	}
	wg.Wait()
	for _, s := range streams {
		require.NoError(t, s.Synchronize(context.Background()))
	}
	assert.True(t, bytes.Equal(filled(n, 5), b.Bytes()))
}

func TestSpansOfARange(t *testing.T) {
	t.Parallel()
	spans := []Span{{0, 10}, {10, 10}, {20, 5}}
	m := withSpans(spans)
	for _, tc := range []struct {
		off, n int
		want   []Span
	}{
		{0, 25, spans},
		{9, 1, []Span{{9, 1}}},
		{9, 2, []Span{{9, 1}, {10, 1}}},
		{10, 10, []Span{{10, 10}}},
		{19, 6, []Span{{19, 1}, {20, 5}}},
		{5, 0, nil},
		{25, 0, nil},
		{9, math.MaxInt, []Span{{9, 1}, {10, 10}, {20, 5}}},
		{-1, 5, nil},
		{5, -1, nil},
	} {
		assert.Equal(t, tc.want, slices.Collect(m.Spans(tc.off, tc.n)), "%d bytes at %d", tc.n, tc.off)
	}
	count := 0
	for range m.Spans(0, 25) {
		count++
		break
	}
	assert.Equal(t, 1, count)
}

// The spans of a range are found by binary search: the same as by going through all.
func TestSpansOfARangeOfMany(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	var spans []Span
	end := 0
	for range 300 {
		n := 1 + random.IntN(9)
		spans = append(spans, Span{end, n})
		end += n + random.IntN(2)*random.IntN(3) // also with gaps
	}
	m := withSpans(spans)
	for range 20_000 {
		off := random.IntN(end + 5)
		n := random.IntN(end)
		var want []Span
		for _, s := range spans {
			if from, to := max(off, s.Off), min(off+n, s.Off+s.Len); from < to {
				want = append(want, Span{from, to - from})
			}
		}
		require.Equal(t, want, slices.Collect(m.Spans(off, n)), "%d bytes at %d", n, off)
	}
}

// BenchmarkSpans finds the span of a byte among others: it must not take longer for
// more of them.
func BenchmarkSpans(b *testing.B) {
	for _, n := range []int{1, 64, 4096} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var spans []Span
			for i := range n {
				spans = append(spans, Span{i * 2 * mib, 2 * mib})
			}
			m, at := withSpans(spans), spans[n-1].Off
			b.ReportAllocs()
			for b.Loop() {
				for s := range m.Spans(at, 1) {
					if s.Len != 1 {
						b.Fatal("not the byte")
					}
				}
			}
		})
	}
}

// A slice of a type of many bytes costs no more than one of bytes.
func TestSliceAllocatesNothing(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	b := g.alloc(4*mib, Options{})
	type large [2 * mib]byte
	assert.Zero(t, testing.AllocsPerRun(10, func() {
		l, err := SliceOf[large](b.Bytes())
		bytes, other := BytesOf(l)
		if len(l) != 2 || len(Slice[uint64](b.Bytes())) != mib/2 || len(bytes) != 4*mib || errors.Join(err, other) != nil {
			t.Error("not as many as fit")
		}
	}))
}

// Work by other means than copies is queued while the memory is open, and Close waits for it.
func TestCloseWaitsForUses(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	b, err := Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	p, err := g.Dev.Malloc(16)
	require.NoError(t, err)
	s, err := g.Dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	problem := errors.New("a problem")
	assert.ErrorIs(t, b.Use(nil, true, func() error { t.Error("queued without a stream"); return nil }), errNilStream)
	assert.ErrorIs(t, b.Use(s, true, func() error { return problem }), problem)
	failing, err := Alloc(t.Context(), g.Dev, mib, Options{})
	require.NoError(t, err)
	g.Sim.Hold()
	require.NoError(t, b.Use(s, true, func() error { return s.Memset(p, 1, 16) }))
	require.ErrorIs(t, failing.Use(s, true, func() error { return errors.Join(s.Memset(p, 1, 16), problem) }), problem)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	assert.ErrorIs(t, b.CloseContext(ended), context.Canceled)
	assert.ErrorIs(t, failing.CloseContext(ended), context.Canceled, "what was queued before the error")
	assert.ErrorIs(t, b.Use(s, false, func() error { t.Error("queued after Close"); return nil }), cudart.ErrClosed)
	g.Sim.Release()
	require.NoError(t, b.Close())
	require.NoError(t, failing.Close())
	require.NoError(t, s.Close())
	require.NoError(t, g.Dev.Free(p))
	assert.ErrorIs(t, new(Buffer).Use(s, false, nil), errZero)
}

// withSpans returns a Buffer with these spans and no memory.
func withSpans(spans []Span) *Buffer {
	m := &Buffer{}
	m.pieces.Store(&spans)
	return m
}
