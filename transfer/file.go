package transfer

import (
	"cmp"
	"errors"
	"os"
	"slices"

	"github.com/gopinned/pinned/transfer/internal/stage"
)

// readBlocks reads whole blocks from base on by pread, which may return less. What cannot be
// read so, such as the end of a file, is read by cached.
func readBlocks(pread func(p []byte, off int64) (int, error), base int64, cached readFunc) readFunc {
	return func(to []byte, off, n int) (skip, got int, err error) {
		pos := base + int64(off)
		skip = int(pos % block)
		have, _ := pread(to[:(skip+n+block-1)/block*block], pos-int64(skip))
		if got = min(max(have-skip, 0), n); got == n {
			return skip, n, nil
		}
		_, more, err := cached(to[skip+got:], off+got, n-got)
		return skip, got + more, err
	}
}

// writeDirect writes whole blocks from base on with O_DIRECT, by d. The rest is written by
// f.
func writeDirect(f, d *os.File, base int64) writeFunc {
	cached := writeAt(f, base)
	return func(from []byte, off int) (took int, err error) {
		whole := len(from) / block * block
		if pos := base + int64(off); pos%block == 0 && whole > 0 {
			took, err = d.WriteAt(from[:whole], pos)
			if err != nil && !notDirect(err) {
				return took, err
			}
		}
		if took < len(from) {
			more, err := cached(from[took:], off+took)
			return took + more, err
		}
		return took, nil
	}
}

// A fileFeed is a [stage.Host] that reads files, or memory. Workers read bytes that are in the page
// cache, or in memory, straight into the ring. Goroutines of the readAhead read the rest.
type fileFeed struct {
	*readAhead
	// readNow reads from the page cache. It returns stage.ErrNotReady if some of the bytes
	// are not there.
	readNow readFunc
	n       int

	next int // offset to be tried next; only the job uses it

	// Guarded by readAhead.mu.
	missed []span // not in the cache, by ascending offset
	run    int    // bytes that the next miss adds to skip
	skip   int    // bytes to be read by the readers, untried
}

// A span is n bytes at off.
type span struct{ off, n int }

const (
	minMiss = 8 * mib
	maxMiss = 256 * mib
)

func newFileFeed(readNow readFunc, lanes []lane, section, n int) *fileFeed {
	feed := &fileFeed{readNow: readNow, n: n, run: minMiss}
	feed.readAhead = newReadAhead(lanes, section, feed.claim)
	return feed
}

func (f *fileFeed) Start(j *stage.Job) { f.job = j }

func (f *fileFeed) Ready() int {
	if n := f.readAhead.Ready(); n > 0 {
		return n
	}
	f.skipMissed()
	return f.n - f.next
}

// skipMissed has the readers read the bytes that follow a miss, without trying the cache.
func (f *fileFeed) skipMissed() {
	f.mu.Lock()
	n := min(f.skip, f.n-f.next)
	f.skip = 0
	if n > 0 {
		f.miss(span{f.next, n})
		f.next += n
	}
	f.mu.Unlock()
	if n > 0 {
		f.Callers.Start(len(f.lanes))
	}
}

func (f *fileFeed) Take(_, n int) stage.Part {
	if ready := f.readAhead.Ready(); ready > 0 {
		return f.readAhead.Take(0, min(n, ready))
	}
	off := f.next
	f.next += n
	return stage.Part{Off: off, N: n, Copy: f.fill, End: func(filled bool) { f.tried(off, n, filled) }}
}

// fill reads from the page cache. What comes before an error of reading is copied still.
func (f *fileFeed) fill(to []byte, off int) error {
	_, got, err := f.readNow(to, off, len(to))
	if err == nil || errors.Is(err, stage.ErrNotReady) {
		return err
	}
	f.job.Cut(off+got, err)
	return nil
}

// tried has the readers read bytes that were not in the page cache.
func (f *fileFeed) tried(off, n int, filled bool) {
	f.mu.Lock()
	if filled {
		f.run = minMiss
	} else {
		f.miss(span{off, n})
		f.skip += f.run
		f.run = min(2*f.run, maxMiss)
	}
	f.mu.Unlock()
	if !filled {
		f.Callers.Start(len(f.lanes))
	}
}

// miss adds bytes that are not in the cache to those that are missed, in the order of their offsets:
// workers try several pieces at once. It needs mu.
func (f *fileFeed) miss(s span) {
	at, _ := slices.BinarySearchFunc(f.missed, s.off, func(m span, off int) int { return cmp.Compare(m.off, off) })
	if at > 0 && f.missed[at-1].off+f.missed[at-1].n == s.off {
		f.missed[at-1].n += s.n
		return
	}
	f.missed = slices.Insert(f.missed, at, s)
}

// claim takes bytes that were missed. It needs mu.
func (f *fileFeed) claim(maxBytes int) (off, n int) {
	if len(f.missed) == 0 {
		return 0, 0
	}
	s := &f.missed[0]
	off, n = s.off, min(s.n, maxBytes)
	if s.off, s.n = s.off+n, s.n-n; s.n == 0 {
		f.missed = append(f.missed[:0], f.missed[1:]...)
	}
	return off, n
}
