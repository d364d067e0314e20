//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"fmt"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/testgpu"
)

// What a forked child says of an address.
const (
	hasMemory = 10
	hasNone   = 11
)

// fork makes a child by a real fork, which copies page tables, and returns its exit status. The
// child queries the kernel for the page at addr and ends; it must do nothing else, for none of Go's
// other threads are in it. Go's own exec shares the memory with the child instead.
func fork(addr uintptr) (status int, err error) {
	vec := make([]byte, 1)
	page := uintptr(unix.Getpagesize())
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if pid == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_MINCORE, addr, page, uintptr(unsafe.Pointer(&vec[0])))
		if errno == 0 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, hasMemory, 0, 0)
		}
		unix.RawSyscall(unix.SYS_EXIT_GROUP, hasNone, 0, 0)
	}
	var ws unix.WaitStatus
	for {
		_, err = unix.Wait4(int(pid), &ws, 0, nil)
		if err != unix.EINTR {
			return ws.ExitStatus(), err
		}
	}
}

func TestForkedChildrenHaveTheMemoryOnRequest(t *testing.T) {
	requireAccount(t)
	g := newFixture(t)
	for _, tc := range []struct {
		o    Options
		want int
	}{
		{Options{}, hasNone},
		{Options{Fork: true}, hasMemory},
	} {
		b := g.alloc(3*mib, tc.o)
		status, err := fork(uintptr(b.Pointer()))
		require.NoError(t, err)
		assert.Equal(t, tc.want, status, "%+v", tc.o)
		require.NoError(t, b.Close())
	}
}

// BenchmarkFork forks, and waits for the child, while memory is pinned.
func BenchmarkFork(b *testing.B) {
	dev := testgpu.Device(b)
	n := 16 << 20
	if testgpu.Real() {
		n = 1 << 30
	}
	for _, o := range []Options{{}, {Fork: true}} {
		name := sizeName(n)
		if o.Fork {
			name += "/default" // as pin.c calls it
		}
		b.Run(name, func(b *testing.B) {
			buf, err := Alloc(b.Context(), dev, n, o)
			require.NoError(b, err)
			defer func() { require.NoError(b, buf.Close()) }()
			for b.Loop() {
				status, err := fork(uintptr(buf.Pointer()))
				if err != nil || status == 0 {
					b.Fatal(fmt.Errorf("status %d: %w", status, err))
				}
			}
		})
	}
}
