//go:build linux && !android && (amd64 || arm64)

package kernellog

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	maxRecord  = 8 << 10  // bytes of a record of /dev/kmsg: the kernel's limit
	maxRecords = 100_000  // more than a ring has: others may write meanwhile
	maxLog     = 16 << 20 // bytes of a ring that are read
)

// Read returns the lines of this host's log that matter, from /dev/kmsg, or by syslog(2) where there is no such
// file. Its error says what was refused.
func Read() (string, error) {
	text, err := readKmsg()
	if err == nil {
		return text, nil
	}
	text, errCall := readRing()
	if errCall == nil {
		return text, nil
	}
	return "", fmt.Errorf("kernellog: read: %w", errors.Join(err, errCall))
}

// readKmsg reads the records that are there, and waits for none.
func readKmsg() (string, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("/dev/kmsg: %w", err)
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return "", errors.New("/dev/kmsg: no device") // a container's, such as a link to its console
	}
	var all reducer
	record := make([]byte, maxRecord)
	for range maxRecords {
		n, err := unix.Read(fd, record)
		switch {
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EINTR): // overwritten before it was read
			continue
		case errors.Is(err, unix.EAGAIN):
			return all.text(), nil
		case err != nil:
			return "", fmt.Errorf("/dev/kmsg: %w", err)
		case n == 0:
			return all.text(), nil
		}
		first, _, _ := bytes.Cut(record[:n], []byte("\n")) // properties follow
		all.line(string(first))
	}
	return all.text(), nil
}

// readRing reads the ring by syslog(2), which the C library calls klogctl.
func readRing() (string, error) {
	size, err := unix.Klogctl(unix.SYSLOG_ACTION_SIZE_BUFFER, nil)
	if err != nil {
		return "", fmt.Errorf("syslog(2): %w", err)
	}
	ring := make([]byte, min(max(size, 0), maxLog))
	n, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, ring)
	if err != nil {
		return "", fmt.Errorf("syslog(2): %w", err)
	}
	return Reduce(string(ring[:n])), nil
}
