package crc

import (
	"hash/crc32"
	"hash/crc64"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestCombinedChecksumsAreThoseOfAllBytes(t *testing.T) {
	t.Parallel()
	mem := make([]byte, 5_000)
	random := rand.NewChaCha8([32]byte{2})
	_, _ = random.Read(mem)
	const nvme = 0x9a6c9329ac4bc9b5
	for _, i := range []int{0, 1, 2, 255, 256, 4_095, 4_999, 5_000} {
		for _, polynomial := range []uint32{crc32.Castagnoli, crc32.IEEE} {
			table := crc32.MakeTable(polynomial)
			all := Combine(polynomial, crc32.Checksum(mem[:i], table), crc32.Checksum(mem[i:], table), int64(len(mem)-i))
			assert.Equal(t, crc32.Checksum(mem, table), all, i)
		}
		table := crc64.MakeTable(nvme)
		all := Combine(nvme, crc64.Checksum(mem[:i], table), crc64.Checksum(mem[i:], table), int64(len(mem)-i))
		assert.Equal(t, crc64.Checksum(mem, table), all, i)
	}
}
