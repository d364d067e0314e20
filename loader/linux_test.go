//go:build linux && !android && (amd64 || arm64)

package loader

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Samples in a mapped file that is cut short have no memory: reading them fails,
// where a copy loop would have ended the process.
func TestATruncatedMappedDataSet(t *testing.T) {
	t.Parallel()
	hosttest.Emulated(t, "user-mode emulation does not report the address of a bus error")
	page := os.Getpagesize()
	const n, batch, left = 12, 4, 6
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(int64(n*page)))
	mem, err := unix.Mmap(int(f.Fd()), 0, n*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	for i := range n {
		writeSample(mem[i*page:(i+1)*page], i, 0)
	}
	oneByOne := Func(n, []int{page}, func(_ context.Context, i int, sample [][]byte) error {
		copy(sample[0], mem[i*page:])
		return nil
	})
	together, err := InMemory([]int{page}, mem)
	require.NoError(t, err)
	dev := testgpu.Device(t)
	s := stream(t, dev)
	for _, c := range []struct {
		src     Source
		workers int
	}{{oneByOne, 1}, {oneByOne, 5}, {together, 1}, {together, 5}} {
		l := newLoaderFor(t, dev, c.src, Options{BatchSize: batch, Workers: c.workers})
		skipping := newLoaderFor(t, dev, c.src, Options{BatchSize: batch, Workers: c.workers, SkipErrors: true, Retries: 1})
		require.Len(t, slices.Concat(epochOf(t, l, s, page)...), n)

		require.NoError(t, f.Truncate(int64(left*page)))
		batches := 0
		var last error
		for _, last = range l.Batches(t.Context()) {
			if last == nil {
				batches++
			}
		}
		require.ErrorContains(t, last, ", batch 1 of epoch 1: no memory at 0x")
		require.ErrorContains(t, last, "or its file was truncated")
		require.Equal(t, 1, batches)
		require.Equal(t, [][]int{{0, 1, 2, 3}, {4, 5}, nil}, epochOf(t, skipping, s, page))

		require.NoError(t, f.Truncate(int64(n*page)))
		for i := left; i < n; i++ {
			writeSample(mem[i*page:(i+1)*page], i, 0)
		}
		require.Len(t, slices.Concat(epochOf(t, l, s, page)...), n)
	}
}
