package hostinfo_test

import (
	"flag"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttext"
)

var record = flag.String("record", "", "write the host that the test runs on to this file")

// A recorded host must read the same as the live one. With -record the recording is
// written to a file, to be put below testdata/hosts.
func TestRecordThisHost(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc and /sys")
	}
	rec := hostinfo.Record(os.DirFS("/"))
	live := hostinfo.Read(rec, nil)
	text := hosttext.Format("Recorded on a "+runtime.GOARCH+" host.", rec.Host())
	again, err := hosttext.Parse(text)
	require.NoError(t, err)
	replayed := hostinfo.Read(again, nil)

	assert.Equal(t, live, replayed)
	assert.NotEmpty(t, live.Kernel.Release)
	assert.Positive(t, live.CPU.Threads)
	assert.Positive(t, live.Memory.Total)
	if *record != "" {
		require.NoError(t, os.WriteFile(*record, []byte(text), 0o644))
		t.Logf("recorded %s", *record)
	}
}
