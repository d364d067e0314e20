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
	"github.com/gopinned/pinned/internal/ntcopy"
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

// memory is a Host of which tests change how much is ready.
type memory struct {
	mem  []byte
	next int
}

func (*memory) Start(*Job)           {}
func (*memory) Stop()                {}
func (*memory) Wait(context.Context) {}
func (m *memory) Ready() int         { return len(m.mem) - m.next }

func (m *memory) Take(_, n int) Part {
	m.next += n
	return Part{Off: m.next - n, N: n, Copy: from(m.mem)}
}

// from is a Host of an upload from memory, and into one of a download.
func from(src []byte) Memory {
	return func(to []byte, off int) error {
		copy(to, src[off:])
		return nil
	}
}

func into(dst []byte) Memory {
	return func(from []byte, off int) error {
		ntcopy.Copy(dst[off:], from)
		return nil
	}
}

func upload(ctx context.Context, s *Stage, dst cudart.DevPtr, src []byte) (int, error) {
	if ok, err := s.CopySmall(ctx, dst, src, false); ok {
		return len(src), err
	}
	return s.Run(ctx, Copy{N: len(src), Host: from(src), Queue: func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
	}})
}

func download(ctx context.Context, s *Stage, dst []byte, src cudart.DevPtr) (int, error) {
	if ok, err := s.CopySmall(ctx, src, dst, true); ok {
		return len(dst), err
	}
	return s.Run(ctx, Copy{N: len(dst), Down: true, Host: into(dst), Queue: func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToHost(unsafe.Pointer(&mem[0]), src+cudart.DevPtr(off), len(mem))
	}})
}

func TestThereAndBack(t *testing.T) {
	s, dev := acquire(t)
	const maxN = 100*mib + 12345
	mem := device(t, dev, maxN)
	src := random(maxN, 1)
	for _, n := range []int{1, 4095, MaxSmall, MaxSmall + 1, 300_000, mib, 5*mib + 1, 33 * mib, maxN} {
		done, err := upload(t.Context(), s, mem, src[:n])
		require.NoError(t, err)
		require.Equal(t, n, done)
		back := make([]byte, n)
		done, err = download(t.Context(), s, back, mem)
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
				_, err := upload(t.Context(), s, mem, src)
				assert.NoError(t, err)
				_, err = download(t.Context(), s, back, mem)
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
		done, err := upload(ctx, s, mem, src)
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.LessOrEqual(t, done, n)
		}
	}
	_, err := upload(t.Context(), s, mem, src)
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
				if _, err := upload(b.Context(), s, mem, src); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
