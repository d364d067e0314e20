//go:build linux && !android && (amd64 || arm64)

package verify

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapMemory maps n bytes of private memory.
func mapMemory(n int) (p unsafe.Pointer, unmap func() error, err error) {
	p, err = unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, fmt.Errorf("mmap %d bytes: %w", n, err)
	}
	return p, func() error {
		if err := unix.MunmapPtr(p, uintptr(n)); err != nil {
			return fmt.Errorf("munmap %d bytes at %p: %w", n, p, err)
		}
		return nil
	}, nil
}

// availableHost is the host memory that can be had without swapping, 0 when
// the system does not tell.
func availableHost() int {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), "MemAvailable:")
	fields := strings.Fields(after)
	if len(fields) == 0 {
		return 0
	}
	n, err := strconv.Atoi(fields[0])
	if err != nil {
		return 0
	}
	return n * kib
}
