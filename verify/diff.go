package verify

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"strings"

	"github.com/gopinned/pinned/internal/pattern"
)

// A poison is the content of a target before its copy.
type poison struct {
	at   string
	mask byte
	copy string // name of the copy that overwrites it
}

// poisonAt returns the poison of a target.
func (c content) poisonAt(at string) content {
	for _, p := range poisons {
		if p.at == at {
			c.Mask ^= uint64(p.mask) * lowBytes
		}
	}
	return c
}

// poisons differ from the expected byte and from each other at every offset, so that a
// stale byte shows which copy did not arrive. No mask turns the bytes of one pattern into
// those of another, as the complement would.
var poisons = [...]poison{
	{atDevice, 0x93, "the upload"},
	{atHop, 0x36, "the copy on the device"},
	{atPeer, 0x5B, "the copy to the other device"},
	{atReturn, 0xC9, "the download"},
}

// An origin is an address of offset 0 of the copy.
type origin struct {
	of   string
	addr uintptr
}

const (
	shownBytes   = 16      // expected and found bytes shown
	maxRegions   = 1024    // that are compared again to find a shift
	maxByteShift = 4 << 10 // up to here every shift is tried, then powers of two
)

var pageSizes = [...]int{2 << 20, 64 << 10, 4 << 10} // the largest that fits is reported

// diff compares found with want's bytes from offset 0 on. It returns how they differ; ok is
// true if they are equal.
func diff(found []byte, want content, origins []origin) (m Mismatch, ok bool) {
	s := scan{size: len(found)}
	s.pages = make([]paging, 0, len(pageSizes)*len(origins))
	for _, size := range pageSizes {
		for _, o := range origins {
			s.pages = append(s.pages, paging{size: size, origin: o, fits: true})
		}
	}
	var block [blockBytes]byte
	for off := 0; off < len(found); off += blockBytes {
		got := found[off:min(off+blockBytes, len(found))]
		expected := block[:len(got)]
		want.fill(expected, off)
		s.block(got, expected, off)
	}
	s.endRun()
	s.endRegion()
	if s.bad == 0 {
		return Mismatch{}, true
	}
	return s.conclude(found, want), false
}

// A span is [from, to) in offsets of the copy.
type span struct{ from, to int }

// A scan collects properties of the mismatched bytes in one pass.
type scan struct {
	size        int
	bad, bits   int
	first, last int
	stale       [len(poisons)]int
	constant    byte
	varies      bool // the mismatched bytes are not all the same
	run         span // exact range in progress
	region      span // range in progress, small gaps included
	runs        strides
	regions     strides
	shown       []span // the first regions
	pages       []paging
}

func (s *scan) block(found, want []byte, off int) {
	for ; len(found) >= wordBytes; off += wordBytes {
		x := binary.LittleEndian.Uint64(found) ^ binary.LittleEndian.Uint64(want)
		if x != 0 {
			s.word(x, found[:wordBytes], off)
		}
		found, want = found[wordBytes:], want[wordBytes:]
	}
	if len(found) > 0 { // once more, with zeros behind
		var f, w [wordBytes]byte
		copy(f[:], found)
		copy(w[:], want)
		s.block(f[:], w[:], off)
	}
}

// word adds 8 bytes at off, some of them mismatched: x is found ^ expected.
func (s *scan) word(x uint64, found []byte, off int) {
	if s.bad == 0 {
		s.first = off + bits.TrailingZeros64(x)/8
		s.constant = found[s.first-off]
		s.run, s.region = span{s.first, s.first}, span{s.first, s.first}
	}
	s.last = off + (63-bits.LeadingZeros64(x))/8
	bad := wordBytes - zeroBytes(x)
	s.bad += bad
	s.bits += bits.OnesCount64(x)
	for i, p := range poisons {
		s.stale[i] += zeroBytes(x ^ uint64(p.mask)*lowBytes)
	}
	if bad == wordBytes {
		s.stretch(off, off+wordBytes)
		s.varies = s.varies || binary.LittleEndian.Uint64(found) != uint64(s.constant)*lowBytes
		return
	}
	for i := range wordBytes {
		if byte(x>>(8*i)) != 0 {
			s.stretch(off+i, off+i+1)
			s.varies = s.varies || found[i] != s.constant
		}
	}
}

// zeroBytes counts the bytes of x that are 0.
func zeroBytes(x uint64) int {
	const low7 = 0x7F7F7F7F7F7F7F7F
	return bits.OnesCount64(^((x&low7 + low7) | x | low7))
}

func (s *scan) stretch(from, to int) {
	if from > s.run.to {
		s.endRun()
		s.run.from = from
	}
	s.run.to = to
	if from >= s.region.to+wordBytes {
		s.endRegion()
		s.region.from = from
	}
	s.region.to = to
}

func (s *scan) endRun() {
	if s.run.to > s.run.from {
		s.runs.add(s.run)
	}
}

func (s *scan) endRegion() {
	r := s.region
	if r.to <= r.from {
		return
	}
	if len(s.shown) < maxRegions {
		s.shown = append(s.shown, r)
	}
	// Rounding to words ignores edge bytes that match by chance.
	s.regions.add(span{r.from &^ (wordBytes - 1), min((r.to+wordBytes-1)&^(wordBytes-1), s.size)})
	for i := range s.pages {
		s.pages[i].add(r, s.size)
	}
}

// strides determines whether spans have one distance and one length.
type strides struct {
	n            int
	start        int // of the last one
	step, length int
	uneven       bool
}

func (s *strides) add(r span) {
	switch s.n {
	case 0:
		s.length = r.to - r.from
	case 1:
		s.step = r.from - s.start
		s.uneven = s.length != r.to-r.from
	default:
		s.uneven = s.uneven || r.from-s.start != s.step || s.length != r.to-r.from
	}
	s.start = r.from
	s.n++
}

func (s *strides) found() bool { return s.n >= 3 && !s.uneven }

// paging determines whether spans start and end at the edges of pages.
type paging struct {
	size   int
	origin origin
	inner  bool // there was an edge within the copy
	fits   bool
}

// add adds a mismatched span of a copy of n bytes. Its edges may be up to a word inside the
// page's, because bytes there may match by chance.
func (p *paging) add(r span, n int) {
	if r.from > 0 {
		p.inner = true
		p.fits = p.fits && p.past(r.from) < wordBytes
	}
	if r.to < n {
		p.inner = true
		p.fits = p.fits && (p.size-p.past(r.to))%p.size < wordBytes
	}
}

func (p *paging) past(off int) int {
	return int((p.origin.addr + uintptr(off)) % uintptr(p.size))
}

func (s *scan) conclude(found []byte, want content) Mismatch {
	shown := found[s.first:min(s.first+shownBytes, len(found))]
	m := Mismatch{
		FirstBadOffsetBytes: s.first,
		LastBadOffsetBytes:  s.last,
		ExpectedHex:         want.hex(s.first, len(shown)),
		FoundHex:            hex.EncodeToString(shown),
		BadBytes:            s.bad,
		BadBits:             s.bits,
		Regions:             s.regions.n,
	}
	for _, p := range s.pages {
		if p.fits && p.inner {
			m.PageBytes, m.PageOf = p.size, p.origin.of
			break
		}
	}
	for _, st := range []strides{s.runs, s.regions} {
		if st.found() {
			m.StrideBytes, m.StrideRunBytes = st.step, st.length
			break
		}
	}
	if at := s.staleAt(); at != "" {
		m.Cause, m.At = causeStale, at
	} else if k := shift(found, want, s.shown); k != 0 {
		m.Cause, m.ShiftBytes = causeShifted, k
	} else if !s.varies && s.bad >= shownBytes {
		m.Cause = causeConstant
	}
	return m
}

// staleAt names the poisons if every mismatched byte is one of theirs.
func (s *scan) staleAt() string {
	var at []string
	sum := 0
	for i, p := range poisons {
		if s.stale[i] > 0 {
			at = append(at, p.at)
			sum += s.stale[i]
		}
	}
	if sum != s.bad {
		return ""
	}
	return strings.Join(at, ", ")
}

// shift returns k if every mismatched region has the expected bytes of k bytes before. It
// returns 0 if there is no such k, or if the pattern repeats too soon.
func shift(found []byte, want content, regions []span) int {
	if want.Kind != pattern.Counter && want.Kind != pattern.Random {
		return 0
	}
	for _, r := range regions {
		if r.to-r.from < shownBytes {
			continue
		}
		if want.Kind == pattern.Counter {
			return counterShift(found, want, r.from, regions)
		}
		return searchShift(found, want, r.from, regions)
	}
	return 0
}

// counterShift finds the shift from the offsets that the bytes at off contain.
func counterShift(found []byte, want content, off int, regions []span) int {
	for i := off; i < off+wordBytes && i+2*wordBytes <= len(found); i++ {
		v := binary.LittleEndian.Uint64(found[i:])
		next := binary.LittleEndian.Uint64(found[i+wordBytes:])
		if v%wordBytes != 0 || next != v+wordBytes || v >= uint64(len(found)) {
			continue
		}
		if k := i - int(v); k != 0 && shifted(found, want, k, regions) {
			return k
		}
	}
	return 0
}

// searchShift tries shifts of up to maxByteShift bytes, then powers of two.
func searchShift(found []byte, want content, off int, regions []span) int {
	try := func(k int) bool {
		return startsShifted(found, want, k, off) && shifted(found, want, k, regions)
	}
	for k, step := 1, 1; k < len(found); k += step {
		if try(k) {
			return k
		}
		if try(-k) {
			return -k
		}
		if k >= maxByteShift {
			step = k
		}
	}
	return 0
}

// startsShifted compares some bytes from off on, before all are compared. It skips bytes
// whose place would be before the copy's start.
func startsShifted(found []byte, want content, k, off int) bool {
	from := max(off, k)
	to := min(from+shownBytes, len(found), len(found)+k)
	return to-from == shownBytes && shifted(found, want, k, []span{{from, to}})
}

// shifted reports whether the regions have the expected bytes of k bytes before, as far as
// these are in the copy; shownBytes at least must be.
func shifted(found []byte, want content, k int, regions []span) bool {
	compared := 0
	for _, r := range regions {
		from, to := max(r.from, k), min(r.to, len(found)+k)
		if from >= to {
			continue
		}
		if !want.equals(found[from:to], from-k) {
			return false
		}
		compared += to - from
	}
	return compared >= shownBytes
}
