//go:build linux && !android && (amd64 || arm64)

package transfer

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Memory that is half registered is copied both ways, each byte once, and with one count of progress.
func TestMemoryThatIsBeingRegistered(t *testing.T) {
	t.Parallel()
	for _, withFile := range []bool{false, true} {
		t.Run(fmt.Sprintf("file %v", withFile), func(t *testing.T) {
			t.Parallel()
			testMemoryThatIsBeingRegistered(t, withFile)
		})
	}
}

func testMemoryThatIsBeingRegistered(t *testing.T, withFile bool) {
	const n, chunk = directPiece + 8*mib, 8 * mib
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	const head = 4096 // bytes of the file before the memory
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	file := os.NewFile(uintptr(fd), "memfd")
	defer file.Close()
	require.NoError(t, file.Truncate(head+n))
	mem, err := unix.Mmap(fd, head, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	want := bytesOf(1, n)
	copy(mem, want)

	o := hostmem.RegisterOptions{Background: true, Chunk: chunk}
	if withFile {
		o.File, o.Offset = file, head
	}
	unblock := sim.Block("cudaHostRegister", cudasim.Fault{Nth: 4})
	buf, err := hostmem.Register(t.Context(), dev, mem, o)
	require.NoError(t, err)
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaHostRegister", 1))
	last, growing := 0, true
	c := r.c.With(Call{Progress: func(done, total int) {
		growing = growing && done >= last && total == n
		last = done
	}})
	p := r.device(n)
	before := c.Stats()
	require.NoError(t, c.Upload(t.Context(), p, mem))
	require.True(t, bytes.Equal(want, r.onDevice(p, n)))
	assert.True(t, growing)
	assert.Equal(t, n, last)
	after := c.Stats()
	assert.Equal(t, 3*chunk, after.DirectBytes-before.DirectBytes)
	assert.Equal(t, n-3*chunk, after.StagedBytes-before.StagedBytes)

	clear(mem)
	require.NoError(t, r.c.Download(t.Context(), mem, p))
	require.True(t, bytes.Equal(want, mem))
	unblock()
	require.NoError(t, buf.Registered(t.Context()))
	before = r.c.Stats()
	require.NoError(t, r.c.Upload(t.Context(), p, mem))
	assert.Equal(t, n, r.c.Stats().DirectBytes-before.DirectBytes)
	require.NoError(t, buf.Close())
}
