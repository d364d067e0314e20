package cudasim

import (
	"bytes"
	"hash/crc32"
	"math"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/pattern"
)

// A kernel is a Go function that stands for one in PTX.
type kernel struct {
	run  KernelFunc
	time func(*Launch) time.Duration // beyond kernelTime, by the link model; it needs mu. Nil for none
}

// kernel returns what stands for an entry of PTX. Its run is nil if there is nothing.
func (s *Sim) kernel(name string) kernel {
	if f := s.cfg.Kernels[name]; f != nil {
		return kernel{run: f}
	}
	return ownKernels[name]
}

// ownKernels are those of internal/gpukernels/src, argument by argument.
var ownKernels = map[string]kernel{
	"pinned_fill":  {fillKernel, func(l *Launch) time.Duration { return l.duration(ptrArg(l, 0), Arg[int](l, 1), true) }},
	"pinned_check": {checkKernel, func(l *Launch) time.Duration { return l.duration(ptrArg(l, 0), Arg[int](l, 1), false) }},
	"pinned_copy": {copyKernel, func(l *Launch) time.Duration {
		return max(l.duration(ptrArg(l, 0), Arg[int](l, 2), true), l.duration(ptrArg(l, 1), Arg[int](l, 2), false))
	}},
	"pinned_chase": {chaseKernel, chaseTime},
	"pinned_busy":  {func(*Launch) {}, busyTime},
	"pinned_blocks": {blocksKernel, func(l *Launch) time.Duration {
		n := int(Arg[uint32](l, 6)) * Arg[int](l, 7)
		return max(l.duration(ptrArg(l, 0), n, true), l.duration(ptrArg(l, 3), n, false))
	}},
	"pinned_first_beyond": {firstBeyondKernel, func(l *Launch) time.Duration { return l.duration(ptrArg(l, 0), 4*Arg[int](l, 1), false) }},
	"pinned_parts":        {partsKernel, nil},
	"pinned_crc32c":       {checksumKernel, nil},
}

// fillKernel is pinned_fill(p, n, at, kind, seed, mask).
func fillKernel(l *Launch) {
	p, n := ptrArg(l, 0), Arg[int](l, 1)
	c := pattern.Content{Kind: pattern.Kind(Arg[uint64](l, 3)), Seed: Arg[uint64](l, 4), Mask: Arg[uint64](l, 5)}
	c.Fill(l.Write(p, n), Arg[uint64](l, 2))
}

// checkKernel is pinned_check(p, n, at, kind, seed, mask, result).
func checkKernel(l *Launch) {
	p, n := ptrArg(l, 0), Arg[int](l, 1)
	c := pattern.Content{Kind: pattern.Kind(Arg[uint64](l, 3)), Seed: Arg[uint64](l, 4), Mask: Arg[uint64](l, 5)}
	got, want := l.Read(p, n), make([]byte, min(max(n, 0), 4096))
	mismatches, first := uint64(0), ^uint64(0)
	for off := 0; off < n; off += len(want) {
		got, want := got[off:min(off+len(want), n)], want[:min(len(want), n-off)]
		if c.Fill(want, Arg[uint64](l, 2)+uint64(off)); bytes.Equal(got, want) {
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				mismatches++
				first = min(first, uint64(off+i))
			}
		}
	}
	if mismatches > 0 {
		times := l.Grid[1] * l.Grid[2] * l.Block[1] * l.Block[2] // threads share the work in the first dimension, and repeat it in others
		result := Elements[uint64](l.Write(ptrArg(l, 6), 16))
		result[0] += mismatches * uint64(times)
		result[1] = min(result[1], first)
	}
}

// copyKernel is pinned_copy(dst, src, n).
func copyKernel(l *Launch) {
	n := Arg[int](l, 2)
	copy(l.Write(ptrArg(l, 0), n), l.Read(ptrArg(l, 1), n))
}

// chaseKernel is pinned_chase(chain, start, steps, result).
func chaseKernel(l *Launch) {
	next := Arg[uint64](l, 1)
	for range Arg[uint64](l, 2) {
		next = Elements[uint64](l.Read(ptrArg(l, 0)+cudart.DevPtr(8*next), 8))[0]
	}
	l.dev.sim.mu.Lock()
	took := chaseTime(l)
	l.dev.sim.mu.Unlock()
	result := Elements[uint64](l.Write(ptrArg(l, 3), 16))
	result[0], result[1] = next, uint64(took.Nanoseconds())*uint64(l.dev.cfg.Attributes[attrClock])/1e6
}

// attrClock is the clock rate of a multiprocessor in kHz.
const attrClock = 13

// Times of one load, of the order of an H200's.
const (
	deviceLoad = 600 * time.Nanosecond
	hostLoad   = 1200 * time.Nanosecond // over the link
)

func chaseTime(l *Launch) time.Duration {
	one := deviceLoad
	if b := l.dev.sim.blocks.find(uintptr(ptrArg(l, 0))); b != nil && (b.kind == hostBlock || b.kind == registeredBlock) {
		one = hostLoad
	}
	return time.Duration(Arg[uint64](l, 2)) * one
}

// busyTime is that of pinned_busy(ns, max_cycles).
func busyTime(l *Launch) time.Duration {
	cycles := float64(Arg[uint64](l, 1)) * 1e6 / float64(max(l.dev.cfg.Attributes[attrClock], 1))
	return time.Duration(math.Round(min(float64(Arg[uint64](l, 0)), cycles)))
}

// blocksKernel is pinned_blocks(dst, dst_index, dst_stride, src, src_index, src_stride, count, size,
// to_host).
func blocksKernel(l *Launch) {
	count, size := int(Arg[uint32](l, 6)), Arg[int](l, 7)
	block := func(side int) func(i int) cudart.DevPtr {
		var index []uint32
		if list := ptrArg(l, side+1); list != 0 {
			index = Elements[uint32](l.Read(list, 4*count))
		}
		return func(i int) cudart.DevPtr {
			if index != nil {
				i = int(index[i])
			}
			return ptrArg(l, side) + cudart.DevPtr(i)*cudart.DevPtr(Arg[uint64](l, side+2))
		}
	}
	dst, src := block(0), block(3)
	for i := range count {
		copy(l.Write(dst(i), size), l.Read(src(i), size))
	}
}

// firstBeyondKernel is pinned_first_beyond(index, count, limit, result).
func firstBeyondKernel(l *Launch) {
	result := Elements[uint64](l.Write(ptrArg(l, 3), 16))
	result[0], result[1] = Arg[uint64](l, 1), 0
	if Arg[int](l, 1) == 0 {
		return
	}
	for i, at := range Elements[uint32](l.Read(ptrArg(l, 0), 4*Arg[int](l, 1))) {
		if uint64(at) >= Arg[uint64](l, 2) {
			result[0], result[1] = uint64(i), uint64(at)
			return
		}
	}
}

// partsKernel is pinned_parts(dst, src, parts, count).
func partsKernel(l *Launch) {
	type part struct {
		dst, src cudart.DevPtr
		size     uint64
	}
	for _, p := range Elements[part](l.Read(ptrArg(l, 2), Arg[int](l, 3)*int(unsafe.Sizeof(part{})))) {
		copy(l.Write(ptrArg(l, 0)+p.dst, int(p.size)), l.Read(ptrArg(l, 1)+p.src, int(p.size)))
	}
}

// checksumKernel is pinned_crc32c(spans, count, sums).
func checksumKernel(l *Launch) {
	type span struct {
		address cudart.DevPtr
		size    uint64
	}
	count := Arg[int](l, 1)
	sums := Elements[uint32](l.Write(ptrArg(l, 2), 4*count))
	for i, s := range Elements[span](l.Read(ptrArg(l, 0), count*int(unsafe.Sizeof(span{})))) {
		sums[i] = crc32.Checksum(l.Read(s.address, int(s.size)), castagnoli)
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func ptrArg(l *Launch, i int) cudart.DevPtr { return Arg[cudart.DevPtr](l, i) }
