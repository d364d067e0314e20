package doctor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/cudart"
)

// A Xid of another finding is that finding's evidence, and no finding of its own.
func TestXidsAreEvidenceFirst(t *testing.T) {
	t.Parallel()
	f := well(t)
	logs("NVRM: Xid (PCI:0000:00:06): 48, DBE")(f)
	require.Equal(t, []string{"xid"}, ids(loggedAll(f)))
	f.Devices[0].Health.UncorrectedVolatile = number(2)
	_, found := Evaluate(f)
	require.Equal(t, []string{"uncorrectable_ecc"}, ids(found))
	assert.Contains(t, found[0].Evidence, "NVRM: Xid (PCI:0000:00:06): 48, DBE")

	f = stopped(t, &cudart.Error{Op: "cudaGetDeviceCount", Code: cudart.ErrNoDevice})
	f.Host.GPUs[0].OffBus, f.Host.GPUs[0].Driver = true, ""
	logs("NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus.")(f)
	_, found = Evaluate(f)
	require.Equal(t, []string{"gpu_off_bus"}, ids(found))
	assert.Equal(t, Certain, found[0].Certainty, "the log says that it is not asleep")
}

// Xids of GPUs that this process does not see stay findings.
func TestXidsOfTwoGPUs(t *testing.T) {
	t.Parallel()
	f := well(t)
	logs("NVRM: Xid (PCI:0000:00:06): 31, Ch 1", "NVRM: Xid (PCI:0000:0a:00): 119, Timeout", "NVRM: Xid (PCI:0000:0a:00): 45, Ch 2", "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed")(f)
	_, found := Evaluate(f)
	require.Equal(t, []string{"xid", "xid"}, ids(found))
	assert.Equal(t, Problem, found[0].Severity)
	assert.Contains(t, found[0].Summary, "Xid 119 of the GPU at 0000:0a:00.0")
	assert.Contains(t, found[0].Evidence, "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed")
	assert.Equal(t, Note, found[1].Severity)
}

// An error of the past of a GPU that works is worth a note.
func TestOldXids(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]struct {
		severity Severity
		says     string
	}{
		90 * time.Second: {Warning, "last 90 s ago"}, 30 * time.Minute: {Warning, "last 30 min ago"},
		5 * time.Hour: {Warning, "last 5 h ago"}, 30 * time.Hour: {Note, "last 30 h ago"}, 72 * time.Hour: {Note, "last 3 days ago"},
	} {
		f := well(t)
		logs("NVRM: Xid (PCI:0000:00:06): 119, Timeout", "NVRM: Xid (PCI:0000:00:06): 119, Timeout")(f)
		f.Host.KernelLog.Events[0].Age = number(age.Seconds())
		_, found := Evaluate(f)
		require.Len(t, found, 1)
		assert.Equal(t, want.severity, found[0].Severity, age)
		assert.Contains(t, found[0].Evidence[0], want.says)
	}
}

// What CUDA does not start for, by the kernel module's own words.
func TestLoggedCausesOfACUDAThatDoesNotStart(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"NVRM: GPU 0000:00:06.0: RmInitAdapter failed! (0x22:0x56:742)\nNVRM: BAR1 is 0M @ 0x0 (PCI:0000:00:06.0)": "window",
		"NVRM: GPU 0000:00:06.0: RmInitAdapter failed! (0x62:0xffff:1863)":                                         "firmware files",
	} {
		f := stopped(t, &cudart.Error{Op: "cudaGetDeviceCount", Code: cudart.ErrNoDevice})
		logs(message)(f)
		_, found := Evaluate(f)
		require.NotEmpty(t, found)
		assert.Equal(t, "gpu_not_initialized", found[0].ID, message)
		assert.Contains(t, found[0].Cause, want, message)
		assert.Empty(t, loggedInit(func() *Facts { f := well(t); logs(message)(f); return f }()), "a GPU that works was started later")
	}
}

func loggedAll(f *Facts) []Finding {
	_, found := Evaluate(f)
	return found
}

// Every class of Xids that has findings has a severity, and Program is a note.
func TestSeveritiesOfXids(t *testing.T) {
	t.Parallel()
	for n := range 200 {
		x := kernellog.Lookup(n)
		if x.Class != kernellog.Information {
			assert.Contains(t, Severities(), severityOf(x), n)
		}
		if x.Class == kernellog.Program {
			assert.Equal(t, Note, severityOf(x), n)
		}
	}
}
