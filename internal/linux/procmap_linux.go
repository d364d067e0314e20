//go:build amd64 || arm64

package linux

import (
	"bytes"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// procmap is struct procmap_query of include/uapi/linux/fs.h on 64-bit platforms.
type procmap struct {
	size       uint64
	queryFlags uint64
	queryAddr  uint64
	vmaStart   uint64
	vmaEnd     uint64
	vmaFlags   uint64
	pageSize   uint64
	offset     uint64
	inode      uint64
	devMajor   uint32
	devMinor   uint32
	nameSize   uint32 // of name; the kernel sets it to the name's length with the NUL
	buildSize  uint32
	name       unsafe.Pointer // a pointer, so that the garbage collector follows it
	buildID    uint64
}

const (
	ioctlProcmapQuery = 3<<30 | unsafe.Sizeof(procmap{})<<16 | 'f'<<8 | 17 // _IOWR('f', 17, struct procmap_query)

	procmapReadable       = 0x01
	procmapWritable       = 0x02
	procmapShared         = 0x08
	procmapCoveringOrNext = 0x10
)

// procmapQuery returns a lookup by PROCMAP_QUERY. Its errors are those of the
// system call: ENOTTY before Linux 6.11, ENOSYS under emulators.
func procmapQuery(maps *os.File) func(addr uintptr) (Mapping, bool, error) {
	return lookup(func(q *procmap) error {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, maps.Fd(), ioctlProcmapQuery, uintptr(unsafe.Pointer(q)))
		runtime.KeepAlive(maps)
		if errno != 0 {
			return errno
		}
		return nil
	})
}

// lookup makes a lookup of the system call.
func lookup(ioctl func(*procmap) error) func(addr uintptr) (Mapping, bool, error) {
	name := make([]byte, unix.PathMax) // the longest that the kernel fills
	return func(addr uintptr) (Mapping, bool, error) {
		q := &procmap{
			size:       uint64(unsafe.Sizeof(procmap{})),
			queryFlags: procmapCoveringOrNext,
			queryAddr:  uint64(addr),
			nameSize:   uint32(len(name)),
			name:       unsafe.Pointer(unsafe.SliceData(name)),
		}
		switch err := ioctl(q); err {
		case nil:
		case unix.ENOENT:
			return Mapping{}, false, nil
		default:
			return Mapping{}, false, err
		}
		text, _, _ := bytes.Cut(name[:q.nameSize], []byte{0})
		return Mapping{
			Start: uintptr(q.vmaStart), End: uintptr(q.vmaEnd),
			Read:   q.vmaFlags&procmapReadable != 0,
			Write:  q.vmaFlags&procmapWritable != 0,
			Shared: q.vmaFlags&procmapShared != 0,
			File:   q.inode != 0,
			Name:   string(text),
		}, true, nil
	}
}
