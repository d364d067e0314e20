package report

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

const ours = `{"schema_version": 2, "command": "bench", "host_name": "gpu-1", "started": "2026-11-21T20:00:00Z", "complete": true, "benches": [
 {"bench": "bandwidth", "complete": true, "started": "2026-11-21T20:00:00Z", "series": [
  {"name": "bandwidth", "labels": {"device": "0", "direction": "host_to_device", "size_bytes": "4096", "memory": "cuda_host_alloc"}, "unit": "gb_per_s", "better": "higher", "samples": [1.1]},
  {"name": "bandwidth", "labels": {"device": "0", "direction": "host_to_device", "size_bytes": "1073741824", "memory": "registered"}, "unit": "gb_per_s", "better": "higher", "samples": [55.3]},
  {"name": "bandwidth", "labels": {"device": "0", "direction": "host_to_device", "size_bytes": "536870912", "memory": "cuda_host_alloc"}, "unit": "gb_per_s", "better": "higher", "samples": [55.4, 55.5, 55.4, 55.4]},
  {"name": "bandwidth", "labels": {"device": "0", "direction": "host_to_device", "size_bytes": "536870912", "memory": "cuda_host_alloc", "devices": "2"}, "unit": "gb_per_s", "better": "higher", "samples": [33]},
  {"name": "bandwidth", "labels": {"device": "0", "direction": "both", "size_bytes": "536870912", "memory": "registered"}, "unit": "gb_per_s", "better": "higher", "samples": [98.8]},
  {"name": "bandwidth", "labels": {"device": "0", "direction": "device_to_host", "size_bytes": "536870912", "memory": "pageable"}, "unit": "gb_per_s", "better": "higher", "samples": [9]}]}]}`

// In the shape that nvbandwidth 0.8 prints with -j, from its json_output.cpp.
const theirs = `{"nvbandwidth": {
 "CUDA Runtime Version": 13000, "Driver Version": "580.159.04",
 "GPU Device list": ["0: NVIDIA H200 (00000000:00:06): (gpu-1)", "1: NVIDIA H200 (00000000:00:07): (gpu-1)"],
 "git_version": "v0.8", "version": "v0.8", "warning": "NOTE: small",
 "testcases": [
  {"name": "host_to_device_memcpy_ce", "status": "Passed", "bandwidth_description": "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)", "bandwidth_matrix": [["55.48", "55.5"]], "sum": 110.98},
  {"name": "device_to_host_memcpy_ce", "status": "Passed", "bandwidth_matrix": [["55.38", "N/A"]], "sum": 55.38},
  {"name": "host_to_device_bidirectional_memcpy_ce", "status": "Passed", "bandwidth_matrix": [[48.4]], "sum": 48.4},
  {"name": "device_to_host_bidirectional_memcpy_ce", "status": "Passed", "bandwidth_matrix": [[50.9]], "sum": 50.9},
  {"name": "host_to_device_memcpy_sm", "status": "Passed", "bandwidth_matrix": [["35.19"]], "sum": 35.19},
  {"name": "device_to_device_memcpy_read_ce", "status": "Passed", "bandwidth_matrix": [["N/A", "276"], ["276", "N/A"]], "sum": 552},
  {"name": "device_to_host_memcpy_sm", "status": "Waived"}]}}`

func TestNVBandwidthStandsBesideOurs(t *testing.T) {
	t.Parallel()
	read := func(text string) []compare.Document {
		d, err := ReadDocuments(strings.NewReader(text))
		require.NoError(t, err)
		return d
	}
	their := read(theirs)
	require.Len(t, their, 1)
	assert.Equal(t, "gpu-1", their[0].Host)
	assert.Equal(t, "nvbandwidth v0.8", their[0].Tool)
	assert.True(t, their[0].Complete)
	assert.Equal(t, []string{"nvbandwidth: NOTE: small", "nvbandwidth: device_to_host_memcpy_sm: waived",
		"nvbandwidth measures each direction in a run of its own while the other one is busy: both is the sum of the two",
		"nvbandwidth: not compared: device_to_device_memcpy_read_ce"}, their[0].Notes)

	c, err := compare.Compare(compare.Runs([]compare.File{{Name: "theirs.json", Documents: their}, {Name: "ours.json", Documents: read(ours)}}), 0.03)
	require.NoError(t, err)
	assert.Equal(t, []string{"theirs", "ours"}, []string{c.Runs[0].Name, c.Runs[1].Name}, "one host: named after the files")
	type pair struct{ a, b float64 }
	got := map[string]pair{}
	for _, r := range c.Rows {
		if r.Verdict != compare.Missing {
			assert.Equal(t, compare.Same, r.Verdict)
			got[fmt.Sprint(r.Labels)] = pair{r.Values[0].Median, r.Values[1].Median}
		}
	}
	assert.Equal(t, map[string]pair{
		"[{device 0} {direction host_to_device} {size_bytes 536870912} {memory cuda_host_alloc}]": {55.48, 55.4},
		"[{device 0} {direction both} {size_bytes 536870912} {memory registered}]":                {48.4 + 50.9, 98.8},
	}, got)

	c, err = compare.Compare(compare.Runs([]compare.File{{Name: "a", Documents: their}, {Name: "b", Documents: read(theirs)}}), 0)
	require.NoError(t, err)
	assert.Len(t, c.Rows, 5, "two runs of nvbandwidth are compared as they are")
}

// nvbandwidth has both ways in two testcases. One of them alone is not both.
func TestHalfOfBothWaysIsNotBoth(t *testing.T) {
	t.Parallel()
	for _, missing := range []string{"host_to_device_bidirectional_memcpy_ce", "device_to_host_bidirectional_memcpy_ce"} {
		d, err := ReadDocuments(strings.NewReader(strings.Replace(theirs, `"`+missing+`", "status": "Passed"`, `"`+missing+`", "status": "Waived"`, 1)))
		require.NoError(t, err)
		for _, s := range d[0].Benches[0].Series {
			assert.NotEqual(t, result.Both, s.Labels.Get(result.Direction), "without %s", missing)
		}
		assert.NotContains(t, strings.Join(d[0].Notes, "\n"), "both is the sum of the two")
	}
}

func TestReadReportsWhatIsWrong(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, want string }{
		{"", "empty"},
		{" \n", "empty"},
		{ours[:len(ours)/2], "truncated: it ends within document 1"},
		{ours + ours[:200], "truncated: it ends within document 2"},
		{strings.Replace(ours, `"schema_version": 2`, `"schema_version": 3`, 1), "document 1: schema_version 3: this pincheck reads 2"},
		{ours + "\n" + strings.Replace(ours, `"schema_version": 2`, `"schema_version": 9e99`, 1), "document 2: schema_version 9e+99"},
		{strings.Replace(ours, `"schema_version": 2`, `"schema_version": "two"`, 1), "not a result of nvbandwidth (--json), and not a result of pincheck"},
		{`{"schema_version": 2, "command": "check", "devices": []}`, "no measurements: compare what pincheck bench"},
		{`{"a": 1}`, "not a result of nvbandwidth (--json), and not a result of pincheck"},
		{`[1, 2]`, "not a result of nvbandwidth (--json), and not a result of pincheck"},
		{`null`, "not a result of nvbandwidth (--json), and not a result of pincheck"},
		{`"text"`, "not a result of nvbandwidth (--json), and not a result of pincheck"},
		{"pincheck: no GPU", "not JSON: byte 1"},
		{"\x00\xff\xfe", "not JSON"},
		{strings.Replace(ours, "[1.1]", `["1.1"]`, 1), "cannot unmarshal string"},
		{strings.Replace(ours, "[1.1]", `[1e999]`, 1), "cannot unmarshal number"},
		{strings.Replace(theirs, `"55.48"`, `"fast"`, 1), `bandwidth_matrix: "fast" is no bandwidth`},
		{strings.Replace(theirs, `"55.48"`, `"NaN"`, 1), `is no bandwidth`},
		{`{"nvbandwidth": {"error": "no device", "testcases": [{"name": "host_to_device_memcpy_ce", "status": "Running"}]}}`,
			"no testcase between the host and a GPU passed, such as host_to_device_memcpy_ce (nvbandwidth: no device; nvbandwidth: host_to_device_memcpy_ce: running)"},
		{`{"nvbandwidth": 7}`, "nvbandwidth: json: cannot"},
	} {
		_, err := ReadDocuments(strings.NewReader(c.text))
		assert.ErrorContains(t, err, c.want, "%.80s", c.text)
	}
	_, err := readEach(endless{}, 1<<20, Read)
	assert.ErrorContains(t, err, "more than 1 MiB")

	simulated, err := ReadDocuments(strings.NewReader(strings.Replace(ours, `"complete": true, "benches"`, `"complete": true, "simulated": true, "benches"`, 1)))
	require.NoError(t, err)
	assert.True(t, simulated[0].Complete)
	assert.Equal(t, []string{"a simulated GPU: its figures say nothing of the host"}, simulated[0].Notes)
	incomplete, err := ReadDocuments(strings.NewReader(strings.Replace(ours, `"complete": true, "benches"`, `"complete": false, "benches"`, 1)))
	require.NoError(t, err)
	assert.False(t, incomplete[0].Complete)
	assert.False(t, compare.Runs([]compare.File{{Name: "a", Documents: incomplete}})[0].Complete)
}

// endless is white space that does not end.
type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = ' '
	}
	return len(b), nil
}

func FuzzRead(f *testing.F) {
	f.Add(ours)
	f.Add(theirs)
	f.Add(ours + "\n" + theirs)
	f.Add(`{"schema_version": 2, "benches": [{"series": [{"samples": [0, -1, 1e308, 5e-324], "labels": null}]}]}`)
	f.Add(`{"nvbandwidth": {"testcases": [{"name": "_", "status": "Passed", "bandwidth_matrix": [[]]}]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		documents, err := ReadDocuments(strings.NewReader(text))
		if err != nil {
			return
		}
		require.NotEmpty(t, documents)
		for n := range 4 {
			files := make([]compare.File, n)
			for i := range files {
				files[i] = compare.File{Name: "f", Documents: documents}
			}
			c, err := compare.Compare(compare.Runs(files), 0.03)
			if err != nil {
				continue
			}
			for _, r := range c.Rows {
				require.Len(t, r.Values, len(c.Runs))
				require.NotEmpty(t, r.Verdict)
			}
		}
	})
}

// A file of 10 MB that is not a result costs no more than a few times its size; an empty series of JSON has 3 bytes,
// and one in memory hundreds.
func TestResultsOfEmptySeriesAreRefused(t *testing.T) {
	t.Parallel()
	file := func(series string, n int) string {
		return fmt.Sprintf(`{"schema_version":%d,"benches":[{"series":[%s%s]}]}`, SchemaVersion, strings.Repeat(series+",", n), series)
	}
	hostile := map[string]string{
		"objects": file("{}", 3<<20), "lists": file("[]", 3<<20), "numbers": file("1", 5<<20),
		"depth": `{"schema_version":2,"x":` + strings.Repeat("[", 5<<20) + strings.Repeat("]", 5<<20) + `}`,
	}
	for _, name := range hosttest.Sample(slices.Sorted(maps.Keys(hostile))) {
		text := hostile[name]
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := ReadAll(strings.NewReader(text))
		runtime.ReadMemStats(&after)
		require.Error(t, err, name)
		require.Less(t, (after.TotalAlloc-before.TotalAlloc)>>20, uint64(1<<10), "MiB for %s", name)
		t.Logf("%s: %v; %d MiB", name, err, (after.TotalAlloc-before.TotalAlloc)>>20)
	}
	series := `{"name":"bandwidth","labels":{"device":"0"},"unit":"gb_per_s","better":"higher","samples":[1,2,3]}`
	extra := 100_000 / hosttest.Stride()
	many, err := ReadAll(strings.NewReader(file(series, extra)))
	require.NoError(t, err)
	require.Len(t, many[0].Benches[0].Series, extra+1)
}
