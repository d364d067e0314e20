package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
)

// write writes a safetensors file of a size, for trials.
func write(size, path string) error {
	n, err := parseSize(size)
	if err != nil {
		return err
	}
	header, err := headerFor(n)
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	// Errors of a bufio.Writer stay until Flush.
	_, _ = w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(header))))
	_, _ = w.WriteString(header)
	_, err = io.CopyN(w, rand.NewChaCha8([32]byte{}), n-8-int64(len(header)))
	return errors.Join(err, w.Flush(), f.Close())
}

const layerBytes = 64 << 20

// headerFor returns the header of a file of n bytes: layers of 64 MiB, and a last one of
// what is left.
func headerFor(n int64) (string, error) {
	const perLayer = 100                           // bytes of an entry, at most
	headerSize := (n/layerBytes+1)*perLayer&^7 + 8 // and of the header
	var entries []string
	data := n - 8 - headerSize
	for off := int64(0); off < data; off += layerBytes {
		end := min(off+layerBytes, data)
		entries = append(entries, fmt.Sprintf(`"layers.%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}`, len(entries), end-off, off, end))
	}
	header := "{" + strings.Join(entries, ",") + "}"
	if data < 1 || int64(len(header)) > headerSize {
		return "", fmt.Errorf("a file of %d bytes is too small: want 1 KB or more", n)
	}
	return header + strings.Repeat(" ", int(headerSize)-len(header)), nil
}

// parseSize reads a size such as 1000, 64MiB or 8GB.
func parseSize(s string) (int64, error) {
	unit := int64(1)
	digits := s
	for _, u := range []struct {
		suffix string
		bytes  int64
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}} {
		if cut, ok := strings.CutSuffix(s, u.suffix); ok {
			digits, unit = cut, u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(digits, 10, 40)
	if err != nil || n < 0 || n > 1<<50/unit {
		return 0, fmt.Errorf("size %q: want bytes, or such as 64MiB or 8GB", s)
	}
	return n * unit, nil
}
