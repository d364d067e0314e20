package weights

import (
	"cmp"
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
)

const (
	ggufMagic        = "GGUF"
	ggufMaxVersion   = 3
	ggufAlignment    = 32 // of files without the key
	ggufAlignmentKey = "general.alignment"
	ggufArray        = 9
	ggufMaxDims      = 4
	ggufMaxKey       = 65535    // bytes
	ggufBuffer       = 64 << 10 // of the first read
	ggufMostBuffer   = 4 << 20
)

// parseGGUF reads the header: the version, two counts, key-value pairs, and the tensors' entries
// (ggml's tensor infos). The tensors' data follows, aligned.
func (f *File) parseGGUF() error {
	f.format = GGUF
	c := newCursor(f.source, int64(len(ggufMagic)))
	v := c.u32()
	if c.err == nil && (v == 0 || v > ggufMaxVersion) {
		if v&0xffff == 0 && v != 0 {
			return f.invalid("", "GGUF version %d in big-endian byte order, whose tensors a GPU cannot use as they are (convert the file to little-endian)", bits.ReverseBytes32(v))
		}
		return f.invalid("", "GGUF version %d, want 1 to %d", v, ggufMaxVersion)
	}
	if v == 1 {
		c.wide = 4
	}
	tensors, pairs := c.length(), c.length()
	// A length, one byte of name, and the rest.
	c.fits("tensors", tensors, c.wide+1+4+4+8)
	c.fits("key-value pairs", pairs, c.wide+1+4+1)

	for i := uint64(0); i < pairs && c.err == nil; i++ {
		c.at("key-value pair", i, pairs)
		c.pair(f.metadata)
	}
	f.padding = c.alignment(f.metadata)
	for i := uint64(0); i < tensors && c.err == nil; i++ {
		c.at("tensor", i, tensors)
		c.tensorInfo(f)
	}
	if c.err != nil {
		return c.err
	}
	_, err := f.arrange(c.pos + -c.pos&(f.padding-1)) // ggml ignores what follows the last tensor
	return err
}

// pair reads a key-value pair.
func (c *cursor) pair(metadata map[string]any) {
	key := c.str()
	_, twice := metadata[key]
	switch {
	case key == "":
		c.fail("its key is empty")
	case len(key) > ggufMaxKey:
		c.fail("its key has %d bytes, want at most %d", len(key), ggufMaxKey)
	case twice:
		c.fail("the file has the key %s twice", quote(key))
	default:
		c.key = key
		metadata[key] = c.value()
	}
}

// alignment returns the alignment of the tensors' data, by the metadata.
func (c *cursor) alignment(metadata map[string]any) int64 {
	c.at("", 0, 0)
	value, ok := metadata[ggufAlignmentKey]
	if !ok {
		return ggufAlignment
	}
	n, ok := value.(uint32)
	switch {
	case !ok:
		c.fail("%s is of type %T, want uint32", ggufAlignmentKey, value)
	case bits.OnesCount32(n) != 1:
		c.fail("%s is %d, want a power of two", ggufAlignmentKey, n)
	}
	return int64(n)
}

// tensorInfo reads a tensor. Its Offset is that of the file, which counts from the start of
// the tensors' data.
func (c *cursor) tensorInfo(f *File) {
	t := &Tensor{Name: c.str(), File: f}
	if c.err == nil {
		c.stop(f.add(t))
	}
	c.tensor = t.Name
	dims := c.u32()
	if dims > ggufMaxDims {
		c.fail("it has %d dimensions, want at most %d", dims, ggufMaxDims)
		return
	}
	t.Shape = make([]int, dims)
	for d := range t.Shape {
		n := c.length()
		if n > math.MaxInt {
			c.fail("dimension %d is %d, want at most %d", d, n, math.MaxInt)
		}
		t.Shape[len(t.Shape)-1-d] = int(n)
	}
	id, offset := c.u32(), c.uint(8)
	if c.err != nil {
		return
	}
	var ok bool
	if t.DType, ok = ggmlTypes[id]; !ok {
		c.fail("ggml type %d is not known, or was removed", id)
		return
	}
	t.Offset = int64(offset)
	size, err := t.DType.size(t.Shape)
	t.Size = size
	switch perBlock, _ := t.DType.Block(); {
	case dims > 0 && t.Shape[dims-1]%perBlock != 0:
		c.fail("its rows have %d elements, want whole blocks: %s has %d elements a block", t.Shape[dims-1], t.DType, perBlock)
	case err != nil:
		c.fail("%v", err)
	case offset > uint64(f.size):
		c.fail("its data is at offset %d, the file has %d bytes", offset, f.size)
	case t.Offset&(f.padding-1) != 0:
		c.fail("its data is at offset %d, want a multiple of %d, the alignment", t.Offset, f.padding)
	}
}

// A cursor reads a GGUF header from front to back, through a buffer. Memory grows with the bytes
// that were read, and not with the counts that they declare. After a failure all reads return
// zero.
type cursor struct {
	source
	pos   int64  // offset of the next byte
	limit int64  // offset of the largest header's end
	buf   []byte // for reading ahead, which grows
	ahead []byte // bytes from pos on that have been read
	err   error  // the first failure: nothing is read after it
	wide  int    // bytes of a count or a length: 8, of version 1 4

	// The item that is read, for errors: its kind, its index, the number of items of the kind,
	// and its name once that is known.
	kind         string
	index, count uint64
	key, tensor  string
}

func newCursor(s source, pos int64) *cursor {
	limit := min(s.size, maxHeader)
	return &cursor{source: s, pos: pos, limit: limit, wide: 8, buf: make([]byte, min(ggufBuffer, limit-pos))}
}

// at sets what is read next, for errors: item number index, from 0, of count.
func (c *cursor) at(kind string, index, count uint64) {
	c.kind, c.index, c.count, c.key, c.tensor = kind, index, count, "", ""
}

// fail makes the first failure.
func (c *cursor) fail(reason string, args ...any) {
	switch {
	case c.key != "":
		reason = "the value of %s: " + reason
		args = append([]any{quote(c.key)}, args...)
	case c.kind != "" && c.tensor == "":
		reason = "%s %d of %d: " + reason
		args = append([]any{c.kind, c.index + 1, c.count}, args...)
	}
	c.stop(c.invalid(c.tensor, reason, args...))
}

// stop keeps the first failure.
func (c *cursor) stop(err error) {
	if c.err = cmp.Or(c.err, err); c.err != nil {
		c.ahead = nil
	}
}

// left returns the largest number of bytes that the rest of the header has.
func (c *cursor) remaining() int64 { return c.limit - c.pos }

// fits returns false, and fails, if the header cannot hold n items of each bytes.
func (c *cursor) fits(what string, n uint64, each int) bool {
	if limit := uint64(c.remaining()) / uint64(each); c.err == nil && n > limit {
		c.fail("%d %s are declared, the %d bytes after that hold at most %d", n, what, c.remaining(), limit)
	}
	return c.err == nil
}

// take returns the next n bytes, no more than buf holds, valid until the next
// call; nil after a failure.
func (c *cursor) take(n int) []byte {
	if len(c.ahead) < n && c.err == nil {
		if int64(n) > c.remaining() {
			c.fail("%d bytes are wanted at offset %d, the header ends at %d at the latest", n, c.pos, c.limit)
			return nil
		}
		c.grow()
		c.ahead = c.buf[:min(int64(len(c.buf)), c.remaining())]
		if err := c.readHeader(c.ahead, c.pos); err != nil {
			c.stop(err)
		}
	}
	if c.err != nil {
		return nil
	}
	taken := c.ahead[:n]
	c.ahead, c.pos = c.ahead[n:], c.pos+int64(n)
	return taken
}

// grow doubles the buffer when as much has been read: the header of a large vocabulary is a few requests to a server.
func (c *cursor) grow() {
	if n := 2 * len(c.buf); n <= ggufMostBuffer && c.pos >= int64(len(c.buf)) {
		c.buf = make([]byte, n)
	}
}

// uint reads a number of size bytes.
func (c *cursor) uint(size int) uint64 {
	var b [8]byte
	copy(b[:], c.take(size))
	return binary.LittleEndian.Uint64(b[:])
}

func (c *cursor) u32() uint32 { return uint32(c.uint(4)) }

// length reads a count or a size.
func (c *cursor) length() uint64 { return c.uint(c.wide) }

func (c *cursor) str() string {
	n := c.length()
	if !c.fits("bytes of a string", n, 1) {
		return ""
	}
	if n <= uint64(len(c.buf)) {
		return string(c.take(int(n)))
	}
	var text []byte
	for remaining := int(n); remaining > 0 && c.err == nil; remaining = int(n) - len(text) {
		text = append(text, c.take(min(remaining, len(c.buf)))...)
	}
	return string(text)
}

// value reads a value after its type.
func (c *cursor) value() any {
	id, n, array := c.u32(), uint64(1), false
	if id == ggufArray {
		if id, array = c.u32(), true; id == ggufArray {
			c.fail("it is an array of arrays, which ggml does not read either")
		}
		n = c.length()
	}
	if c.err == nil && id >= uint32(len(ggufKinds)) {
		c.fail("its type is %d, want 0 to %d", id, len(ggufKinds)-1)
	}
	if c.err != nil {
		return nil
	}
	kind := ggufKinds[id]
	if array && !c.fits("values of an array", n, cmp.Or(kind.size, c.wide)) {
		return nil
	}
	return kind.read(c, int(n), array)
}

// A ggufKind reads values of a type of the metadata.
type ggufKind struct {
	size int // bytes of a value; 0 for a string, which has its length at least
	read func(c *cursor, n int, array bool) any
}

// ggufKinds is enum gguf_type without arrays.
var ggufKinds = [...]ggufKind{
	0:  {1, numbers[uint8]},
	1:  {1, numbers[int8]},
	2:  {2, numbers[uint16]},
	3:  {2, numbers[int16]},
	4:  {4, numbers[uint32]},
	5:  {4, numbers[int32]},
	6:  {4, numbers[float32]},
	7:  {1, numbers[bool]},
	8:  {0, texts},
	10: {8, numbers[uint64]},
	11: {8, numbers[int64]},
	12: {8, numbers[float64]},
}

// numbers reads n numbers or bools.
func numbers[T any](c *cursor, n int, array bool) any {
	var number T
	size := binary.Size(number)
	_, isBool := any(number).(bool)
	values := []T{}
	for len(values) < n && c.err == nil {
		some := c.take(size * min(n-len(values), len(c.buf)/size, max(len(c.ahead)/size, 1)))
		if invalidAt := slices.IndexFunc(some, func(b byte) bool { return b > 1 }); isBool && invalidAt >= 0 {
			c.fail("a bool is %d, want 0 or 1", some[invalidAt])
		}
		from := len(values)
		values = grow(values, n, len(some)/size)[:from+len(some)/size]
		_, _ = binary.Decode(some, binary.LittleEndian, values[from:]) // of whole numbers
	}
	if array || c.err != nil {
		return values
	}
	return values[0]
}

// texts reads n strings.
func texts(c *cursor, n int, array bool) any {
	values := []string{}
	for len(values) < n && c.err == nil {
		values = append(grow(values, n, 1), c.str())
	}
	if array || c.err != nil {
		return values
	}
	return values[0]
}

// grow returns values with a capacity for more of them, of n in all. It allocates at most four
// times the size of the values that were read, because n is only declared.
func grow[T any](values []T, n, more int) []T {
	if len(values)+more <= cap(values) {
		return values
	}
	return slices.Grow(values, min(n-len(values), max(more, 3*len(values), 1024)))
}
