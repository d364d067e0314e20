//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/dynlib"
)

// A handler without SA_ONSTACK is found, with the library that it is of; Go's own are none.
func TestHandlersWithoutAStack(t *testing.T) {
	require.Empty(t, handlersWithoutStack())
	libc, err := dynlib.Open("libc.so.6")
	require.NoError(t, err)
	const signal = 50 // that nobody sends here
	set := func(a *signalAction) (before signalAction) {
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, signal, uintptr(unsafe.Pointer(a)), uintptr(unsafe.Pointer(&before)), unsafe.Sizeof(a.mask), 0, 0)
		require.Zero(t, errno)
		return before
	}
	before := set(&signalAction{handler: libc.Symbol("abort")})
	notes := handlersWithoutStack()
	set(&before)
	require.Len(t, notes, 1)
	require.Regexp(t, `^signal 50 \(signal 50\) has a handler without SA_ONSTACK, in /\S*libc\S*: the Go runtime ends the process`, notes[0])
	require.Empty(t, handlersWithoutStack())
}
