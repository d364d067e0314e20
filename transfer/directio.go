package transfer

import (
	"context"
	"errors"
	"io"
	"os"
)

// block is what O_DIRECT wants offsets, lengths and memory to be multiples of.
// Devices ask for 512 or 4096.
const block = 4 * kib

// roomForBlocks is a chunk that fits a slot with the rest of the blocks at both
// of its ends.
func roomForBlocks(chunk int) int { return chunk - 2*block }

// readDirect reads whole blocks past the page cache. What d cannot read so is
// left to the cache.
func readDirect(d *os.File, base int64, cached source) source {
	return func(ctx context.Context, to []byte, off, n int) (int, int, error) {
		pos := base + int64(off)
		skip := int(pos % block)
		want := (skip + n + block - 1) / block * block
		got, err := readBlocks(d, to[:want], pos-int64(skip))
		switch {
		case errors.Is(err, errNotDirect):
			return cached(ctx, to, off, n)
		case err != nil:
			return skip, min(max(got-skip, 0), n), err
		case got < skip+n:
			return skip, max(got-skip, 0), io.ErrUnexpectedEOF
		}
		return skip, n, nil
	}
}

// writeDirect writes whole blocks past the page cache, and the rest through it.
func writeDirect(d *os.File, base int64, cached sink) sink {
	return func(from []byte, off int) error {
		whole := len(from) / block * block
		if pos := base + int64(off); pos%block == 0 && whole > 0 {
			err := took(whole)(d.WriteAt(from[:whole], pos))
			if err == nil {
				from, off = from[whole:], off+whole
			} else if !notDirect(err) {
				return err
			}
		}
		if len(from) == 0 {
			return nil
		}
		return cached(from, off)
	}
}

var errNotDirect = errors.New("not to be read past the page cache")
