package transfer

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/bounded"
)

// A memoryFile reads a file of tmpfs, by pread or from a mapping. The first pread of a page that was written by write
// moves it to the kernel's active list, under a lock that workers wait for: 26 to 32 GB/s with ten, later preads 53 to
// 57 (H200, 2026-11-29). A mapping with MADV_RANDOM moves none, but its faults take longer than later preads. So what is
// faster at the time is used, and the other one sometimes, to compare them.
type memoryFile struct {
	mapping        []byte
	reads          atomic.Uint32
	pread, copying pace
	dropped        atomic.Int64 // regions of the mapping from its start on whose pages were unmapped
}

const (
	// minMapped is the size of the smallest files that are mapped, and minCopied that of the smallest reads from there.
	minMapped, minCopied = 16 * mib, 128 * kib
	// otherEvery is the number of reads of which one is by the method that seemed slower.
	otherEvery = 16
	// Workers are in dropAfter regions of dropBytes at once. Those before are unmapped while others are read, because
	// munmap takes a long time, and not after each read, because that interrupts all cores.
	dropBytes, dropAfter = 8 * mib, 4
)

// mapMemoryFile maps n bytes at off of a file of tmpfs. It returns nil if that cannot be done, or the file has holes, for
// which faults would allocate pages.
func mapMemoryFile(fd int, s *unix.Stat_t, off int64, n int) *memoryFile {
	if n < minMapped || s.Blocks*512 < s.Size {
		return nil
	}
	mapping, err := mapFile(fd, off, n)
	if err != nil {
		return nil
	}
	_ = unix.Madvise(mapping, unix.MADV_RANDOM)
	return &memoryFile{mapping: mapping}
}

func (m *memoryFile) close() { _ = unix.Munmap(m.mapping) }

// prefersMapping reports whether the next read, of n bytes, should be from the mapping. The last bytes are not: if the
// file is truncated in their page, the mapping has zeros there.
func (m *memoryFile) prefersMapping(at, n int) bool {
	if n < minCopied || at+n >= len(m.mapping) {
		return false
	}
	other := m.reads.Add(1)%otherEvery == 0
	pread, copying := m.pread.Load(), m.copying.Load()
	return (copying > 0 && copying+copying/8 < pread) != other
}

// read copies from an offset of the mapping on. It returns false if there are no pages any more.
func (m *memoryFile) read(to []byte, at int) bool {
	began := time.Now()
	if bounded.Guard(func() error { copy(to, m.mapping[at:]); return nil }) != nil {
		return false
	}
	m.copying.add(time.Since(began), len(to))
	end, was := int64(at/dropBytes)-dropAfter, m.dropped.Load()
	if end > was && m.dropped.CompareAndSwap(was, end) {
		_ = unix.Madvise(m.mapping[was*dropBytes:end*dropBytes], unix.MADV_DONTNEED)
	}
	return true
}

// A pace is a moving average of the time for a MiB, in ns; 0 is not known.
type pace struct{ atomic.Int64 }

func (p *pace) add(took time.Duration, n int) {
	if n < minCopied {
		return
	}
	now := int64(took) * mib / int64(n)
	if was := p.Load(); was > 0 {
		now = was + (now-was)/4
	}
	p.Store(now)
}
