//go:build !android && (amd64 || arm64)

package hostos

import (
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestMapHuge(t *testing.T) {
	const n = 8<<20 + 5
	mem, release, err := MapHuge(n)
	require.NoError(t, err)
	require.Len(t, mem, n)
	require.Equal(t, n, cap(mem))
	at := uintptr(unsafe.Pointer(&mem[0]))
	assert.Zero(t, at%HugePage)
	u, err := linux.ReadSMaps(os.DirFS("/"), at, n)
	require.NoError(t, err)
	assert.Less(t, u.Rss, n/8, "hardly anything is resident before it is touched: under qemu the account has a little")
	assert.False(t, u.HasFlag("dc") || u.HasFlag("dd"), "forked children and core dumps have it: %v", u.Flags)
	mem[n-1] = 1
	require.NoError(t, release())
	_, _, err = MapHuge(-HugePage - 1)
	require.Error(t, err)
}
