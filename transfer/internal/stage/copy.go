package stage

import (
	"context"
	"errors"
	"math"

	"github.com/gopinned/pinned/cudart"
)

// A Copy describes the copying of N bytes between the host and devices.
type Copy struct {
	N    int
	Down bool // from the device
	Host Host

	// Queue queues the copy between mem, which is pinned, and the device's part
	// of the bytes from off on, on a stream of Stages[device].
	Queue func(on *cudart.Stream, device int, mem []byte, off int) error

	// Stages are those of an upload to several devices, and Groups which of
	// them share the work: each chunk is queued on the links of one stage of each
	// group, by turns, from the ring of the first group's. None stands for the
	// stage that runs the copy.
	Stages []*Stage
	Groups [][]int
	// Forward is called when the n bytes at off were queued on the link of
	// Stages[from], up to a Point. It queues the copies from there to the others of
	// the group, and returns their ends, also after an error. It may be nil.
	Forward func(from, off, n int, after cudart.Point) ([]cudart.Point, error)

	// Progress is called by one goroutine, which is not the caller's, with the
	// bytes that are done of all.
	Progress func(done, total int)

	Workers     int  // at most, the caller included; 0 stands for a default
	MaxChunk    int  // bytes; 0 stands for a default
	Piece       int  // bytes that a worker does at a time; 0 stands for a default
	Slow        bool // Part.Copy may wait for a disk
	Kernel      bool // Part.Copy is mostly the kernel's work, which takes more workers
	NonTemporal bool // Part.Copy of an upload uses non-temporal stores, as those of most downloads do, which takes fewer
}

// A Host is the host's side of a copy: what an upload reads, or a download writes. Its
// methods are called by one goroutine at a time, and do not block.
type Host interface {
	// Start begins to read ahead. From then on methods of the Job may be called.
	Start(j *Job)
	// Ready returns how many bytes Take could return. When that was 0, Job.Wake
	// must be called when there are some.
	Ready() int
	// Take returns up to n bytes; n is no more than Ready returned. Of a download they
	// are the n bytes at off, which follow on those of the last call; of an upload they
	// may be any.
	Take(off, n int) Part
	// Stop ends reading ahead and writing behind.
	Stop()
	// Wait waits for readers and writers that still run, before the bytes are counted:
	// when ctx ends, for a moment only.
	Wait(ctx context.Context)
}

// Memory is a Host of bytes that are always ready: memory of the caller's, or a mapped file.
// It copies those from off on into memory of the ring, or out of it.
type Memory func(mem []byte, off int) error

func (Memory) Start(*Job)             {}
func (Memory) Stop()                  {}
func (Memory) Wait(context.Context)   {}
func (Memory) Ready() int             { return math.MaxInt }
func (m Memory) Take(off, n int) Part { return Part{Off: off, N: n, Copy: m} }

// A Part is bytes of a Host that are ready to be copied.
type Part struct {
	Off, N int
	// Copy copies the bytes from off on into memory of the ring, or out of it. It is
	// called by several goroutines at once. After [ErrNotReady], of an upload, the whole
	// Part is taken back.
	Copy func(mem []byte, off int) error
	// End is called when Copy was called for the last time; copied is false if
	// the bytes were not copied, and must come again unless the copy has failed.
	// It may be nil.
	End func(copied bool)
	// If Later is set, the bytes of a download count as done only when the Host calls
	// Job.Pass; otherwise when Copy has returned.
	Later bool
}

// ErrNotReady is returned by Part.Copy if it would have to wait.
var ErrNotReady = errors.New("the bytes are not ready")

func directionOf(down bool) direction {
	if down {
		return toHost
	}
	return toDevice
}
