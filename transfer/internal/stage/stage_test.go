package stage

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

func acquire(tb testing.TB) (*Stage, *cudart.Device) {
	tb.Helper()
	dev := testgpu.Device(tb)
	s, err := Acquire(context.Background(), dev)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, s.Release(context.Background())) })
	return s, dev
}

func device(tb testing.TB, dev *cudart.Device, n int) cudart.DevPtr {
	tb.Helper()
	p, err := dev.Malloc(n)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, dev.Free(p)) })
	return p
}

func random(n int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		*(*uint64)(unsafe.Pointer(&b[i])) = r.Uint64()
	}
	return b[:n]
}

func TestThereAndBack(t *testing.T) {
	s, dev := acquire(t)
	const most = 100*mib + 12345
	mem := device(t, dev, most)
	src := random(most, 1)
	for _, n := range []int{1, 4095, alone, alone + 1, 300_000, mib, 5*mib + 1, 33 * mib, most} {
		done, err := s.Upload(t.Context(), mem, src[:n], nil)
		require.NoError(t, err)
		require.Equal(t, n, done)
		back := make([]byte, n)
		done, err = s.Download(t.Context(), back, mem, nil)
		require.NoError(t, err)
		require.Equal(t, n, done)
		require.True(t, bytes.Equal(src[:n], back), "%d bytes", n)
	}
}

func TestManyAtOnce(t *testing.T) {
	s, dev := acquire(t)
	const each = 3*mib + 77
	var all sync.WaitGroup
	for i := range 24 {
		mem := device(t, dev, each)
		all.Go(func() {
			src := random(each, uint64(i))
			back := make([]byte, each)
			for range 5 {
				_, err := s.Upload(t.Context(), mem, src, nil)
				assert.NoError(t, err)
				_, err = s.Download(t.Context(), back, mem, nil)
				assert.NoError(t, err)
				assert.True(t, bytes.Equal(src, back))
			}
		})
	}
	all.Wait()
}

func TestCancel(t *testing.T) {
	s, dev := acquire(t)
	const n = 64 * mib
	mem := device(t, dev, n)
	src := random(n, 1)
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*500*time.Microsecond)
		done, err := s.Upload(ctx, mem, src, nil)
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Less(t, done, n)
		}
	}
	_, err := s.Upload(t.Context(), mem, src, nil)
	require.NoError(t, err)
}

func BenchmarkUpload(b *testing.B) {
	s, dev := acquire(b)
	for _, n := range []int{256 * kib, mib, 4 * mib, 64 * mib} {
		mem := device(b, dev, n)
		src := random(n, 1)
		b.Run(time.Duration(n).String(), func(b *testing.B) {
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Upload(b.Context(), mem, src, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
