//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestPageable(t *testing.T) {
	requireAccount(t)
	const n = 8*mib + 5
	p, err := AllocPageable(n)
	require.NoError(t, err)
	mem := p.Bytes()
	require.Len(t, mem, n)
	require.Equal(t, n, p.Len())
	_, _, pinned := Find(mem)
	assert.False(t, pinned)
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(unsafe.Pointer(&p.Bytes()[0])), n)
	require.NoError(t, err)
	assert.Zero(t, u.Rss, "nothing is resident before it is touched")
	assert.False(t, u.HasFlag("dc") || u.HasFlag("dd"), "ordinary memory: forked children and core dumps have it: %v", u.Flags)
	assert.Zero(t, mem[0])
	mem[n-1] = 1
	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "a second Close does nothing")
	assert.Nil(t, p.Bytes())
	_, err = AllocPageable(-1)
	require.ErrorContains(t, err, "allocate -1 pageable bytes")
}
