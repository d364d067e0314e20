package linux

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseLocks(t *testing.T) {
	t.Parallel()
	got, err := ParseLocks("1: FLOCK  ADVISORY  READ  1234 00:1a:5678 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 99 00:1a:5678 0 EOF\n" +
		"2: OFDLCK ADVISORY  WRITE -1 00:1a:5678 0 0\n3: POSIX  ADVISORY  WRITE 7 fe:00:18446744073709551615 1073741826 1073742335\n")
	require.NoError(t, err)
	assert.Equal(t, []FileLock{{1234, "00:1a", 5678}, {7, "fe:00", 1<<64 - 1}}, got)
	for _, wrong := range []string{"1:", "x", "1: FLOCK ADVISORY READ pid 00:1a:5678 0 EOF", "1: FLOCK ADVISORY READ 1 00 0 EOF", "1: FLOCK ADVISORY READ 1 00:1a:x 0 EOF"} {
		_, err := ParseLocks(wrong + "\n")
		assert.Error(t, err, wrong)
	}
}
