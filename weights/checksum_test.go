package weights

import (
	"bytes"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Checksums of pieces, in any order and some of them twice, are those of the bytes at once.
func TestSumsOfPieces(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		const block = 1000
		start := random.Int64N(10_000)
		var spans []span
		end := start
		for range 1 + random.IntN(5) {
			n := random.IntN(3 * block)
			spans = blocksOf(spans, end, n, block)
			end += int64(n)
		}
		file := make([]byte, end+100)
		for i := range file {
			file[i] = byte(random.Uint32())
		}
		cuts := []int64{0, int64(len(file))}
		for range random.IntN(20) {
			cuts = append(cuts, random.Int64N(int64(len(file))))
		}
		slices.Sort(cuts)
		s := newSums(spans)
		for i := range spans {
			got, complete := s.of(i)
			require.Empty(t, got)
			require.False(t, complete)
		}
		// Bytes that were wrong come again, in pieces of other sizes.
		from, to := min(cuts[len(cuts)/2], end), end
		bad := bytes.Repeat([]byte{7}, int(to-from))
		again := round%2 == 0
		for at := 0; at < len(bad) && again; at += 333 {
			s.add(from+int64(at), bad[at:min(at+333, len(bad))])
		}
		for _, i := range random.Perm(len(cuts) - 1) {
			s.add(cuts[i], file[cuts[i]:cuts[i+1]])
		}
		for i, b := range spans {
			want := crc32.Checksum(file[b.off:b.end()], castagnoli)
			got, complete := s.of(i)
			require.True(t, complete || again)
			if again { // all, or some behind others
				require.True(t, !complete || slices.Contains(got, want))
			} else {
				require.Equal(t, []uint32{want}, got)
			}
		}
	}
}

// Each copy's checksum counts, also of copies in pieces, and one that is not complete leaves all unknown.
func TestSumsOfCopies(t *testing.T) {
	t.Parallel()
	s := newSums([]span{{100, 10}})
	file := []byte("0123456789")
	sum := func(from, to int) summed { return summed{from, to - from, crc32.Checksum(file[from:to], castagnoli)} }
	s.put(0, sum(4, 10))
	requireSums := func(complete bool, want ...uint32) {
		t.Helper()
		got, is := s.of(0)
		require.Equal(t, want, append([]uint32(nil), got...))
		require.Equal(t, complete, is)
	}
	requireSums(false)
	s.put(0, sum(0, 10))
	requireSums(false, sum(0, 10).sum)
	s.put(0, sum(0, 4))
	requireSums(true, sum(0, 10).sum)
	s.put(0, summed{0, 10, 7})
	requireSums(true, sum(0, 10).sum, 7)
}

func TestTheCheckValueOfTheChecksum(t *testing.T) {
	t.Parallel()
	assert.Equal(t, uint32(0xe3069283), crc32.Checksum([]byte("123456789"), castagnoli))
}

func TestChecksumText(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "4096 0000000a ", checksumText(4096, 10, nil))
	assert.Equal(t, "1048576 89abcdef 0000000101234567ffffffff", checksumText(blockBytes, 0x89abcdef, []uint32{1, 0x01234567, 1<<32 - 1}))
}

// The limit of blocks is that of the text, before memory is taken for them.
func TestChecksumTextsThatDoNotFit(t *testing.T) {
	t.Parallel()
	huge := &File{source: source{name: "f"}, format: Safetensors}
	huge.tensors = []*Tensor{{Name: "a", Size: 1 << 30, File: huge}, {Name: "b", Offset: 1 << 30, Size: 1 << 30, File: huge}}
	for _, c := range []struct{ value, says string }{
		{"", "0 fields"}, // of one
		{"1048576 00000000", "fields, want 3"},
		{"1048576 00000000  ", "fields, want 3"},
		{"x 00000000 ", "want 4096 to 67108864"},
		{"4095 00000000 ", "want 4096 to 67108864"},
		{"-4096 00000000 ", "want 4096 to 67108864"},
		{"67108865 00000000 ", "want 4096 to 67108864"},
		{"4096 00000000 00000000", "each of"},
		{"1048576 00000000 " + string(bytes.Repeat([]byte("0"), 2047*8)), "each of"},
		{"1048576 00000000 " + string(bytes.Repeat([]byte("0"), 2049*8)), "each of 2048 blocks"},
		{"1048576 0000000 " + string(bytes.Repeat([]byte("0"), 2048*8+1)), "each of 2048 blocks"},
		{"1048576 00000000 " + string(bytes.Repeat([]byte("x"), 2048*8)), "each of 2048 blocks"},
	} {
		huge.metadata = map[string]any{checksumKey: c.value}
		got, err := huge.checksums()
		var refused *FormatError
		require.ErrorAs(t, err, &refused, c.value)
		assert.Nil(t, got)
		if c.value != "" {
			assert.ErrorContains(t, err, c.says)
		}
	}
	huge.metadata = map[string]any{checksumKey: "1048576 00000000 " + string(bytes.Repeat([]byte("0"), 2048*8))}
	got, err := huge.checksums()
	require.NoError(t, err)
	assert.Len(t, got.sums, 2048)
	huge.metadata = nil
	_, err = huge.checksums()
	require.ErrorIs(t, err, ErrNoChecksums)
}

func BenchmarkChecksum(b *testing.B) {
	const size = 64 << 20
	mem := make([]byte, size)
	spans := blocksOf(nil, 4096, size, blockBytes)
	b.SetBytes(size)
	for b.Loop() {
		s := newSums(spans)
		for at := 0; at < size; at += 512 << 10 {
			s.add(4096+int64(at), mem[at:at+512<<10])
		}
	}
}

// A save does not write a checksum that nobody has computed.
func TestAHeaderIsNotSealedWithoutAllChecksums(t *testing.T) {
	t.Parallel()
	f := savedFile{size: 8, sums: newSums([]span{{off: 0, n: 4}, {off: 4, n: 4}})}
	f.sums.add(0, []byte{1, 2, 3, 4})
	f.sums.add(0, []byte{1, 2, 3, 4}) // as many bytes as the file has
	f.tensors = []savedAt{{SavedTensor: &SavedTensor{Name: "first"}, size: 4}, {SavedTensor: &SavedTensor{Name: "second"}, off: 4, size: 4}}
	require.ErrorContains(t, f.seal(), `tensor "second", at offset 4: not all bytes have passed`)
}
