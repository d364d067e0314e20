//go:build !android && (amd64 || arm64)

package hostos

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Pages are made wherever a range begins and ends, and what the file has stays.
func TestFileMapping(t *testing.T) {
	t.Parallel()
	fd, err := unix.MemfdCreate(t.Name(), 0)
	require.NoError(t, err)
	memfd := os.NewFile(uintptr(fd), t.Name())
	defer memfd.Close()
	onDisk, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer onDisk.Close()
	const size = 5 * HugePage
	for _, f := range []*os.File{memfd, onDisk} {
		for _, part := range [][4]int{ // of the file, and of that the pages to make
			{0, size, 0, size},
			{0, size, HugePage + 5, HugePage},
			{777, 1, 0, 1},
			{777, HugePage, 5, HugePage - 5},
			{HugePage - 1, 2*HugePage + 2, 1, 2 * HugePage},
			{HugePage + 4096, size - HugePage - 4096, 2 * HugePage, 0},
			{HugePage + 4096, size - HugePage - 4096, 0, size - HugePage - 4096},
		} {
			what := fmt.Sprintf("%s: %v", f.Name(), part)
			require.NoError(t, f.Truncate(0), what)
			require.NoError(t, f.Truncate(size), what)
			_, err := f.WriteAt([]byte{1, 2, 3}, int64(part[0]))
			require.NoError(t, err, what)
			m, err := MapFile(int(f.Fd()), int64(part[0]), part[1])
			require.NoError(t, err, what)
			require.Len(t, m.Bytes, part[1], what)
			at := uintptr(unsafe.Pointer(&m.Bytes[0]))
			assert.Equal(t, uintptr(part[0])%HugePage, at%HugePage, what)
			m.MakePages(part[2], part[3])
			assert.EqualValues(t, 1, m.Bytes[0], what)
			m.Bytes[part[1]-1] = 4
			require.NoError(t, m.Unmap(), what)
			got := make([]byte, 2)
			_, err = f.ReadAt(got, int64(part[0]+part[1]-1))
			if part[0]+part[1] < size {
				require.NoError(t, err, what)
			}
			assert.EqualValues(t, 4, got[0], what)
			if part[1] > 1 {
				_, err = f.ReadAt(got, int64(part[0]+1))
				require.NoError(t, err, what)
				assert.EqualValues(t, 2, got[0], what)
			}
		}
	}
	_, err = MapFile(-1, 0, 1)
	require.ErrorIs(t, err, unix.EBADF)
}

// After a costly huge page others are tried again, after a refused one none is.
func TestHugePagesAreTriedAgain(t *testing.T) {
	t.Parallel()
	fd, err := unix.MemfdCreate(t.Name(), 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	const calls = 3
	require.NoError(t, unix.Ftruncate(fd, (calls+1)*HugePage))
	m, err := MapFile(fd, 0, (calls+1)*HugePage)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Unmap()) }()
	m.small.Store(calls)
	for i := range calls {
		m.MakePages(i*HugePage, HugePage)
		assert.EqualValues(t, calls-1-i, m.small.Load())
	}
	m.MakePages(calls*HugePage, HugePage) // the kernel may refuse it, or take long
	assert.Contains(t, []int32{0, never, costlyCalls}, m.small.Load())
	m.small.Store(never)
	m.MakePages(0, HugePage)
	assert.EqualValues(t, never, m.small.Load())
}

// The CPU time of a call is not the time that it waits.
func TestCPUTimeOf(t *testing.T) {
	t.Parallel()
	failed := errors.New("failed")
	waited, err := cpuTimeOf(func() error { return cmp.Or(unix.Nanosleep(&unix.Timespec{Nsec: 3e8}, nil), failed) })
	require.ErrorIs(t, err, failed)
	assert.Less(t, waited, 150*time.Millisecond)
	worked, err := cpuTimeOf(func() error {
		for began := CPUTime(); CPUTime()-began < 20*time.Millisecond; {
			_ = os.Getpid()
		}
		return nil
	})
	require.NoError(t, err)
	assert.Positive(t, worked)
}
