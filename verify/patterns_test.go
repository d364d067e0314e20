package verify

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/pattern"
)

// byteAt is the pattern's definition, byte by byte.
func byteAt(p Pattern, seed uint64, off int) byte {
	var w [8]byte
	switch i := uint64(off / 8); p {
	case patternOnes:
		return 0xFF
	case patternAlternating:
		return [2]byte{0x55, 0xAA}[off%2]
	case patternWalkingBit:
		binary.LittleEndian.PutUint64(w[:], 1<<(i%64))
	case patternCounter:
		binary.LittleEndian.PutUint64(w[:], 8*i)
	case patternRandom:
		binary.LittleEndian.PutUint64(w[:], pattern.Content{Kind: pattern.Random, Seed: seed}.Word(i))
	}
	return w[off%8]
}

func TestFillAgreesWithDefinitionAtAnyOffset(t *testing.T) {
	t.Parallel()
	const n = 1100
	for _, p := range patterns() {
		c := p.content(42)
		want := make([]byte, n)
		for i := range want {
			want[i] = byteAt(p, 42, i)
		}
		for off := range 20 {
			for _, size := range []int{0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000} {
				got := bytes.Repeat([]byte{0xEE}, size+2)
				c.fill(got[1:1+size], off)
				require.Equal(t, want[off:off+size], got[1:1+size], "%s at %d, %d bytes", p, off, size)
				require.Equal(t, []byte{0xEE, 0xEE}, []byte{got[0], got[size+1]}, "%s at %d: wrote outside", p, off)
				require.True(t, c.equals(want[off:off+size], off))
			}
		}
	}
}

func TestPoisonDiffersEverywhere(t *testing.T) {
	t.Parallel()
	const n = 4096
	for _, p := range patterns() {
		c := p.content(7)
		seen := [][]byte{make([]byte, n)}
		c.fill(seen[0], 0)
		for _, q := range poisons {
			b := make([]byte, n)
			c.poisonAt(q.at).fill(b, 0)
			for _, other := range seen {
				for i := range b {
					require.NotEqual(t, other[i], b[i], "%s, poison of the %s, offset %d", p, q.at, i)
				}
			}
			seen = append(seen, b)
		}
	}
}

func TestEqualsSeesEveryByte(t *testing.T) {
	t.Parallel()
	c := patternRandom.content(1)
	buf := make([]byte, 3*blockBytes+5)
	c.fill(buf, 3)
	for _, i := range []int{0, 1, 7, 8, blockBytes - 1, blockBytes, 2*blockBytes + 3, len(buf) - 1} {
		buf[i] ^= 0x10
		assert.False(t, c.equals(buf, 3), "byte %d", i)
		buf[i] ^= 0x10
	}
	assert.True(t, c.equals(buf, 3))
}

func TestLargeBuffersInSegments(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := patternCounter.content(0)
	buf := make([]byte, 3*segmentBytes+4097)
	require.NoError(t, fillAll(ctx, c, buf))
	require.True(t, c.equals(buf, 0))
	ok, err := equalAll(ctx, c, buf)
	require.NoError(t, err)
	assert.True(t, ok)
	for _, i := range []int{0, segmentBytes - 1, segmentBytes, len(buf) - 1} {
		buf[i] ^= 1
		ok, err = equalAll(ctx, c, buf)
		require.NoError(t, err)
		assert.False(t, ok, "byte %d", i)
		buf[i] ^= 1
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	ok, err = equalAll(cancelled, c, buf)
	require.ErrorIs(t, err, context.Canceled)
	assert.False(t, ok, "nothing was compared")
	require.ErrorIs(t, fillAll(cancelled, c, buf), context.Canceled)
}

func TestRandomSeedsDiffer(t *testing.T) {
	t.Parallel()
	a, b := make([]byte, 64), make([]byte, 64)
	patternRandom.content(1).fill(a, 0)
	patternRandom.content(2).fill(b, 0)
	assert.NotEqual(t, a, b)
}

func BenchmarkPatterns(b *testing.B) {
	buf := make([]byte, 4*mib)
	for _, p := range patterns() {
		c := p.content(3)
		b.Run(fmt.Sprintf("fill/%s", p), func(b *testing.B) {
			b.SetBytes(int64(len(buf)))
			b.ReportAllocs()
			for b.Loop() {
				c.fill(buf, 0)
			}
		})
		b.Run(fmt.Sprintf("equals/%s", p), func(b *testing.B) {
			c.fill(buf, 0)
			b.SetBytes(int64(len(buf)))
			b.ReportAllocs()
			for b.Loop() {
				if !c.equals(buf, 0) {
					b.Fatal("not equal")
				}
			}
		})
	}
}
