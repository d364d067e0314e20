//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// A sleeper is a sleep of microseconds that wake ends. Go's timers wake an idle program
// with a precision of a millisecond.
type sleeper struct {
	fd    int           // an eventfd, or -1 if there is none (no file descriptor is left):
	woken chan struct{} // then this, with Go's timers
}

func newSleeper() *sleeper {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return &sleeper{fd: -1, woken: make(chan struct{}, 1)}
	}
	return &sleeper{fd: fd}
}

// precise makes sleeps of the calling thread end within a microsecond instead of 50
// (PR_SET_TIMERSLACK). If the kernel refuses, sleeps are longer.
func (b *sleeper) precise() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// wait sleeps for d or until wake, and reports whether wake ended it.
func (b *sleeper) wait(d time.Duration) (woken bool) {
	if b.fd < 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-b.woken:
			return true
		case <-t.C:
			return false
		}
	}
	timeout := unix.NsecToTimespec(int64(d))
	fds := [1]unix.PollFd{{Fd: int32(b.fd), Events: unix.POLLIN}}
	n, _ := unix.Ppoll(fds[:], &timeout, nil)
	if n <= 0 {
		return false
	}
	var count [8]byte
	_, _ = unix.Read(b.fd, count[:])
	return true
}

// wake ends the sleep in progress, or else the next one.
func (b *sleeper) wake() {
	if b.fd < 0 {
		select {
		case b.woken <- struct{}{}:
		default:
		}
		return
	}
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(b.fd, one[:])
}

func (b *sleeper) close() {
	if b.fd >= 0 {
		_ = unix.Close(b.fd)
	}
}
