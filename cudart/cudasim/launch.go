package cudasim

import (
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// A KernelFunc does the work of a whole launch of a kernel: what all its threads do together. It
// runs in the order of the launch's stream, at the same time as other streams. It must end by
// itself, and must not call CUDA.
type KernelFunc func(*Launch)

// A Launch is a run of a kernel: see Config.Kernels. It is valid until the function returns.
type Launch struct {
	Kernel      string // its name in the code
	Device      int    // ordinal
	Grid, Block [3]int // x, y, z; none is 0
	SharedBytes int    // dynamic shared memory of a block

	dev  *device
	args [][]byte
	uses []*block // that the function has memory of
}

// Raw returns the bytes of argument i. If there is none, the kernel ends with
// cudaErrorIllegalAddress, as it does in [Arg].
func (l *Launch) Raw(i int) []byte {
	if i < 0 || i >= len(l.args) {
		panic(accessFault{cudart.ErrIllegalAddress, fmt.Sprintf("reads argument %d: there are %d", i, len(l.args))})
	}
	return l.args[i]
}

// Arg returns argument i of a kernel as a T, which has the size of the parameter: a pointer is a
// [cudart.DevPtr].
func Arg[T cudart.Number](l *Launch, i int) T {
	var v T
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), l.Raw(i))
	return v
}

// An accessFault ends a kernel.
type accessFault struct {
	code   cudart.Code
	detail string
}

// Read returns n bytes at p, which must not be changed, as the device reads them: of its own
// memory, of managed memory, of pinned host memory, or of a device whose memory it may access. If
// they are not all such memory, the kernel ends there with cudaErrorIllegalAddress, which every
// later call on the device returns, and a [Misuse] of the kind "illegal access" is recorded.
func (l *Launch) Read(p cudart.DevPtr, n int) []byte { return l.access(uintptr(p), n, false) }

// Write returns n bytes at p, which may be changed: see [Launch.Read]. Host memory that is
// registered as read-only is none.
func (l *Launch) Write(p cudart.DevPtr, n int) []byte { return l.access(uintptr(p), n, true) }

// Elements returns bytes that [Launch.Read] or [Launch.Write] returned as values of T, numbers or
// structs of numbers. If their address is no multiple of T's alignment, the kernel ends with
// cudaErrorMisalignedAddress. Bytes beyond the last whole value are left out.
func Elements[T any](b []byte) []T {
	var zero T
	n := len(b) / int(unsafe.Sizeof(zero))
	if n == 0 {
		return nil
	}
	first := unsafe.Pointer(&b[0])
	if uintptr(first)%unsafe.Alignof(zero) != 0 {
		panic(accessFault{cudart.ErrMisalignedAddress, fmt.Sprintf("values of %d bytes at an address that is no multiple of %d",
			unsafe.Sizeof(zero), unsafe.Alignof(zero))})
	}
	return unsafe.Slice((*T)(first), n)
}

func (l *Launch) access(at uintptr, n int, write bool) []byte {
	if n == 0 {
		return nil
	}
	s := l.dev.sim
	s.mu.Lock()
	defer s.mu.Unlock()
	if problem := l.inaccessible(at, n, write); problem != "" {
		verb := "reads"
		if write {
			verb = "writes"
		}
		panic(accessFault{cudart.ErrIllegalAddress, fmt.Sprintf("%s %d bytes at %#x, %s", verb, n, at, problem)})
	}
	b := s.blocks.find(at)
	if b == nil || b.kind == registeredBlock || at+uintptr(n) > b.end() {
		return bytesAt(at, n)
	}
	if b.kind == managedBlock {
		s.touch((span{addr: at, n: n, block: b}).pages(), l.dev.ordinal, write)
	}
	return b.bytes(at, n)
}

// inaccessible returns why the device cannot access memory, "" if it can. The function uses
// the blocks from then on. It needs mu.
func (l *Launch) inaccessible(at uintptr, n int, write bool) string {
	end := at + uintptr(n)
	if n < 0 || end < at {
		return "which are more than there are addresses"
	}
	for at < end {
		b := l.dev.sim.blocks.find(at)
		switch {
		case b != nil:
			if why := l.dev.forbids(b, end, write); why != "" {
				return why
			}
		case at >= deviceAddresses:
			return "which no device has allocated"
		case !l.dev.usesHostTables():
			return "which is host memory that is neither pinned nor managed"
		default:
			b = &block{addr: at, size: int(end - at), kind: registeredBlock}
			if next := l.dev.sim.blocks.overlap(at, int(end-at)); next != nil {
				b.size = int(next.addr - at)
			}
		}
		b.uses++
		l.uses = append(l.uses, b)
		at = b.end()
	}
	return ""
}

// forbids returns why the device cannot access a block up to end, "" if it can.
func (d *device) forbids(b *block, end uintptr, write bool) string {
	switch {
	case b.kind == deviceBlock && b.dev != d && !slices.Contains(d.peers, b.dev):
		return fmt.Sprintf("which are of device %d, whose memory this one may not access", b.dev.ordinal)
	case b.kind == deviceBlock && end > b.end():
		return fmt.Sprintf("where the allocation of %d bytes at %#x ends", b.size, b.addr)
	case b.kind == registeredBlock && write && b.flags&registerReadOnly != 0:
		return "which are registered as read-only"
	}
	return ""
}

// run calls the function, and turns what it does wrong into the error that the device has from
// then on.
func (l *Launch) run(f KernelFunc) (code cudart.Code) {
	s := l.dev.sim
	defer func() {
		r := recover()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, b := range l.uses {
			b.uses--
			s.blocks.unmap(b)
		}
		fault, ok := r.(accessFault)
		switch {
		case ok:
			s.record(Misuse{Kind: illegalAccess, Call: "kernel " + l.Kernel, Current: l.Device, Want: -1, Detail: fault.detail})
			code = fault.code
			l.dev.broken = code
			s.wakeAll()
		case r != nil:
			panic(r)
		}
	}()
	if !guarded(func() { f(l) }) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.record(Misuse{Kind: unmappedMemory, Call: "kernel " + l.Kernel, Current: l.Device, Want: -1,
			Detail: "host memory was unmapped, or protected, before the kernel ran"})
	}
	return success
}

// duration is how long the device's accesses to n bytes at p take by the link model. It needs mu.
func (l *Launch) duration(p cudart.DevPtr, n int, write bool) time.Duration {
	link := &l.dev.cfg.Link
	speed := link.OnDevice
	b := l.dev.sim.blocks.find(uintptr(p))
	switch {
	case n <= 0 || b == nil:
		return 0
	case b.kind == deviceBlock && b.dev != l.dev:
		speed = link.Peer
	case b.kind == deviceBlock || b.kind == managedBlock:
	case write:
		speed = link.DeviceToHost
	default:
		speed = link.HostToDevice
	}
	return speed.time(min(n, b.size))
}
