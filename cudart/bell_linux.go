//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// A bell is a sleep of microseconds that can be cut short. Go's timers wake an
// idle program to the millisecond only.
type bell struct{ fd int }

func newBell() (*bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return &bell{fd: fd}, nil
}

// precise makes the calling thread's sleeps end within a microsecond instead
// of the usual 50. Where that is refused, sleeps are just longer.
func (b *bell) precise() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// wait sleeps for d, or until rung if d is negative.
func (b *bell) wait(d time.Duration) {
	var timeout *unix.Timespec
	if d >= 0 {
		t := unix.NsecToTimespec(int64(d))
		timeout = &t
	}
	fds := [1]unix.PollFd{{Fd: int32(b.fd), Events: unix.POLLIN}}
	n, _ := unix.Ppoll(fds[:], timeout, nil)
	if n > 0 {
		var count [8]byte
		_, _ = unix.Read(b.fd, count[:])
	}
}

// ring ends the sleep under way, or the next one.
func (b *bell) ring() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(b.fd, one[:])
}

func (b *bell) close() { _ = unix.Close(b.fd) }
