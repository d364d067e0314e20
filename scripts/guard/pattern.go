package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// A pattern is bytes that are different at each place and in each other pattern.
type pattern uint64

// word returns the eight bytes at an offset.
func (p pattern) word(at int) uint64 { return (uint64(at) + 1 + uint64(p)<<40) * 0x9e3779b97f4a7c15 }

func (p pattern) fill(mem []byte) {
	inParallel(mem, func(part []byte, at int) {
		i := 0
		for ; i+8 <= len(part); i += 8 {
			binary.LittleEndian.PutUint64(part[i:], p.word(at+i))
		}
		copy(part[i:], binary.LittleEndian.AppendUint64(nil, p.word(at+i)))
	})
}

// check returns an error if mem has other bytes.
func (p pattern) check(mem []byte) error {
	var mismatch atomic.Pointer[error]
	inParallel(mem, func(part []byte, at int) {
		for i := 0; i < len(part); i += 8 {
			var want [8]byte
			binary.LittleEndian.PutUint64(want[:], p.word(at+i))
			got := part[i:min(i+8, len(part))]
			if !bytes.Equal(got, want[:len(got)]) {
				err := fmt.Errorf("bytes %x from %d on, not %x", got, at+i, want[:len(got)])
				mismatch.Store(&err)
				return
			}
		}
	})
	if err := mismatch.Load(); err != nil {
		return *err
	}
	return nil
}

// equal returns an error if the bytes are not those wanted.
func equal(got, want []byte) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, not %d", len(got), len(want))
	}
	var mismatch atomic.Int64 // offset of a part, counted from 1
	inParallel(got, func(part []byte, at int) {
		if !bytes.Equal(part, want[at:at+len(part)]) {
			mismatch.Store(int64(at) + 1)
		}
	})
	if at := mismatch.Load(); at > 0 {
		for at--; got[at] == want[at]; {
			at++
		}
		return fmt.Errorf("byte %d is %#x, not %#x", at, got[at], want[at])
	}
	return nil
}

// inParallel calls do for parts of mem, each from its offset on, which is a multiple of 4096 bytes.
func inParallel(mem []byte, do func(part []byte, at int)) {
	workers := runtime.GOMAXPROCS(0)
	size := (len(mem)/workers/4096 + 1) * 4096
	var all sync.WaitGroup
	for at := 0; at < len(mem); at += size {
		all.Go(func() { do(mem[at:min(at+size, len(mem))], at) })
	}
	all.Wait()
}
