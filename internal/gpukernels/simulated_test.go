//go:build linux && !android && (amd64 || arm64)

package gpukernels

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/pattern"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel"
)

// A trial is one launch of a kernel. Pointers among its arguments are offsets in its memory,
// which lies in device memory up to deviceBytes, and beyond that in pinned host memory.
type trial struct {
	kernel    string
	shape     kernel.Config
	args      []kernel.Value
	words     []uint64 // the bits of args
	pointers  []int    // indices of arguments
	addresses []int    // offsets in memory of others
	memory    []byte
	undefined [2]int // range of the memory that need not be the same, such as times
}

const (
	deviceBytes = 48 << 10
	hostBytes   = 48 << 10
)

// newTrial chooses arguments at random, with pointers of any alignment.
func newTrial(r *rand.Rand, name string) *trial {
	t := &trial{kernel: name, memory: make([]byte, deviceBytes+hostBytes)}
	for i := range t.memory {
		t.memory[i] = byte(r.Uint32())
	}
	t.shape = kernel.Config{Grid: kernel.Dim{X: 1 + r.IntN(4), Y: 1 + r.IntN(2), Z: 1 + r.IntN(2)}, Block: kernel.Dim{X: 1 + r.IntN(64), Y: 1 + r.IntN(2), Z: 1 + r.IntN(2)}}
	// Regions of 16 KiB, three on either side, so that none overlap.
	regions := r.Perm(6)
	region := func(align int) (at int) {
		at = max(regions[0]*(16<<10)+r.IntN(64)/align*align, 16) // not null
		regions = regions[1:]
		return at
	}
	pointer := func(at int) {
		t.pointers = append(t.pointers, len(t.args))
		t.arg(uint64(at))
	}
	sizes := [...]int{0, r.IntN(40), r.IntN(300), r.IntN(16<<10 - 64)}
	n := sizes[r.IntN(len(sizes))]
	c := pattern.Content{Kind: pattern.Kind(r.IntN(7)), Seed: r.Uint64(), Mask: r.Uint64()}
	at := r.Uint64() >> r.IntN(64)
	switch name {
	case "pinned_fill", "pinned_check":
		p := region(1)
		pointer(p)
		t.arg(n, at, uint32(c.Kind), c.Seed, c.Mask)
		if name == "pinned_fill" {
			break
		}
		if r.IntN(4) > 0 { // few mismatches
			c.Fill(t.memory[p:p+n], at)
			for range r.IntN(3) {
				t.memory[p+r.IntN(max(n, 1))] ^= 1 << r.IntN(8)
			}
		}
		result := region(8)
		binary.LittleEndian.PutUint64(t.memory[result+8:], ^uint64(0)>>r.IntN(64))
		pointer(result)
	case "pinned_copy":
		dst, src := region(1), region(1)
		if r.IntN(2) > 0 {
			src = src&^15 | dst&15
		}
		pointer(dst)
		pointer(src)
		t.arg(n)
	case "pinned_chase":
		chain, entries := region(8), 1+r.IntN(1000)
		for i := range entries {
			binary.LittleEndian.PutUint64(t.memory[chain+8*i:], uint64(r.IntN(entries)))
		}
		pointer(chain)
		t.arg(r.IntN(entries), r.IntN(200))
		result := region(8)
		pointer(result)
		t.undefined = [2]int{result + 8, result + 16}
	case "pinned_blocks":
		align := 1 << r.IntN(5)
		size := (1 + r.IntN([]int{100, 700, 3000}[r.IntN(3)])) / align * align
		stride := (size + r.IntN(40) + align - 1) / align * align
		count := r.IntN((16<<10-64)/(3*max(stride, 16)) + 1)
		t.shape.Block = kernel.Dim{X: 32 * (1 + r.IntN(4))}
		t.shape.Grid.Y, t.shape.Grid.Z = 1, 1
		for range 2 { // dst and src
			pointer(region(align))
			if r.IntN(3) > 0 {
				list := region(4)
				for i, at := range r.Perm(2*count + 1)[:count] {
					binary.LittleEndian.PutUint32(t.memory[list+4*i:], uint32(at))
				}
				pointer(list)
			} else {
				t.arg(0)
			}
			t.arg(stride)
		}
		t.arg(uint32(count), size, uint32(r.IntN(2)))
	case "pinned_first_beyond":
		list, count, limit := region(4), n/4, 1+r.IntN(1<<31)
		for i := range count { // few are beyond, or none
			binary.LittleEndian.PutUint32(t.memory[list+4*i:], uint32(r.IntN(limit)))
		}
		for range r.IntN(4) {
			binary.LittleEndian.PutUint32(t.memory[list+4*r.IntN(max(count, 1)):], uint32(limit)+uint32(r.IntN(3)))
		}
		t.shape.Grid, t.shape.Block.Y, t.shape.Block.Z = kernel.Dim{X: 1}, 1, 1
		pointer(list)
		t.arg(count, limit)
		pointer(region(8))
	case "pinned_parts":
		t.shape.Block = kernel.Dim{X: 32 * (1 + r.IntN(4))}
		t.shape.Grid.Y, t.shape.Grid.Z = 1, 1
		dst, src, list := region(1), region(1), region(8)
		pointer(dst)
		pointer(src)
		pointer(list)
		count := r.IntN(100)
		to, from := 0, 0
		for i := range count {
			size := []int{0, r.IntN(20), r.IntN(300)}[r.IntN(3)]
			to, from = to+r.IntN(40), from+r.IntN(40)
			if r.IntN(2) > 0 { // as far from a multiple of 16
				from += (dst + to - src - from) & 15
			}
			if max(to, from)+size > 16<<10-64-16 {
				count = i
				break
			}
			for k, v := range []int{to, from, size} {
				binary.LittleEndian.PutUint64(t.memory[list+PartBytes*i+8*k:], uint64(v))
			}
			to, from = to+size, from+size
		}
		t.arg(count)
	case "pinned_crc32c":
		t.shape = kernel.Config{Grid: kernel.Dim{X: t.shape.Grid.X}, Block: kernel.Dim{X: checksumThreads}}
		from, list, sums := region(1), region(8), region(4)
		pointer(list)
		count := r.IntN(40)
		for i := range count {
			at := r.IntN(1 << 10)
			size := []int{0, r.IntN(20), r.IntN(300), r.IntN(12 << 10)}[r.IntN(4)]
			t.address(list+SpanBytes*i, from+at)
			binary.LittleEndian.PutUint64(t.memory[list+SpanBytes*i+8:], uint64(size))
		}
		t.arg(count)
		pointer(sums)
	}
	return t
}

// address sets an address in the memory to that of an offset in it.
func (t *trial) address(at, of int) {
	binary.LittleEndian.PutUint64(t.memory[at:], uint64(of))
	t.addresses = append(t.addresses, at)
}

// arg adds arguments.
func (t *trial) arg(list ...any) {
	for _, v := range list {
		switch v := v.(type) {
		case int:
			t.args, t.words = append(t.args, kernel.Arg(v)), append(t.words, uint64(v))
		case uint32:
			t.args, t.words = append(t.args, kernel.Arg(v)), append(t.words, uint64(v))
		case uint64:
			t.args, t.words = append(t.args, kernel.Arg(v)), append(t.words, v)
		}
	}
}

// on runs the trial on a device, and returns the memory after it.
func (t *trial) on(tb testing.TB, dev *cudart.Device, k *kernel.Kernel) []byte {
	tb.Helper()
	ctx := tb.Context()
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(tb, err)
	p, err := dev.Malloc(deviceBytes)
	require.NoError(tb, err)
	h, err := dev.HostAlloc(hostBytes, cudart.HostAllocMapped)
	require.NoError(tb, err)
	view, err := dev.HostDevicePointer(h)
	require.NoError(tb, err)
	host := unsafe.Slice((*byte)(h), hostBytes)
	address := func(at uint64) cudart.DevPtr {
		if at < deviceBytes {
			return p + cudart.DevPtr(at)
		}
		return view + cudart.DevPtr(at) - deviceBytes
	}
	before, args := slices.Clone(t.memory), slices.Clone(t.args)
	for _, at := range t.addresses {
		binary.LittleEndian.PutUint64(before[at:], uint64(address(binary.LittleEndian.Uint64(before[at:]))))
	}
	for _, i := range t.pointers {
		args[i] = kernel.Arg(address(t.words[i]))
	}
	copy(host, before[deviceBytes:])
	require.NoError(tb, dev.CopyToDevice(p, unsafe.Pointer(&before[0]), deviceBytes))
	require.NoError(tb, dev.Synchronize(ctx))

	require.NoError(tb, k.Launch(s, t.shape, args...))
	require.NoError(tb, s.Synchronize(ctx))
	after := make([]byte, len(t.memory))
	require.NoError(tb, dev.CopyToHost(unsafe.Pointer(&after[0]), p, deviceBytes))
	copy(after[deviceBytes:], host)
	require.NoError(tb, dev.Free(p))
	require.NoError(tb, dev.FreeHost(h))
	require.NoError(tb, s.Close())
	for _, at := range t.addresses {
		copy(after[at:], t.memory[at:at+8])
	}
	clear(after[t.undefined[0]:t.undefined[1]])
	return after
}

// byThreads does in Go what each thread does in src/memory.cu, one thread after the other.
func (t *trial) byThreads() []byte {
	m := append([]byte(nil), t.memory...)
	arg := func(i int) uint64 { return t.words[i] }
	repeat := t.shape.Grid.Y * t.shape.Grid.Z * t.shape.Block.Y * t.shape.Block.Z
	threads := uint64(t.shape.Grid.X * t.shape.Block.X)
	for thread := uint64(0); thread < threads; thread++ {
		// each calls f with the offsets of n bytes at p that the thread handles.
		each := func(p, n uint64, f func(off uint64)) {
			head := min(-p&15, n)
			vectors := (n - head) / 16
			for i := thread; i < n-16*vectors; i += threads {
				if i >= head {
					i += 16 * vectors
				}
				f(i)
				if i >= head {
					i -= 16 * vectors
				}
			}
			for j := thread; j < vectors; j += threads {
				for i := range uint64(16) {
					f(head + 16*j + i)
				}
			}
		}
		wanted := func(off uint64) byte {
			c := pattern.Content{Kind: pattern.Kind(arg(3)), Seed: arg(4), Mask: arg(5)}
			at := arg(2) + off
			return byte(c.Word(at>>3) >> (at & 7 * 8))
		}
		switch t.kernel {
		case "pinned_fill":
			each(arg(0), arg(1), func(off uint64) { m[arg(0)+off] = wanted(off) })
		case "pinned_check":
			count, first := m[arg(6):][:8], m[arg(6)+8:][:8]
			each(arg(0), arg(1), func(off uint64) {
				if m[arg(0)+off] != wanted(off) {
					binary.LittleEndian.PutUint64(count, binary.LittleEndian.Uint64(count)+uint64(repeat))
					binary.LittleEndian.PutUint64(first, min(binary.LittleEndian.Uint64(first), off))
				}
			})
		case "pinned_copy":
			if (arg(0)^arg(1))&15 != 0 {
				for i := thread; i < arg(2); i += threads {
					m[arg(0)+i] = m[arg(1)+i]
				}
				break
			}
			each(arg(0), arg(2), func(off uint64) { m[arg(0)+off] = m[arg(1)+off] })
		case "pinned_blocks":
			place := func(side int, i uint64) uint64 {
				if list := arg(side + 1); list != 0 {
					i = uint64(binary.LittleEndian.Uint32(m[list+4*i:]))
				}
				return arg(side) + i*arg(side+2)
			}
			for i := thread; i < arg(6)*arg(7); i += threads { // in no order of the source's: no two write the same
				block, off := i/arg(7), i%arg(7)
				m[place(0, block)+off] = m[place(3, block)+off]
			}
		case "pinned_parts":
			for i := range arg(3) {
				field := func(k uint64) uint64 { return binary.LittleEndian.Uint64(m[arg(2)+PartBytes*i+8*k:]) }
				for off := thread; off < field(2); off += threads {
					m[arg(0)+field(0)+off] = m[arg(1)+field(1)+off]
				}
			}
		case "pinned_chase":
			next := arg(1)
			for range arg(2) {
				next = binary.LittleEndian.Uint64(m[arg(0)+8*next:])
			}
			binary.LittleEndian.PutUint64(m[arg(3):], next)
		}
	}
	if t.kernel == "pinned_first_beyond" { // each thread has its first, and the least of these counts
		first, index := arg(1), uint32(0)
		for thread := range threads {
			for i := thread; i < first; i += threads {
				if v := binary.LittleEndian.Uint32(m[arg(0)+4*i:]); uint64(v) >= arg(2) {
					first, index = i, v
				}
			}
		}
		binary.LittleEndian.PutUint64(m[arg(3):], first)
		binary.LittleEndian.PutUint64(m[arg(3)+8:], uint64(index))
	}
	if t.kernel == "pinned_crc32c" {
		for i := range arg(1) {
			span := m[arg(0)+SpanBytes*i:]
			at, size := binary.LittleEndian.Uint64(span), binary.LittleEndian.Uint64(span[8:])
			binary.LittleEndian.PutUint32(m[arg(2)+4*i:], checksumByThreads(m[at:at+size], at))
		}
	}
	clear(m[t.undefined[0]:t.undefined[1]])
	return m
}

// times multiplies polynomials modulo that of CRC-32C, as src/checksum.cu does.
func times(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		product ^= b & -(a >> 31)
		b = b>>1 ^ crc32.Castagnoli&-(b&1)
	}
	return product
}

// checksumByThreads does in Go what a block does in src/checksum.cu, for bytes at an address.
func checksumByThreads(mem []byte, address uint64) uint32 {
	power := func(p uint32, squares int) uint32 {
		for range squares {
			p = times(p, p)
		}
		return p
	}
	const x = 1 << 30
	padded := append(make([]byte, address%16), mem...)
	behind := -len(padded) & 15
	padded = append(padded, make([]byte, behind)...)
	padded = append(make([]byte, -len(padded)&4095), padded...) // whole rows
	row := power(x, 15)
	var sums [checksumThreads]uint32
	for thread := range sums {
		var words [4]uint32
		for at := 16 * thread; at < len(padded); at += 16 * checksumThreads {
			for k := range words {
				words[k] = times(words[k], row) ^ binary.LittleEndian.Uint32(padded[at+4*k:])
			}
		}
		for _, word := range words {
			sums[thread] = times(sums[thread]^word, crc32.Castagnoli)
		}
	}
	for k := range 8 { // a tree
		for thread := 0; thread < len(sums); thread += 2 << k {
			sums[thread] = times(sums[thread], power(x, 7+k)) ^ sums[thread+1<<k]
		}
	}
	all := sums[0]
	for range 8 * behind {
		if all>>31 != 0 {
			all = (all^crc32.Castagnoli)<<1 | 1
		} else {
			all <<= 1
		}
	}
	before, p := ^uint32(0), power(x, 3)
	for n := len(mem); n > 0; n, p = n>>1, times(p, p) {
		if n&1 != 0 {
			before = times(before, p)
		}
	}
	return ^(all ^ before)
}

// The Go functions that simulated devices run instead of the package's kernels do what the
// kernels do: what each thread does by their source and, on a real GPU, what the PTX and the cubin do there.
func TestSimulatedDevicesComputeWhatKernelsDo(t *testing.T) {
	type target struct {
		dev   *cudart.Device
		files func(name string) []string
	}
	ptx := func(name string) []string { return []string{name + ".ptx"} }
	_, rt := testgpu.Sim(t, cudasim.Config{})
	targets, count := []target{{rt.Devices()[0], ptx}}, 80
	if testgpu.Real() {
		count = 500
		dev := testgpu.Device(t)
		targets = append(targets, target{dev, ptx}, target{dev, func(name string) []string {
			files, err := codes(dev, name)
			require.NoError(t, err)
			return files[:1]
		}})
	}
	for source, names := range sources {
		for _, name := range names {
			if name == "pinned_busy" {
				continue // which computes nothing
			}
			r := rand.New(rand.NewPCG(1, uint64(len(name))))
			trials := make([]*trial, count)
			for i := range trials {
				trials[i] = newTrial(r, name)
			}
			for _, target := range targets {
				m, err := loadFirst(t.Context(), target.dev, target.files(source)...)
				require.NoError(t, err)
				k, err := m.Kernel(t.Context(), name)
				require.NoError(t, err)
				for i, trial := range trials {
					got, want := trial.on(t, target.dev, k), trial.byThreads()
					for off := range want {
						if got[off] != want[off] {
							t.Fatalf("%s, trial %d: byte %d is %#x, not %#x, on %v with %v: %v",
								name, i, off, got[off], want[off], target.dev, target.files(source), fmt.Sprintf("%+v %+v", trial.shape, trial.words))
						}
					}
				}
				require.NoError(t, m.Close())
			}
		}
	}
}

// Loads that end at any call leave no code behind, neither those whose context ends nor those whose call fails.
func TestInterruptedLoadsLeaveNothing(t *testing.T) {
	t.Parallel()
	loads := map[string]func(context.Context, *cudart.Device) (io.Closer, error){
		"memory":    func(ctx context.Context, dev *cudart.Device) (io.Closer, error) { return NewMemory(ctx, dev) },
		"blocks":    func(ctx context.Context, dev *cudart.Device) (io.Closer, error) { return NewBlocks(ctx, dev) },
		"checksums": func(ctx context.Context, dev *cudart.Device) (io.Closer, error) { return NewChecksums(ctx, dev) },
	}
	for name, load := range loads {
		for at := 1; at <= 20; at++ {
			for _, blocks := range []bool{false, true} {
				if blocks && at%4 != 1 {
					continue // a call that does not return takes a second of grace
				}
				t.Run(fmt.Sprint(name, at, blocks), func(t *testing.T) {
					t.Parallel()
					sim, rt := testgpu.Sim(t, cudasim.Config{}) // whose end reports what is left
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var calls atomic.Int64
					sim.OnCall(func(fn string, _ int) {
						if calls.Add(1) == int64(at) {
							if blocks {
								sim.Block(fn, cudasim.Fault{})
							}
							cancel()
						}
					})
					m, err := load(ctx, rt.Devices()[0])
					sim.OnCall(nil)
					sim.ResetFaults()
					if err == nil {
						err = m.Close()
					} else {
						require.ErrorIs(t, err, context.Canceled)
						err = nil
					}
					require.NoError(t, err)
				})
			}
		}
	}
}
