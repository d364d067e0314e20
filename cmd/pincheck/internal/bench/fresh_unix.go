//go:build unix

package bench

import "golang.org/x/sys/unix"

// fresh maps new memory (mmap), as malloc does for large blocks: on huge pages only
// where the host makes them unasked. release unmaps it.
func fresh(n int) (b []byte, release func() error, err error) {
	if b, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return nil, nil, err
	}
	return b, func() error { return unix.Munmap(b) }, nil
}
