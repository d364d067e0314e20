//go:build !android && (amd64 || arm64)

package hostos

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// newPagesAhead maps a part of a file in memory, which begins and ends within a huge page.
func newPagesAhead(t *testing.T) *PagesAhead {
	t.Helper()
	fd, err := unix.MemfdCreate(t.Name(), 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	const off, n = HugePage - 4096, 4*aheadBytes + HugePage + 5
	require.NoError(t, unix.Ftruncate(fd, off+n))
	m, err := MapFile(fd, off, n)
	require.NoError(t, err)
	return NewPagesAhead(m)
}

// All pages are made in order, once, whoever waits for them.
func TestPagesAhead(t *testing.T) {
	t.Parallel()
	a := newPagesAhead(t)
	var made atomic.Int32
	assert.Zero(t, a.Ready())
	for range 2 {
		a.Start(func(int) bool { return true }, func() { made.Add(1) })
	}
	for off := 0; off < len(a.Bytes); off += HugePage / 2 {
		a.Wait(off)
		assert.GreaterOrEqual(t, a.Ready(), off)
	}
	a.Wait(len(a.Bytes))
	assert.Equal(t, len(a.Bytes), a.Ready())
	a.makers.Wait()
	assert.EqualValues(t, 5, made.Load(), "pieces up to a multiple of a huge page")
	assert.Empty(t, a.behind)
	require.NoError(t, a.Unmap())
}

// Nobody waits for pages that are not wanted any more.
func TestPagesAheadEndEarly(t *testing.T) {
	t.Parallel()
	a := newPagesAhead(t)
	a.Start(func(off int) bool { return off < 4*HugePage }, func() {})
	a.Wait(len(a.Bytes))
	assert.Less(t, a.Ready(), len(a.Bytes))
	require.NoError(t, a.Unmap())

	a = newPagesAhead(t)
	a.Stop()
	a.Start(func(int) bool { return true }, func() {})
	a.Wait(1)
	assert.Zero(t, a.Ready(), "pages that begin after Stop")
	require.NoError(t, a.Unmap())
}

// Unmap waits for the goroutines that make pages.
func TestPagesAheadAreUnmapped(t *testing.T) {
	t.Parallel()
	for range 20 {
		a := newPagesAhead(t)
		a.Start(func(int) bool { return true }, func() {})
		require.NoError(t, a.Unmap())
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(HugePage))
	m, err := MapFile(int(f.Fd()), 0, HugePage)
	require.NoError(t, err)
	a := NewPagesAhead(m)
	require.NoError(t, a.Unmap(), "one that was never started")
}
