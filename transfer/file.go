package transfer

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/gopinned/pinned/cudart"
)

// block is what O_DIRECT wants offsets, lengths and memory to be multiples of.
// Devices ask for 512 or 4096.
const block = 4 * kib

// openDirect returns a file and the same file opened once more, past the page
// cache, if the call asks for it. d is nil for what is not a regular file, and
// where the file system refuses.
func (j *job) openDirect(rw any, access int) (f, d *os.File) {
	f, ok := rw.(*os.File)
	if !ok || !j.call.DirectIO {
		return nil, nil
	}
	return f, reopenDirect(f, access)
}

// readDirect is a source that reads whole blocks of f, from base on, past the
// page cache through d.
func (j *job) readDirect(f, d *os.File, base int64) source {
	j.chunk -= 2 * block // a slot has room for the rest of the blocks at both ends
	return readBlocks(func(p []byte, off int64) (int, error) { return preadDirect(d, p, off) }, base, readAt(f, base))
}

// readBlocks is a source that reads whole blocks. What cannot be read so, such
// as the end of a file, is left to cached.
func readBlocks(pread func(p []byte, off int64) (int, error), base int64, cached source) source {
	return func(ctx context.Context, to []byte, off, n int) (skip, got int, err error) {
		pos := base + int64(off)
		skip = int(pos % block)
		pos -= int64(skip)
		want := (skip + n + block - 1) / block * block
		have := 0
		for have < want && have%block == 0 {
			n, err := pread(to[have:want], pos+int64(have))
			if n <= 0 || err != nil {
				break
			}
			have += n
		}
		if got = min(max(have-skip, 0), n); got == n {
			return skip, n, nil
		}
		_, more, err := cached(ctx, to[skip+got:], off+got, n-got)
		return skip, got + more, err
	}
}

// writeDirect is a sink that writes whole blocks to f, from base on, past the
// page cache through d. What cannot be written so is left to the cache.
func writeDirect(f, d *os.File, base int64) sink {
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

// atOffset runs a copy from or to the offset of f, and moves it by what was
// copied, as Read and Write do.
func (j *job) atOffset(f *os.File, copies func(off int64) (int, error)) (done int, err error) {
	off, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	defer func() { // also if Progress ends this goroutine
		done, _ := j.result()
		if _, failed := f.Seek(off+int64(done), io.SeekStart); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	return copies(off)
}

// downloadShared copies into a mapped file, and unmaps it.
func (j *job) downloadShared(ctx context.Context, m *sharedFile, src cudart.DevPtr) (done int, err error) {
	defer func() { // also if Progress ends this goroutine
		done, _ := j.result()
		if failed := m.close(done); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	write := writeAt(m.file, m.off)
	return j.downloadFrom(ctx, src, func(from []byte, off int) (int, error) {
		to := m.mem[off : off+len(from)]
		fault := j.foreign(off, func() error {
			copyFresh(to, from)
			return nil
		})
		if fault != nil { // no page is there: writing allocates one, or reports why not
			return write(from, off)
		}
		forget(to)
		return len(from), nil
	})
}
