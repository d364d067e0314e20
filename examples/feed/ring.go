//go:build linux

package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A ring is memory that a consumer maps as well: a memfd, which disappears with the last process that
// has it. It is sealed, so that nobody can cut off what the other side has mapped.
type ring struct {
	fd  int // -1 when it was sent
	mem []byte
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func newRing(n int) (r *ring, err error) {
	r = &ring{fd: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.fd, err = unix.MemfdCreate("pinned-feed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return r, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(r.fd, int64(n)); err != nil {
		return r, fmt.Errorf("memfd of %d bytes: %w", n, err)
	}
	if _, err = unix.FcntlInt(uintptr(r.fd), unix.F_ADD_SEALS, seals); err != nil {
		return r, fmt.Errorf("seal the memfd: %w", err)
	}
	if r.mem, err = unix.Mmap(r.fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return r, fmt.Errorf("map %d bytes of the memfd: %w", n, err)
	}
	return r, nil
}

// closeFile closes the descriptor. The mapping stays.
func (r *ring) closeFile() error {
	if r.fd < 0 {
		return nil
	}
	err := unix.Close(r.fd)
	r.fd = -1
	return err
}

func (r *ring) close() error {
	err := r.closeFile()
	if r.mem != nil {
		err = errors.Join(err, unix.Munmap(r.mem))
		r.mem = nil
	}
	return err
}
