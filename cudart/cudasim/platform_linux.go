//go:build linux && !android && (amd64 || arm64)

package cudasim

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// newEntry makes a C function pointer of up to eleven integer arguments. It cannot
// be freed. A call is faster with fewer arguments.
func newEntry(args int, f func(*arguments) uintptr) (entry uintptr, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("cudasim: %v", r)
		}
	}()
	switch {
	case args <= 1:
		return purego.NewCallback(func(a uintptr) uintptr { return f(&arguments{a}) }), nil
	case args <= 3:
		return purego.NewCallback(func(a, b, c uintptr) uintptr { return f(&arguments{a, b, c}) }), nil
	case args <= 5:
		return purego.NewCallback(func(a, b, c, d, e uintptr) uintptr { return f(&arguments{a, b, c, d, e}) }), nil
	case args <= 9:
		return purego.NewCallback(func(a, b, c, d, e, f6, g, h, i uintptr) uintptr {
			return f(&arguments{a, b, c, d, e, f6, g, h, i})
		}), nil
	default:
		return purego.NewCallback(func(a, b, c, d, e, f6, g, h, i, j, k uintptr) uintptr {
			return f(&arguments{a, b, c, d, e, f6, g, h, i, j, k})
		}), nil
	}
}

// callHostFunction calls a C function with one argument.
func callHostFunction(fn, arg uintptr) { purego.SyscallN(fn, arg) }

// A threadKey numbers OS threads. Thread ids of the kernel are used again when
// a thread has ended, and the new thread would inherit the state of the old one;
// the C library's thread-specific data is empty on every new thread.
type threadKey struct {
	key      uintptr
	get, set uintptr
	last     atomic.Uint64
}

// threads is the only key of the process: keys are scarce.
var threads = sync.OnceValues(func() (*threadKey, error) {
	k := &threadKey{}
	var create uintptr
	for _, s := range []struct {
		name string
		to   *uintptr
	}{{"pthread_key_create", &create}, {"pthread_getspecific", &k.get}, {"pthread_setspecific", &k.set}} {
		p, err := purego.Dlsym(purego.RTLD_DEFAULT, s.name)
		if err != nil {
			return nil, fmt.Errorf("cudasim: the C library has no %s: %w", s.name, err)
		}
		*s.to = p
	}
	key := new(uint32)
	if rc, _, _ := purego.SyscallN(create, uintptr(unsafe.Pointer(key)), 0); int32(rc) != 0 {
		return nil, fmt.Errorf("cudasim: pthread_key_create: %w", unix.Errno(rc))
	}
	k.key = uintptr(*key)
	return k, nil
})

// current returns the number of the calling thread, which must be locked, as it
// is in a call from C.
func (k *threadKey) current() uint64 {
	id, _, _ := purego.SyscallN(k.get, k.key)
	if id == 0 {
		id = uintptr(k.last.Add(1))
		purego.SyscallN(k.set, k.key, id)
	}
	return uint64(id)
}

// mapMemory returns n bytes of zeros at a page boundary, outside Go's heap.
// They occupy memory only once they are accessed.
func mapMemory(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
}

func unmapMemory(m []byte) error { return unix.Munmap(m) }

// dropMemory releases the pages. The addresses stay readable.
func dropMemory(m []byte) error { return unix.Madvise(m, unix.MADV_DONTNEED) }

// mapped reports whether the page of an address is mapped.
func mapped(addr uintptr) bool {
	var vec [1]byte
	page := uintptr(unix.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, addr&^(page-1), page, uintptr(unsafe.Pointer(&vec[0])))
	return errno != unix.ENOMEM
}
