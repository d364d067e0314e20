package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"
)

// A header is the first 512 bytes of a file's first page. Numbers are little-endian, times nanoseconds since
// 1970.
//
//	offset  bytes  what                             written by
//	0       8      "pinnedSM"                       Create
//	8       4      version of this layout, 1        Create
//	12      4      flags: 1 is Keep                 Create
//	16      8      offset of the content            Create
//	24      8      size of the content              Create
//	32      8      time of Create                   Create
//	40      4      process id of its maker          Create
//	44      4      user id of its maker             Create
//	48      4      CRC-32C of the bytes before      Create
//	64      8      generation, odd while incomplete Begin, Complete; atomic
//	72      8      time of Begin or Complete        Begin, Complete
//	80      4      process id of the writer         Begin, Complete
//	84      4      length of the label              Complete
//	88      8      time of the last Open or Close   Open, Close, if it may write; atomic
//	96      200    label                            Complete
//
// The fields from 72 on, without 88, are valid if the generation is even and the same after reading them.
type header struct {
	keep     bool
	offset   int // of the content
	size     int // of the content
	created  time.Time
	pid, uid int
}

const (
	magic      = "pinnedSM"
	version    = 1
	headerSize = 512
	maxLabel   = 200

	atFlags, atOffset, atSize, atCreated, atPID, atUID, atSum = 12, 16, 24, 32, 40, 44, 48
	atGeneration, atWritten, atWriter, atLength, atUsed       = 64, 72, 80, 84, 88
	atLabel                                                   = 96
)

var order = binary.LittleEndian

// ErrDamaged is the error of a file whose header is not one of this package, or does not fit the file.
var ErrDamaged = errors.New("not a memory of package shm, or damaged")

func checksum(page []byte) uint32 {
	return crc32.Checksum(page[:atSum], crc32.MakeTable(crc32.Castagnoli))
}

// put writes a header to a page of zeros.
func (h header) put(page []byte) {
	copy(page, magic)
	order.PutUint32(page[8:], version)
	if h.keep {
		order.PutUint32(page[atFlags:], 1)
	}
	order.PutUint64(page[atOffset:], uint64(h.offset))
	order.PutUint64(page[atSize:], uint64(h.size))
	order.PutUint64(page[atCreated:], uint64(h.created.UnixNano()))
	order.PutUint32(page[atPID:], uint32(h.pid))
	order.PutUint32(page[atUID:], uint32(h.uid))
	order.PutUint32(page[atSum:], checksum(page))
}

// parse reads the header of a file of a number of bytes, with pages of a size.
func parse(page []byte, bytes int64, pageSize int) (h header, err error) {
	damaged := func(format string, args ...any) (header, error) {
		return header{}, fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
	}
	switch {
	case len(page) < headerSize:
		return damaged("it has %d bytes", len(page))
	case string(page[:len(magic)]) != magic:
		return damaged("it does not begin with %q", magic)
	case order.Uint32(page[8:]) != version:
		return damaged("its version is %d, and %d is known", order.Uint32(page[8:]), version)
	case order.Uint32(page[atSum:]) != checksum(page):
		return damaged("the checksum of its header is wrong")
	}
	offset, size := order.Uint64(page[atOffset:]), order.Uint64(page[atSize:])
	if offset != uint64(pageSize) || size == 0 || size > math.MaxInt64/2 || roundUp(int64(size), pageSize)+int64(offset) != bytes {
		return damaged("it has %d bytes, and its header says %d after %d", bytes, size, offset)
	}
	return header{
		keep: order.Uint32(page[atFlags:])&1 != 0, offset: int(offset), size: int(size), created: timeAt(page, atCreated),
		pid: int(order.Uint32(page[atPID:])), uid: int(order.Uint32(page[atUID:])),
	}, nil
}

func roundUp(n int64, unit int) int64 { return (n + int64(unit) - 1) &^ (int64(unit) - 1) }

// timeAt returns the time at an offset, the zero Time for 0.
func timeAt(page []byte, at int) time.Time {
	n := int64(order.Uint64(page[at:]))
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

// word returns the number at an offset of a page that other processes write.
func word(page []byte, at int) *uint64 { return (*uint64)(unsafe.Pointer(&page[at])) }

// A Content is the state of a memory's content.
type Content struct {
	// Generation counts changes. It is even if the content is complete or was never begun, and 0 in the latter case.
	Generation uint64
	// Complete reports that Complete was called, and Begin not since.
	Complete bool
	// Since is the time of that Complete, or of the Begin; zero if there was none.
	Since time.Time
	// Label is that of Complete, empty while the content is not complete.
	Label string
	// Writer is the process id of the process that called Complete or Begin, in its own namespace.
	Writer int
}

// contentOf reads the state while others may change it.
func contentOf(page []byte) Content {
	var c Content
	for range 1000 { // a writer that changes it all the time is one that does not end
		generation := atomic.LoadUint64(word(page, atGeneration))
		c = Content{Generation: generation, Since: timeAt(page, atWritten), Writer: int(order.Uint32(page[atWriter:]))}
		if generation%2 == 0 && generation > 0 {
			c.Complete = true
			n := min(order.Uint32(page[atLength:]), maxLabel)
			c.Label = strings.ToValidUTF8(string(page[atLabel:][:n]), "\uFFFD")
		}
		if atomic.LoadUint64(word(page, atGeneration)) == generation {
			return c
		}
	}
	return Content{Generation: c.Generation | 1}
}

// putContent writes the fields beside the generation, while that is odd.
func putContent(page []byte, pid int, label string) {
	order.PutUint64(page[atWritten:], uint64(time.Now().UnixNano()))
	order.PutUint32(page[atWriter:], uint32(pid))
	order.PutUint32(page[atLength:], uint32(len(label)))
	copy(page[atLabel:][:maxLabel], label)
}
