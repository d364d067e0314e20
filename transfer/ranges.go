package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"sync"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A Range is N bytes of a reader, from offset Off on. A nil Reader has zero bytes.
type Range struct {
	Reader io.ReaderAt
	Off    int64 // in bytes
	N      int   // bytes, without those that are left out
	// Row and Stride leave bytes out, as a range of columns does: Row bytes of every Stride
	// bytes are in the range, from Off on, N in all. Both are 0 if nothing is left out.
	Row, Stride int
}

// Ranges is a reader of ranges, one after the other, as [io.MultiReader] has readers: an
// [io.ReaderAt] whose methods may be called from any goroutine. [Copier.UploadFrom] and
// [Fanout.UploadPieces] read each range of a file as they read the file alone.
type Ranges struct {
	list []Range
	ends []int // of the ranges
}

// NewRanges returns a reader of ranges. The error is that of a range whose fields contradict one
// another, or of more than [math.MaxInt] bytes. It does not block.
func NewRanges(list []Range) (*Ranges, error) {
	r := &Ranges{list: make([]Range, 0, len(list)), ends: make([]int, 0, len(list))}
	end := 0
	for i, g := range list {
		err := g.check()
		if err == nil && g.N > math.MaxInt-end {
			err = fmt.Errorf("more than %d bytes in all", math.MaxInt)
		}
		if err != nil {
			return nil, fmt.Errorf("transfer: range %d: %w", i, err)
		}
		if g.N > 0 {
			end += g.N
			r.list, r.ends = append(r.list, g.within()), append(r.ends, end)
		}
	}
	return r, nil
}

func (g Range) check() error {
	if g.Reader != nil && isNil(g.Reader) {
		return errNilReadWriter
	}
	if g.Row == 0 && g.Stride != 0 {
		return fmt.Errorf("a Stride of %d without a Row: want both, or neither", g.Stride)
	}
	if g.N < 0 || g.Row < 0 || g.Stride < g.Row {
		return fmt.Errorf("%d bytes in rows of %d every %d bytes: want no negative number, and no row longer than its stride", g.N, g.Row, g.Stride)
	}
	n := g.N
	if g.Row > 0 && n > 0 {
		rows := (n - 1) / g.Row
		if rows > 0 && g.Stride > math.MaxInt/rows-g.Row {
			return fmt.Errorf("%d rows every %d bytes: more than %d bytes", rows+1, g.Stride, math.MaxInt)
		}
		n = rows*g.Stride + g.Row
	}
	return checkOffset(g.Off, n)
}

// within returns a range of the reader that a section reader is of.
func (g Range) within() Range {
	for {
		s, ok := g.Reader.(*io.SectionReader)
		if !ok {
			return g
		}
		outer, at, ok := outerOf(s, g.Off, g.last())
		if !ok {
			return g
		}
		g.Reader, g.Off = outer, at
	}
}

// outerOf returns the reader that a section reader is of, and the offset there of the bytes from off to
// end. ok is false if only the section reader can read them: it has fewer, or begins before the
// first byte.
func outerOf(s *io.SectionReader, off, end int64) (outer io.ReaderAt, at int64, ok bool) {
	outer, base, _ := s.Outer()
	return outer, base + off, !isNil(outer) && base >= 0 && end <= s.Size()
}

// last returns the offset in the reader at which the range ends.
func (g Range) last() int64 {
	if g.Row == 0 {
		return g.Off + int64(g.N)
	}
	rows := (g.N - 1) / g.Row
	return g.Off + int64(rows)*int64(g.Stride) + int64(g.N-rows*g.Row)
}

// Len returns the number of bytes.
func (r *Ranges) Len() int {
	if r == nil || len(r.ends) == 0 {
		return 0
	}
	return r.ends[len(r.ends)-1]
}

// ReadAt implements [io.ReaderAt].
func (r *Ranges) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("transfer: read ranges at offset %d: must not be negative", off)
	}
	n := min(int64(r.Len())-off, int64(len(p)))
	switch {
	case len(p) == 0:
		return 0, nil
	case n <= 0:
		return 0, io.EOF
	}
	_, got, err := r.read(readerAt(context.Background()))(p, int(off), int(n))
	if err == nil && got < len(p) {
		err = io.EOF
	}
	return got, err
}

// A rangePart is n bytes of a reader, from off on, which go to index to of a destination.
type rangePart struct {
	reader io.ReaderAt
	off    int64
	to, n  int
}

// parts calls do with the parts, without gaps, that n bytes at off are of.
func (r *Ranges) parts(off, n int, do func(rangePart) error) error {
	for i, to := sort.SearchInts(r.ends, off+1), 0; to < n; i++ {
		g := &r.list[i]
		for skip := off + to - (r.ends[i] - g.N); skip < g.N && to < n; {
			part := rangePart{g.Reader, g.Off + int64(skip), to, min(g.N-skip, n-to)}
			if g.Row > 0 {
				row, within := skip/g.Row, skip%g.Row
				part.off, part.n = g.Off+int64(row)*int64(g.Stride)+int64(within), min(part.n, g.Row-within)
			}
			if err := do(part); err != nil {
				return err
			}
			skip, to = skip+part.n, to+part.n
		}
	}
	return nil
}

// A rangeReader reads len(to) bytes at off of the reader of a range. It returns their number, and
// an error with fewer.
type rangeReader func(r io.ReaderAt, to []byte, off int64) (got int, err error)

// readerAt returns a rangeReader of any reader. It begins no call when ctx has ended.
func readerAt(ctx context.Context) rangeReader {
	return func(r io.ReaderAt, to []byte, off int64) (int, error) {
		if ctx.Err() != nil {
			return 0, bounded.Ended(ctx)
		}
		_, got, err := readAt(r, off)(to, 0, len(to))
		return got, err
	}
}

// read returns a function that reads parts by one.
func (r *Ranges) read(one rangeReader) readFunc {
	return func(to []byte, off, n int) (skip, got int, err error) {
		err = r.parts(off, n, func(p rangePart) (err error) {
			here := p.n
			if p.reader == nil {
				clear(to[p.to:][:p.n])
			} else {
				here, err = one(p.reader, to[p.to:][:p.n], p.off)
			}
			got = p.to + here
			return err
		})
		return 0, got, err
	}
}

const (
	// smallPart is the size of the smallest part that is read by a call of its own. A call takes as
	// long as copying some kilobytes.
	smallPart = 16 * kib
	// maxJoined is the size of the largest joined read, gaps included: it stays in a core's cache.
	maxJoined = 256 * kib
)

// joined is read, where one call reads small parts that are near one another in a file, with the bytes
// between them.
func (r *Ranges) joined(one rangeReader) readFunc {
	return func(to []byte, off, n int) (skip, got int, err error) {
		j := joinedRead{to: to, one: one}
		if err = r.parts(off, n, j.add); err == nil {
			err = j.flush()
		}
		if err == nil {
			j.got = n
		}
		return 0, j.got, err
	}
}

// A joinedRead has the parts that the next call reads: n bytes of a file from the first one's offset on.
type joinedRead struct {
	to    []byte
	one   rangeReader
	file  *os.File
	parts []rangePart
	n     int
	got   int // bytes from the start of to, after an error
}

func (j *joinedRead) add(p rangePart) error {
	if p.reader == nil {
		clear(j.to[p.to:][:p.n])
		return nil
	}
	file, isFile := p.reader.(*os.File)
	alone := p.n >= smallPart || !isFile
	if len(j.parts) > 0 {
		gap := p.off - j.parts[0].off - int64(j.n)
		if alone || file != j.file || gap < 0 || gap >= smallPart || j.n+int(gap)+p.n > maxJoined {
			if err := j.flush(); err != nil {
				return err
			}
		}
	}
	if alone {
		return j.alone(p)
	}
	j.file, j.parts = file, append(j.parts, p)
	j.n = int(p.off-j.parts[0].off) + p.n
	return nil
}

func (j *joinedRead) alone(p rangePart) error {
	got, err := j.one(p.reader, j.to[p.to:][:p.n], p.off)
	j.got = p.to + got
	return err
}

func (j *joinedRead) flush() error {
	defer func() { j.parts = j.parts[:0] }()
	switch len(j.parts) {
	case 0:
		return nil
	case 1:
		return j.alone(j.parts[0])
	}
	s := newScratch(scratchBytes)
	defer s.release()
	first := j.parts[0]
	_, err := j.one(first.reader, (*s)[:j.n], first.off)
	for _, p := range j.parts {
		if err == nil {
			copy(j.to[p.to:][:p.n], (*s)[p.off-first.off:])
		} else if err := j.alone(p); err != nil { // the first error may be of bytes between parts
			return err
		}
	}
	return nil
}

// uploadRanges copies n bytes at an offset of ranges.
func (p target) uploadRanges(ctx context.Context, r *Ranges, off int64, n int) (done int, err error) {
	there := int(min(int64(n), max(int64(r.Len())-off, 0)))
	if there > 0 {
		done, err = p.stageRanges(ctx, r, int(off), there)
	}
	if err == nil && there < n {
		err = fmt.Errorf("at byte %d of %d: %w", there, n, errSourceEnded)
	}
	return done, err
}

// stageRanges copies n bytes that ranges have, in the quickest way that all of their readers offer.
func (p target) stageRanges(ctx context.Context, r *Ranges, from, n int) (int, error) {
	files, rest := r.files(p.call, from, n)
	defer files.close()
	return p.stageFiles(ctx, r, files, rest, from, n)
}

func (p target) stageFiles(ctx context.Context, r *Ranges, files *rangeFiles, rest bool, from, n int) (int, error) {
	reading, cancel := context.WithCancel(ctx) // ranges that are open after a failure
	defer cancel()
	at := func(read readFunc) readFunc {
		return func(to []byte, off, n int) (int, int, error) { return read(to, from+off, n) }
	}
	read := func(own *ownFiles) readFunc { return at(r.read(own.readerAt(reading))) }
	switch {
	case !rest && len(files.list) == 0:
		nonTemporal := n <= stage.MaxNonTemporal
		return p.stage(ctx, stage.Copy{N: n, NonTemporal: nonTemporal, Host: newFileFeed(at(r.read(readMemory(nonTemporal))), nil, 0, n)})
	case files.direct():
		read = func(own *ownFiles) readFunc { return at(r.readDirect(reading, own)) }
	case !rest && files.openCached():
		lanes, section := files.lanes(n, scratchBytes, read)
		return p.stage(ctx, stage.Copy{N: n, Host: newFileFeed(at(r.joined(files.readNow)), lanes, section, n), Kernel: true})
	}
	lanes, section := files.lanes(n, sectionOf(n, 2*readers), read)
	host := newReadAhead(lanes, section, inOrder(n))
	if !files.remote {
		return p.stage(ctx, stage.Copy{N: n, Host: host})
	}
	// A remote reader waits most of the time, so that it can copy what it has read, which is in its core's caches.
	host.helps = true
	return p.stage(ctx, stage.Copy{N: n, Host: host, Piece: rangeBytes, Workers: 1})
}

// readMemory returns a rangeReader of readers that have their bytes in memory.
func readMemory(nonTemporal bool) rangeReader {
	return func(r io.ReaderAt, to []byte, off int64) (int, error) {
		mem, _ := memoryAt(r, off, len(to))
		if nonTemporal {
			stage.Put(to, mem)
		} else {
			copy(to, mem)
		}
		if len(mem) < len(to) {
			return len(mem), errSourceEnded
		}
		return len(to), nil
	}
}

// rangeFiles are the files of ranges, from an offset on.
type rangeFiles struct {
	of     *Ranges
	from   int
	list   map[*os.File]*rangeFile
	remote bool        // a reader is a RangeOpener
	own    []*ownFiles // of lanes
}

// A rangeFile is a file, and the part of it that ranges are of.
type rangeFile struct {
	in       fileSystem
	off, end int64
	direct   *os.File // opened with O_DIRECT; nil if the call does not ask for it, or it cannot be
	cached   *cachedFile
}

// files returns the files of the ranges that n bytes at off are of. rest reports whether some of
// these ranges are neither of files nor of memory.
func (r *Ranges) files(call Call, off, n int) (files *rangeFiles, rest bool) {
	files = &rangeFiles{list: map[*os.File]*rangeFile{}, of: r, from: off}
	first, last := sort.SearchInts(r.ends, off+1), sort.SearchInts(r.ends, off+n)
	var before *os.File
	var at *rangeFile
	for i := first; i <= last; i++ {
		g := &r.list[i]
		f, ok := g.Reader.(*os.File)
		if !ok {
			_, opens := g.Reader.(RangeOpener)
			files.remote = files.remote || opens
			rest = rest || g.Reader != nil && !inMemory(g.Reader)
			continue
		}
		if f != before { // there are many ranges of few files
			before, at = f, files.list[f]
		}
		if at == nil {
			at = &rangeFile{in: fileSystemOf(f), off: g.Off, end: g.last(), direct: call.reopenDirect(f, os.O_RDONLY)}
			files.list[f] = at
		}
		at.off, at.end = min(at.off, g.Off), max(at.end, g.last())
	}
	return files, rest
}

func (f *rangeFiles) close() {
	for _, own := range f.own {
		own.close()
	}
	for _, file := range f.list {
		if file.direct != nil {
			file.direct.Close()
		}
		if file.cached != nil {
			file.cached.close()
		}
	}
}

// direct reports whether a file is read without the page cache.
func (f *rangeFiles) direct() bool {
	for _, file := range f.list {
		if file.direct != nil {
			return true
		}
	}
	return false
}

// openCached reports whether the kernel reports the cached pages of every file.
func (f *rangeFiles) openCached() (ok bool) {
	for opened, file := range f.list {
		if file.cached, ok = openCached(opened, file.in, file.off, int(file.end-file.off)); !ok {
			file.cached = nil
			return false
		}
	}
	return true
}

// readNow is a rangeReader of the page cache, and of memory. It returns stage.ErrNotReady if some of the
// bytes are not there.
func (f *rangeFiles) readNow(r io.ReaderAt, to []byte, off int64) (got int, err error) {
	opened, ok := r.(*os.File)
	if !ok {
		return readMemory(false)(r, to, off)
	}
	file := f.list[opened]
	got, err = file.cached.readNow(to, int(off-file.off))
	if err == nil && got < len(to) { // the file was truncated meanwhile
		err = errSourceEnded
	}
	return got, err
}

// lanes returns the lanes that read n bytes, and the size of their sections. Lanes share the descriptors
// of files, and read sections of that size. If a file is on a remote file system, or opens ranges, they read long
// sections instead, each lane by descriptors and ranges of its own, but for bytes that are one section.
func (f *rangeFiles) lanes(n, section int, read func(*ownFiles) readFunc) ([]lane, int) {
	remote := f.remote
	for _, file := range f.list {
		remote = remote || file.in.isRemote()
	}
	if !remote {
		return lanesOf(readers, read(&ownFiles{files: f.list})), section
	}
	lanes := make([]lane, min(max(n/minMiss, 1), readers))
	longest := maxMiss
	if f.remote {
		longest = maxRange
	}
	section = min(max((n+len(lanes)-1)/len(lanes), minMiss), longest)
	for i := range lanes {
		own := &ownFiles{files: f.list, reopens: len(lanes) > 1, ranges: f.of}
		f.own = append(f.own, own)
		one := read(own)
		lanes[i].read = func(to []byte, off, size int) (skip, got int, err error) {
			own.next, own.end = f.from+off, f.from+min((off/section+1)*section, n)
			return one(to, off, size)
		}
	}
	return lanes, section
}

// ownFiles has the descriptors of files, and the range of a RangeOpener, that a lane does not share with others.
type ownFiles struct {
	files   map[*os.File]*rangeFile
	reopens bool // remote files

	// Only the lane uses these.
	ranges    *Ranges
	next, end int // bytes of ranges that it reads now and next

	mu     sync.Mutex
	again  map[*os.File]*os.File // the lane's own descriptor of a file, nil if there is none
	open   *openRange            // nil while it is read
	closed bool
}

// maxOwn is the number of descriptors of a lane.
const maxOwn = 4

// of returns the descriptor by which to read a file, and whether it is without the page cache. It may block.
func (o *ownFiles) of(f *os.File) (d *os.File, direct bool) {
	file := o.files[f]
	if file == nil {
		return f, false
	}
	direct = file.direct != nil
	if o.reopens && file.in.isRemote() {
		if d = o.reopen(f, direct); d != nil {
			return d, direct
		}
	}
	return cmp.Or(file.direct, f), direct
}

func (o *ownFiles) reopen(f *os.File, direct bool) *os.File {
	o.mu.Lock()
	d, ok := o.again[f]
	o.mu.Unlock()
	if ok {
		return d
	}
	if direct {
		d = Call{DirectIO: true}.reopenDirect(f, os.O_RDONLY)
	} else {
		d = reopen(f, os.O_RDONLY, 0)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.again) >= maxOwn || o.closed { // the copy may have been abandoned meanwhile
		o.closeAll()
	}
	if o.closed && d != nil {
		d.Close()
		return nil
	}
	if o.again == nil {
		o.again = map[*os.File]*os.File{}
	}
	o.again[f] = d
	return d
}

// closeAll closes the descriptors. It needs mu.
func (o *ownFiles) closeAll() {
	for _, d := range o.again {
		if d != nil {
			d.Close()
		}
	}
	clear(o.again)
}

func (o *ownFiles) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.closeAll()
	_ = o.open.close() // of a range that is read no further
	o.open = nil
}

// readerAt returns a rangeReader by the descriptors and the range. It begins no call when ctx has ended.
func (o *ownFiles) readerAt(ctx context.Context) rangeReader {
	one := readerAt(ctx)
	return func(r io.ReaderAt, to []byte, off int64) (int, error) {
		switch f := r.(type) {
		case *os.File:
			if ctx.Err() == nil {
				r, _ = o.of(f)
			}
		case RangeOpener:
			return o.readRange(ctx, f, to, off)
		}
		return one(r, to, off)
	}
}

// readDirect returns a function that reads files without the page cache. Only parts that begin and end
// behind a seam of ranges are copied once more by the CPU.
func (r *Ranges) readDirect(ctx context.Context, own *ownFiles) readFunc {
	blocks := func(from io.ReaderAt, to []byte, off int64, n int) (skip, got int, err error) {
		if ctx.Err() != nil {
			return 0, 0, bounded.Ended(ctx)
		}
		cached := readAt(from, off)
		switch opened := from.(type) {
		case *os.File:
			d, direct := own.of(opened)
			if direct {
				return readBlocks(d.ReadAt, off, cached)(to, 0, n)
			}
			cached = readAt(d, off)
		case RangeOpener:
			got, err := own.readRange(ctx, opened, to[:n], off)
			return 0, got, err
		}
		return cached(to, 0, n)
	}
	joined := r.joined(func(from io.ReaderAt, to []byte, off int64) (got int, err error) {
		s := newScratch(scratchBytes)
		defer s.release()
		for got < len(to) && err == nil {
			skip, more := 0, 0
			skip, more, err = blocks(from, *s, off+int64(got), min(len(to)-got, scratchBytes))
			got += copy(to[got:], (*s)[skip:][:more])
		}
		return got, err
	})
	return func(to []byte, off, n int) (skip, got int, err error) {
		alone := errors.New("one part")
		var only rangePart
		if err := r.parts(off, n, func(p rangePart) error { only = p; return alone }); err == alone && only.n == n && only.reader != nil {
			return blocks(only.reader, to, only.off, n)
		}
		return joined(to, off, n)
	}
}
