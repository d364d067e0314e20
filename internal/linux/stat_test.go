package linux

import (
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCPUTime(t *testing.T) {
	t.Parallel()
	text := "cpu  100 20 30 4000 500 6 7 8 90 9\ncpu0 50 10 15 2000 250 3 3 4 45 4\ncpu1 50 10 15 2000 250 3 4 4 45 5\n" +
		"intr 12345 0 0\nctxt 5\nbtime 1763800000\nprocs_running 2\n"
	got, err := ReadCPUTime(fstest.MapFS{"proc/stat": {Data: []byte(text)}})
	require.NoError(t, err)
	assert.Equal(t, CPUTime{CPUs: 2, Busy: 1710 * time.Millisecond, Idle: 45 * time.Second}, got, "guests are among the users")

	old, err := ParseCPUTime("cpu 1 2 3 4\n")
	require.NoError(t, err)
	assert.Equal(t, CPUTime{Busy: 60 * time.Millisecond, Idle: 40 * time.Millisecond}, old)

	for _, bad := range []string{"", "intr 1\n", "cpu\n", "cpu 1 2 x 4\n", "cpu 1 2 -3 4\n", "cpu 9223372036854775807 0 0 0\n", "cpu0 1 2 3 4\n"} {
		_, err := ParseCPUTime(bad)
		var wrong *SyntaxError
		assert.ErrorAs(t, err, &wrong, "%q", bad)
	}
}
