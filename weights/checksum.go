package weights

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/crc"
)

// checksumKey is the key of __metadata__ with the checksums of a file: see "Checksums" in the documentation of the
// package. Its value has the size of a block in bytes, the checksum of the header, and those of the blocks.
const checksumKey = "pinned.crc32c"

// blockBytes is the size of the blocks of tensors that have a checksum each.
const blockBytes = 1 << 20

// Blocks of other sizes are read too, which bounds the memory for them.
const minBlock, maxBlock = 4 << 10, 64 << 20

const digits = 8 // of a checksum

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A span is n bytes at an offset of a file.
type span struct {
	off int64
	n   int
}

func (s span) end() int64 { return s.off + int64(s.n) }

// blocksOf appends the blocks of a tensor.
func blocksOf(blocks []span, off int64, size, block int) []span {
	for size > 0 {
		n := min(size, block)
		blocks = append(blocks, span{off, n})
		off, size = off+int64(n), size-n
	}
	return blocks
}

// sums has the checksums of the blocks of one file. They are computed by any number of goroutines from pieces of the
// bytes, in any order, and from several copies of the bytes: each copy's comes in pieces, or as a whole.
type sums struct {
	blocks []span       // in order
	added  atomic.Int64 // bytes of blocks that add has summed

	mu   sync.Mutex
	have []blockSums // by block
}

// blockSums are the checksums of one block.
type blockSums struct {
	pieces []summed // of a copy that is not complete: in order, without overlap
	whole  []uint32 // different ones of complete copies
}

// A summed is a piece of a block with its checksum.
type summed struct {
	from, n int
	sum     uint32
}

func newSums(blocks []span) *sums {
	s := &sums{blocks: blocks, have: make([]blockSums, len(blocks))}
	first := make([]uint32, len(blocks)) // of each block, which nearly always has no other
	for i := range s.have {
		s.have[i].whole = first[i : i : i+1]
	}
	return s
}

// within returns the first block that ends behind an offset.
func (s *sums) within(off int64) int {
	return sort.Search(len(s.blocks), func(i int) bool { return s.blocks[i].end() > off })
}

// parts iterates over the pieces of blocks in n bytes of the file, by the indices of the blocks.
func (s *sums) parts(off int64, n int) iter.Seq2[int, summed] {
	return func(yield func(int, summed) bool) {
		end := off + int64(n)
		for i := s.within(off); i < len(s.blocks) && s.blocks[i].off < end; i++ {
			b := s.blocks[i]
			from, to := max(b.off, off), min(b.end(), end)
			if !yield(i, summed{from: int(from - b.off), n: int(to - from)}) {
				return
			}
		}
	}
}

// add adds bytes of the file. Those that no block has do not count.
func (s *sums) add(off int64, mem []byte) {
	for i, p := range s.parts(off, len(mem)) {
		at := s.blocks[i].off + int64(p.from) - off
		p.sum = crc32.Checksum(mem[at:][:p.n], castagnoli)
		s.added.Add(int64(p.n))
		s.put(i, p)
	}
}

// put adds a piece of a block, which replaces those that it overlaps.
func (s *sums) put(i int, p summed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, size := &s.have[i], s.blocks[i].n
	if p.n < size {
		b.pieces = slices.DeleteFunc(b.pieces, func(q summed) bool { return q.from < p.from+p.n && p.from < q.from+q.n })
		at, _ := slices.BinarySearchFunc(b.pieces, p, func(q, p summed) int { return cmp.Compare(q.from, p.from) })
		b.pieces = slices.Insert(b.pieces, at, p)
		all := summed{}
		for _, q := range b.pieces {
			all.n += q.n
		}
		if all.n < size {
			return
		}
		for _, q := range b.pieces {
			all.sum = crc.Combine(crc32.Castagnoli, all.sum, q.sum, int64(q.n))
		}
		p, b.pieces = all, nil
	}
	if !slices.Contains(b.whole, p.sum) {
		b.whole = append(b.whole, p.sum)
	}
}

// of returns the different checksums of complete copies of a block, and whether no copy lacks bytes.
func (s *sums) of(i int) (whole []uint32, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.have[i]
	return b.whole, len(b.pieces) == 0 && len(b.whole) > 0
}

// checksumText returns the value of checksumKey. It has the same length for the same number of blocks.
func checksumText(block int, header uint32, blocks []uint32) string {
	sums := make([]byte, 0, 4*len(blocks))
	for _, sum := range blocks {
		sums = binary.BigEndian.AppendUint32(sums, sum)
	}
	text := fmt.Appendf(make([]byte, 0, 32+digits*len(blocks)), "%d %08x ", block, header)
	return string(hex.AppendEncode(text, sums))
}

// checksumAt returns where the value of checksumKey begins in a header, and where its checksum of the header is: a
// text in quotes of this form is no part of another text.
func checksumAt(header []byte) (value, sum int, ok bool) {
	_, after, ok := bytes.Cut(header, []byte(`"`+checksumKey+`":"`))
	if !ok {
		return 0, 0, false
	}
	value = len(header) - len(after)
	sum = value + bytes.IndexByte(after, ' ') + 1
	return value, sum, sum > value && sum+digits <= len(header)
}

// headerSum returns the checksum of a header, with its size before it. The digits of that checksum count as zeros.
func headerSum(header []byte) (uint32, bool) {
	_, at, ok := checksumAt(header)
	if !ok {
		return 0, false
	}
	sum := crc32.Checksum(header[:at], castagnoli)
	sum = crc32.Update(sum, castagnoli, bytes.Repeat([]byte("0"), digits))
	return crc32.Update(sum, castagnoli, header[at+digits:]), true
}

// Checksums are the checksums in a file.
type checksums struct {
	header uint32
	blocks []span
	sums   []uint32 // of the blocks
}

// ErrNoChecksums is the error of [Verify], and of a load with [LoadOptions.Checksums], for a file without checksums.
var ErrNoChecksums = errors.New("the file has no checksums (Save writes them, unless SaveOptions.NoChecksums is set)")

// checksums returns the checksums of a file.
func (f *File) checksums() (*checksums, error) {
	value, ok := f.metadata[checksumKey].(string)
	if !ok || f.format != Safetensors {
		return nil, fmt.Errorf("%s: %w", f.name, ErrNoChecksums)
	}
	fields := strings.Split(value, " ")
	if len(fields) != 3 {
		return nil, f.invalid("", "the metadata %s has %d fields, want 3", checksumKey, len(fields))
	}
	block, err := strconv.Atoi(fields[0])
	if err != nil || block < minBlock || block > maxBlock {
		return nil, f.invalid("", "the metadata %s is for blocks of %s bytes, want %d to %d", checksumKey, quote(fields[0]), minBlock, maxBlock)
	}
	c := &checksums{blocks: make([]span, 0, min(len(f.tensors), len(fields[2])/digits))}
	for _, t := range f.tensors {
		if t.Size/block > len(fields[2])/digits-len(c.blocks) { // before memory is allocated for its blocks
			break
		}
		c.blocks = blocksOf(c.blocks, t.Offset, t.Size, block)
	}
	sums, err := hex.DecodeString(fields[1] + fields[2])
	if err != nil || len(sums) != 4*(1+len(c.blocks)) || len(fields[1]) != digits {
		return nil, f.invalid("", "the metadata %s has not a checksum of %d digits for each of %d blocks", checksumKey, digits, len(c.blocks))
	}
	c.sums = make([]uint32, len(sums)/4)
	for i := range c.sums {
		c.sums[i] = binary.BigEndian.Uint32(sums[4*i:])
	}
	c.header, c.sums = c.sums[0], c.sums[1:]
	if checksumText(block, c.header, c.sums) != value {
		return nil, f.invalid("", "the metadata %s is not in lower case, or has a number with zeros before it", checksumKey)
	}
	return c, nil
}
