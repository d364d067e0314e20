package hostinfo

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const logOfXid = "[  100.000000] usb 1-1: a message\n[ 3600.000000] NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=python3, x\n"

// A message has its age, unless the log's clock stood still in a suspend. A recording reads the same.
func TestKernelLog(t *testing.T) {
	t.Parallel()
	host := fstest.MapFS{
		kernelLogFile:                     {Data: []byte(logOfXid)},
		"proc/uptime":                     {Data: []byte("10800.50 77.00\n")},
		"proc/sys/kernel/dmesg_restrict":  {Data: []byte("1\n")},
		"sys/power/suspend_stats/success": {Data: []byte("0\n")},
	}
	recorder := Record(host)
	l := Read(recorder, nil).KernelLog
	assert.True(t, l.Shown)
	assert.True(t, *l.Restricted)
	require.Len(t, l.Events, 1)
	assert.Equal(t, 31, l.Events[0].Xid)
	assert.InDelta(t, 7200.5, *l.Events[0].Age, 0.01)

	recorded := recorder.Host()
	assert.NotContains(t, string(recorded[kernelLogFile].Data), "usb")
	assert.Equal(t, l, Read(recorded, nil).KernelLog)

	host["sys/power/suspend_stats/success"] = &fstest.MapFile{Data: []byte("2\n")}
	assert.Nil(t, Read(host, nil).KernelLog.Events[0].Age)
	assert.True(t, KernelLog{}.IsZero())
}

// The device /dev/kmsg itself has no end, and is not read as a file.
func TestTheLogsDeviceIsNotRead(t *testing.T) {
	t.Parallel()
	l := Read(fstest.MapFS{kernelLogFile: {Mode: fs.ModeDevice | fs.ModeCharDevice | 0o644, Data: []byte(logOfXid)}}, nil).KernelLog
	assert.False(t, l.Shown)
	assert.Empty(t, l.Events)
}

// The root directory of this host has a log that ends, or says that it may not be read.
func TestRoot(t *testing.T) {
	t.Parallel()
	file, err := Root().Open(kernelLogFile)
	if err != nil {
		assert.ErrorContains(t, err, kernelLogFile)
		return
	}
	defer file.Close()
	info, err := file.Stat()
	require.NoError(t, err)
	assert.True(t, info.Mode().IsRegular())
}
