//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"math"
	"math/bits"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/linux"
)

func realCalls() Calls {
	return Calls{
		Map: mapAnon, MapFile: mapFile, Unmap: unmap, Advise: advise, Name: name,
		Bind: bind, Where: where, Resident: resident, Private: private, FileSystem: fileSystem, Touch: touch,
	}
}

// MemlockLimit returns RLIMIT_MEMLOCK in bytes, math.MaxInt for none. ok is false where
// there is no such limit.
func MemlockLimit() (limit int, ok bool) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return 0, false
	}
	return int(min(l.Cur, math.MaxInt)), true
}

func mapAnon(n, hugetlb int) (unsafe.Pointer, error) {
	flags := unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if hugetlb > 0 {
		flags |= unix.MAP_HUGETLB | (bits.Len(uint(hugetlb))-1)<<unix.MAP_HUGE_SHIFT
	}
	return unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, flags)
}

func mapFile(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error) {
	access := unix.PROT_READ
	if write {
		access |= unix.PROT_WRITE
	}
	defer runtime.KeepAlive(f)
	p, err := hostos.MapAligned(int(f.Fd()), off, uintptr(n), access)
	if err != nil { // pages of a hugetlbfs may be larger
		return unix.MmapPtr(int(f.Fd()), off, nil, uintptr(n), access, unix.MAP_SHARED)
	}
	return p, nil
}

func unmap(p unsafe.Pointer, n int) error { return unix.MunmapPtr(p, uintptr(n)) }

func advise(p unsafe.Pointer, n int, a Advice) error {
	mem := unsafe.Slice((*byte)(p), n)
	if a == AdviseCollapse {
		return hostos.Collapse(mem)
	}
	how := [...]int{
		AdviseHuge: unix.MADV_HUGEPAGE, AdviseNoHuge: unix.MADV_NOHUGEPAGE,
		AdviseDontFork: unix.MADV_DONTFORK, AdviseDontDump: unix.MADV_DONTDUMP,
		AdvisePopulate: unix.MADV_POPULATE_WRITE, AdvisePopulateRead: unix.MADV_POPULATE_READ,
	}[a]
	return unix.Madvise(mem, how)
}

func name(p unsafe.Pointer, n int, name string) error {
	text, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	err = unix.Prctl(unix.PR_SET_VMA, unix.PR_SET_VMA_ANON_NAME, uintptr(p), uintptr(n), uintptr(unsafe.Pointer(text)))
	runtime.KeepAlive(text)
	return err
}

func bind(p unsafe.Pointer, n, node int) error {
	// The kernel reads one bit less than the length says.
	mask := make([]uint64, node/64+1)
	mask[node/64] = 1 << (node % 64)
	return errno(unix.Syscall6(unix.SYS_MBIND, uintptr(p), uintptr(n), unix.MPOL_PREFERRED,
		uintptr(unsafe.Pointer(&mask[0])), uintptr(len(mask)*64+1), 0))
}

func where(pages []unsafe.Pointer, nodes []int32) error {
	if len(pages) == 0 {
		return nil
	}
	return errno(unix.Syscall6(unix.SYS_MOVE_PAGES, 0, uintptr(len(pages)),
		uintptr(unsafe.Pointer(&pages[0])), 0, uintptr(unsafe.Pointer(&nodes[0])), 0))
}

func resident(p unsafe.Pointer, n int, vec []byte) error {
	return errno(unix.Syscall(unix.SYS_MINCORE, uintptr(p), uintptr(n), uintptr(unsafe.Pointer(&vec[0]))))
}

func private(pages []unsafe.Pointer) (n int, err error) {
	addrs := make([]uintptr, len(pages))
	for i, page := range pages {
		addrs[i] = uintptr(page)
	}
	return linux.CountPages(os.DirFS("/"), linux.PagesPrivate, 1, addrs...)
}

func fileSystem(path string) (FileSystem, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return FileSystem{}, err
	}
	switch uint32(s.Type) {
	case unix.HUGETLBFS_MAGIC:
		return FileSystem{Page: int(s.Bsize), Memory: true}, nil
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		return FileSystem{Memory: true}, nil
	}
	return FileSystem{}, nil
}

func errno(_, _ uintptr, e unix.Errno) error {
	if e != 0 {
		return e
	}
	return nil
}
