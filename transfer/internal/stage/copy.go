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

	// Queue queues the copy between mem, which is pinned, and the bytes from off on
	// of Stages[device], on a stream of that device.
	Queue func(on *cudart.Stream, device int, mem []byte, off int) error

	// Stages has the stages of an upload to several devices. The stages of a group share
	// the work: each chunk is queued on the link of one stage of each group, round robin,
	// from the ring of the first group's stage. Empty Stages stand for the stage that
	// runs the copy.
	Stages []*Stage
	Groups [][]int
	// Forward is called after the n bytes at off were queued on the link of Stages[from],
	// up to a Point. It queues the copies from that device to the other devices of the
	// group, and returns their ends, also after an error. It may be nil.
	Forward func(from, off, n int, after cudart.Point) ([]cudart.Point, error)

	// Inspect is called with bytes from off on that are in memory of the ring: after they were
	// filled for an upload, before they are drained for a download. Workers call it, several at
	// once. Bytes of a Part that is offered again are inspected again. It may be nil.
	Inspect func(off int, mem []byte)

	// Progress is called with the bytes that were copied, by a goroutine of its own.
	Progress func(done, total int)

	Workers     int  // maximum, the caller included; 0 stands for a default
	MaxChunk    int  // bytes; 0 stands for a default
	Piece       int  // bytes that a worker does at a time; 0 stands for a default
	Slow        bool // Part.Copy may wait for a disk
	Kernel      bool // Part.Copy spends its time in the kernel: more workers fill the link
	NonTemporal bool // Part.Copy uses non-temporal stores: a small upload takes fewer workers. Downloads always count as such
}

// A Host is the host's side of a copy: the source of an upload or the target of a download.
// One goroutine at a time calls its methods, which do not block.
type Host interface {
	// Start starts reading ahead. From now on the Host may call methods of the Job.
	Start(j *Job)
	// Ready returns the number of bytes that Take could return. After it has returned 0,
	// the Host calls Job.Wake as soon as there are some.
	Ready() int
	// Take returns up to n bytes; n is no more than Ready returned. For a download they
	// are the n bytes at off, where the last call's end. For an upload the Host chooses
	// them.
	Take(off, n int) Part
	// Stop stops reading ahead and writing behind.
	Stop()
	// Wait waits for calls of readers and writers that still run, before the bytes are
	// counted. Once ctx has ended it waits for bounded.CallbackGrace at most.
	Wait(ctx context.Context)
}

// Memory is a Host of bytes that are always ready: the caller's memory, or a mapped file.
// The function is Part.Copy.
type Memory func(mem []byte, off int) error

func (Memory) Start(*Job)             {}
func (Memory) Stop()                  {}
func (Memory) Wait(context.Context)   {}
func (Memory) Ready() int             { return math.MaxInt }
func (m Memory) Take(off, n int) Part { return Part{Off: off, N: n, Copy: m} }

// A Part describes bytes of a Host that are ready to be copied.
type Part struct {
	Off, N int
	// Copy copies the bytes from off on into memory of the ring, or out of it. Several
	// goroutines call it at once. If it returns [ErrNotReady] for an upload, none of the
	// Part is copied, and the Host offers the bytes again later.
	Copy func(mem []byte, off int) error
	// End is called after the last call of Copy. copied is false if the bytes were not
	// copied: the Host then returns them again, unless the copy has failed. End may be nil.
	End func(copied bool)
	// If Later is set, the bytes of a download count as done only when the Host calls
	// Job.Pass; otherwise when Copy has returned.
	Later bool
}

// ErrNotReady is the error of a Part.Copy that would have to wait.
var ErrNotReady = errors.New("the bytes are not ready")

func directionOf(down bool) direction {
	if down {
		return toHost
	}
	return toDevice
}
