package verify

import (
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// corrupt makes n right bytes of a pattern and lets spoil change them.
const kib = 1 << 10

func corrupt(p Pattern, n int, spoil func(b []byte, c content)) ([]byte, content) {
	c := p.content(99)
	b := make([]byte, n)
	c.fill(b, 0)
	spoil(b, c)
	return b, c
}

func stale(b []byte, c content, at string, from, to int) {
	c.poisonAt(at).fill(b[from:to], from)
}

func TestDiffClassifiesMismatch(t *testing.T) {
	t.Parallel()
	zero := func(b []byte, from, to int) { clear(b[from:to]) }
	flip := func(b []byte, from, to int) {
		for i := from; i < to; i++ {
			b[i] ^= 0x3C
		}
	}
	tests := []struct {
		name    string
		pattern Pattern
		size    int
		origins []origin
		spoil   func(b []byte, c content)
		want    Mismatch // Expected and Found are checked for all
		text    string
	}{
		{
			name: "one bit", pattern: patternRandom, size: 5000,
			spoil: func(b []byte, _ content) { b[1234] ^= 0x20 },
			want:  Mismatch{FirstBadOffsetBytes: 1234, LastBadOffsetBytes: 1234, BadBytes: 1, BadBits: 1, Regions: 1},
			text:  "1 of 5000 bytes wrong, the first at offset 1234",
		},
		{
			name: "the last byte", pattern: patternZeros, size: 4097,
			spoil: func(b []byte, _ content) { b[4096] = 0x81 },
			want:  Mismatch{FirstBadOffsetBytes: 4096, LastBadOffsetBytes: 4096, BadBytes: 1, BadBits: 2, Regions: 1},
			text:  "expected 00, found 81",
		},
		{
			name: "a single wrong byte as the whole copy", pattern: patternOnes, size: 1,
			spoil: func(b []byte, _ content) { b[0] = 0xF0 },
			want:  Mismatch{BadBytes: 1, BadBits: 4, Regions: 1},
		},
		{
			name: "a page of the device", pattern: patternRandom, size: 64 * kib,
			origins: []origin{{pageOfSource, 0x10010}, {pageOfDevice, 0x20000 + 100}, {pageOfReturn, 0x30008}},
			spoil:   func(b []byte, _ content) { flip(b, 2*4096-100, 3*4096-100) },
			want: Mismatch{FirstBadOffsetBytes: 8092, LastBadOffsetBytes: 12187, BadBytes: 4096, BadBits: 4 * 4096, Regions: 1,
				PageBytes: 4096, PageOf: pageOfDevice},
			text: "follows 4 KiB pages of the device address",
		},
		{
			name: "a zeroed page, right by chance at both edges", pattern: patternCounter, size: 64 * kib,
			origins: []origin{{pageOfReturn, 0x7000}},
			spoil:   func(b []byte, _ content) { zero(b, 4096, 8192) },
			want: Mismatch{FirstBadOffsetBytes: 4097, LastBadOffsetBytes: 8185, Regions: 1,
				PageBytes: 4096, PageOf: pageOfReturn, Cause: causeConstant},
			text: "every wrong byte is 0x00",
		},
		{
			name: "64 KiB pages up to the end", pattern: patternRandom, size: 200 * kib,
			origins: []origin{{pageOfSource, 0x10000}},
			spoil:   func(b []byte, _ content) { flip(b, 128*kib, 200*kib) },
			want: Mismatch{FirstBadOffsetBytes: 128 * kib, LastBadOffsetBytes: 200*kib - 1, BadBytes: 72 * kib, BadBits: 4 * 72 * kib, Regions: 1,
				PageBytes: 64 * kib, PageOf: pageOfSource},
		},
		{
			name: "2 MiB pages from the start", pattern: patternRandom, size: 5 * mib,
			origins: []origin{{pageOfSource, 0x1000}, {pageOfReturn, 2 * mib}},
			spoil:   func(b []byte, _ content) { flip(b, 0, 2*mib) },
			want: Mismatch{LastBadOffsetBytes: 2*mib - 1, BadBytes: 2 * mib, BadBits: 4 * 2 * mib, Regions: 1,
				PageBytes: 2 * mib, PageOf: pageOfReturn},
		},
		{
			name: "everything is no page", pattern: patternRandom, size: 8192,
			origins: []origin{{pageOfSource, 0}},
			spoil:   func(b []byte, _ content) { flip(b, 0, 8192) },
			want:    Mismatch{LastBadOffsetBytes: 8191, BadBytes: 8192, BadBits: 4 * 8192, Regions: 1},
		},
		{
			name: "every second page", pattern: patternRandom, size: 8 * 4096,
			origins: []origin{{pageOfDevice, 0x100000}},
			spoil: func(b []byte, _ content) {
				for i := 4096; i < len(b); i += 2 * 4096 {
					flip(b, i, i+4096)
				}
			},
			want: Mismatch{FirstBadOffsetBytes: 4096, LastBadOffsetBytes: 8*4096 - 1, BadBytes: 4 * 4096, BadBits: 16 * 4096, Regions: 4,
				PageBytes: 4096, PageOf: pageOfDevice, StrideBytes: 8192, StrideRunBytes: 4096},
			text: "4 KiB every 8 KiB",
		},
		{
			name: "one byte in three", pattern: patternOnes, size: 3000,
			spoil: func(b []byte, _ content) {
				for i := 2; i < len(b); i += 3 {
					b[i] ^= 1
				}
			},
			want: Mismatch{FirstBadOffsetBytes: 2, LastBadOffsetBytes: 2999, BadBytes: 1000, BadBits: 1000, Regions: 1,
				StrideBytes: 3, StrideRunBytes: 1, Cause: causeConstant},
		},
		{
			name: "a column of words, some bytes right by chance", pattern: patternCounter, size: 64 * kib,
			spoil: func(b []byte, _ content) {
				for i := 512; i < len(b); i += 1000 {
					zero(b, i, i+8)
				}
			},
			want: Mismatch{FirstBadOffsetBytes: 513, LastBadOffsetBytes: 65513, Regions: 66,
				StrideBytes: 1000, StrideRunBytes: 8, Cause: causeConstant},
		},
		{
			name: "scattered", pattern: patternZeros, size: 10000,
			spoil: func(b []byte, _ content) { b[10], b[500], b[9000] = 1, 1, 1 },
			want:  Mismatch{FirstBadOffsetBytes: 10, LastBadOffsetBytes: 9000, BadBytes: 3, BadBits: 3, Regions: 3},
			text:  "3 stretches",
		},
		{
			name: "the download did nothing", pattern: patternCounter, size: 4099,
			spoil: func(b []byte, c content) { stale(b, c, atReturn, 0, len(b)) },
			want: Mismatch{LastBadOffsetBytes: 4098, BadBytes: 4099, BadBits: 4 * 4099, Regions: 1,
				Cause: causeStale, At: atReturn},
			text: "stale: the download did not arrive",
		},
		{
			name: "the tail of the upload did not arrive", pattern: patternZeros, size: 100000,
			origins: []origin{{pageOfSource, 0}},
			spoil:   func(b []byte, c content) { stale(b, c, atDevice, 65536, len(b)) },
			want: Mismatch{FirstBadOffsetBytes: 65536, LastBadOffsetBytes: 99999, BadBytes: 34464, BadBits: 4 * 34464, Regions: 1,
				PageBytes: 64 * kib, PageOf: pageOfSource, Cause: causeStale, At: atDevice},
			text: "stale: the upload did not arrive",
		},
		{
			name: "two copies missing in parts", pattern: patternRandom, size: 3000,
			spoil: func(b []byte, c content) {
				stale(b, c, atDevice, 0, 1000)
				stale(b, c, atHop, 2000, 2500)
			},
			want: Mismatch{LastBadOffsetBytes: 2499, BadBytes: 1500, BadBits: 4 * 1500, Regions: 2,
				Cause: causeStale, At: atDevice + ", " + atHop},
			text: "stale: copies (device, second device buffer) did not arrive",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b, c := corrupt(tt.pattern, tt.size, tt.spoil)
			d, ok := diff(b, c, tt.origins)
			require.False(t, ok)
			shown := min(16, tt.size-tt.want.FirstBadOffsetBytes)
			assert.Equal(t, hex.EncodeToString(b[d.FirstBadOffsetBytes:][:shown]), d.FoundHex)
			want := make([]byte, shown)
			c.fill(want, d.FirstBadOffsetBytes)
			assert.Equal(t, hex.EncodeToString(want), d.ExpectedHex)
			d.SizeBytes = tt.size
			assert.Contains(t, d.describe(), tt.text)
			d.ExpectedHex, d.FoundHex, d.SizeBytes = "", "", 0
			if tt.want.BadBytes == 0 { // where chance decides how many are wrong
				assert.Positive(t, d.BadBytes)
				d.BadBytes, d.BadBits = 0, 0
			}
			assert.Equal(t, tt.want, d)
		})
	}
}

func TestDiffOfEqualBytes(t *testing.T) {
	t.Parallel()
	for _, p := range patterns() {
		for _, n := range []int{0, 1, 8, 4097, 2*blockBytes + 3} {
			b, c := corrupt(p, n, func([]byte, content) {})
			d, ok := diff(b, c, []origin{{pageOfSource, 1}})
			assert.True(t, ok)
			assert.Zero(t, d)
		}
	}
}

// TestDiffCountsAsByteByByte compares the word-wise scan with the plain one.
func TestDiffCountsAsByteByByte(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		p := patterns()[r.IntN(len(patterns()))]
		n := 1 + r.IntN(3*blockBytes)
		b, c := corrupt(p, n, func(b []byte, _ content) {
			for range 1 + r.IntN(20) {
				at := r.IntN(n)
				for i := at; i < min(n, at+1+r.IntN(64)); i++ {
					b[i] = byte(r.Uint32())
				}
			}
		})
		want := make([]byte, n)
		c.fill(want, 0)
		bad, first, last, regions, end := 0, -1, -1, 0, -100
		for i := range b {
			if b[i] == want[i] {
				continue
			}
			if first < 0 {
				first = i
			}
			if i-end >= wordBytes {
				regions++
			}
			last, end = i, i+1
			bad++
		}
		d, ok := diff(b, c, nil)
		require.Equal(t, bad == 0, ok)
		if !ok {
			require.Equal(t, []int{bad, first, last, regions}, []int{d.BadBytes, d.FirstBadOffsetBytes, d.LastBadOffsetBytes, d.Regions})
		}
	}
}

func TestShiftIsFound(t *testing.T) {
	t.Parallel()
	const n = 256 * kib
	for _, p := range []Pattern{patternCounter, patternRandom} {
		for _, k := range []int{1, 3, 8, 100, 4096, 64 * kib, -1, -8, -513, -4096} {
			b, c := corrupt(p, n, func(b []byte, c content) {
				from := max(k, 0)
				to := min(n, n+k)
				c.fill(b[from:to], from-k)
			})
			d, ok := diff(b, c, nil)
			require.False(t, ok)
			assert.Equal(t, causeShifted, d.Cause, "%s shifted by %d", p, k)
			assert.Equal(t, k, d.ShiftBytes, "%s shifted by %d", p, k)
		}
	}
}

func TestPageEdgesAreThoseOfOneAddress(t *testing.T) {
	t.Parallel()
	b, c := corrupt(patternCounter, 64*kib, func(b []byte, c content) { c.fill(b[7*4096:8*4096], 2*4096) })
	d, ok := diff(b, c, []origin{{pageOfDevice, 0x4000}})
	require.False(t, ok)
	assert.Equal(t, causeShifted, d.Cause)
	assert.Equal(t, 5*4096, d.ShiftBytes)
	assert.Equal(t, 4096, d.PageBytes)
	d.SizeBytes = 64 * kib
	assert.Contains(t, d.describe(), "the right bytes, but 20 KiB later than they belong")
}

func TestShiftIsNotClaimedForOtherBytes(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(5, 6))
	for _, p := range patterns() {
		b, c := corrupt(p, 16*kib, func(b []byte, _ content) {
			for i := 1000; i < 5000; i++ {
				b[i] = byte(r.Uint32())
			}
		})
		d, ok := diff(b, c, nil)
		require.False(t, ok)
		assert.Empty(t, d.Cause, "%s", p)
		assert.Zero(t, d.ShiftBytes, "%s", p)
	}
}

func TestMismatchAsTextAndJSON(t *testing.T) {
	t.Parallel()
	b, c := corrupt(patternCounter, 4097, func(b []byte, _ content) { b[9] ^= 0xFF })
	m, _ := diff(b, c, nil)
	m.Case = Case{Path: pathPinned, Pattern: patternCounter, SizeBytes: 4097, Offset: Offset{1, 2, 3}, Streams: 4}
	assert.Equal(t, "pinned counter 4 KiB + 1 B offsets 1/2/3 4 streams: 1 of 4097 bytes wrong, the first at offset 9: "+
		"expected 00 00 00 00 00 00 00 10 00 00 00 00 00 00 00 18, found ff 00 00 00 00 00 00 10 00 00 00 00 00 00 00 18", m.String())
	text, err := json.Marshal(m)
	require.NoError(t, err)
	assert.JSONEq(t, `{"path":"pinned","pattern":"counter","size_bytes":4097,"source_offset_bytes":1,"device_offset_bytes":2,
		"return_offset_bytes":3,"streams":4,"first_bad_offset_bytes":9,"last_bad_offset_bytes":9,
		"expected_hex":"00000000000000100000000000000018","found_hex":"ff000000000000100000000000000018",
		"bad_bytes":1,"bad_bits":8,"bad_regions":1}`, string(text))
	var back Mismatch
	require.NoError(t, json.Unmarshal(text, &back))
	assert.Equal(t, m, back)
}
