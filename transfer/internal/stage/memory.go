package stage

import (
	"context"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/ntcopy"
)

// memoryFeed is bytes of the caller's.
type memoryFeed struct {
	from []byte
	off  int
}

func (m *memoryFeed) Take(most int) (Segment, error) {
	n := min(most, len(m.from)-m.off)
	s := Segment{Off: m.off, N: n, Fill: m.fill}
	m.off += n
	return s, nil
}

func (m *memoryFeed) fill(to []byte, off int) error {
	copy(to, m.from[off:])
	return nil
}

// Upload copies memory to the device.
func (s *Stage) Upload(ctx context.Context, dst cudart.DevPtr, from []byte, progress func(done, total int)) (int, error) {
	return s.UploadFrom(ctx, dst, len(from), &memoryFeed{from: from}, progress)
}

// UploadFrom copies n bytes that a feed has to the device.
func (s *Stage) UploadFrom(ctx context.Context, dst cudart.DevPtr, n int, feed Feed, progress func(done, total int)) (int, error) {
	j := newJob(s, n, false)
	j.feed, j.progress = feed, progress
	j.copy = func(on *cudart.Stream, mem []byte, off int) error {
		return on.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
	}
	return j.Run(ctx)
}

// Download copies from the device to what a sink has.
func (s *Stage) DownloadTo(ctx context.Context, src cudart.DevPtr, n int, sink Sink, progress func(done, total int)) (int, error) {
	j := newJob(s, n, true)
	j.sink, j.progress = sink, progress
	j.copy = func(on *cudart.Stream, mem []byte, off int) error {
		return on.CopyToHost(unsafe.Pointer(&mem[0]), src+cudart.DevPtr(off), len(mem))
	}
	return j.Run(ctx)
}

// memorySink is memory of the caller's.
type memorySink struct{ to []byte }

func (m memorySink) Take(int, int) (func(from []byte, off int) error, func()) {
	return func(from []byte, off int) error {
		ntcopy.Copy(m.to[off:], from)
		return nil
	}, nil
}

// Download copies from the device to memory.
func (s *Stage) Download(ctx context.Context, to []byte, src cudart.DevPtr, progress func(done, total int)) (int, error) {
	return s.DownloadTo(ctx, src, len(to), memorySink{to}, progress)
}
