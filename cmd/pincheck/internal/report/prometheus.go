package report

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// metrics collects gauges in families, in Prometheus' text format.
type metrics struct {
	names    []string
	families map[string]*family
}

// A family is the samples of one metric.
type family struct {
	help  string
	lines []string
	seen  map[string]bool // sets of labels; a scrape with one twice is refused as a whole
}

// add adds a sample. Labels of one name count once, and a sample of the same labels too.
func (m *metrics) add(name, help string, v float64, labels ...result.Label) {
	if !isFinite(v) { // in base units, where it was finite in others
		return
	}
	f := m.families[name]
	if f == nil {
		f = &family{help: help, seen: map[string]bool{}}
		m.families[name] = f
		m.names = append(m.names, name)
	}
	var parts, keys []string
	for _, l := range labels {
		if key := labelName(l.Key); !slices.Contains(keys, key) {
			keys = append(keys, key)
			parts = append(parts, key+`="`+labelEscaper.Replace(plain(l.Value))+`"`)
		}
	}
	set := strings.Join(parts, ",")
	slices.Sort(parts)
	if id := strings.Join(parts, ","); f.seen[id] {
		return
	} else {
		f.seen[id] = true
	}
	if set != "" {
		set = "{" + set + "}"
	}
	f.lines = append(f.lines, name+set+" "+strconv.FormatFloat(v, 'g', -1, 64))
}

var (
	labelEscaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	helpEscaper  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
)

// metricName makes a name of letters, digits and underscores.
func metricName(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, s)
}

// labelName is metricName for labels, which start with a letter; __ is Prometheus' own.
func labelName(s string) string {
	s = metricName(s)
	if s == "" || s[0] >= '0' && s[0] <= '9' || s[0] == '_' {
		return "label_" + s
	}
	return s
}

// writePrometheus writes the result for the textfile collector of node_exporter. Units are
// base units, in the names.
func writePrometheus(b *bytes.Buffer, r *Result) {
	m := &metrics{families: map[string]*family{}}
	m.run(r)
	if r.Facts != nil {
		for i := range r.Devices {
			m.device(&r.Devices[i])
		}
	}
	for i := range r.Benches {
		bench := result.Label{Key: "bench", Value: r.Benches[i].Name}
		m.add("pincheck_bench_complete", "Whether the experiment came to its end.", float64(b2i(r.Benches[i].Complete)), bench)
		m.add("pincheck_bench_errors", "Cases of the experiment that failed.", float64(len(r.Benches[i].Errors)), bench)
		m.add("pincheck_bench_duration_seconds", "Time that the experiment took.", r.Benches[i].Seconds, bench)
	}
	for _, s := range r.series() {
		m.series(s)
	}
	m.write(b)
}

// write writes the families in the order in which they came.
func (m *metrics) write(b *bytes.Buffer) {
	for _, name := range m.names {
		f := m.families[name]
		fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s gauge\n", name, helpEscaper.Replace(f.help), name)
		for _, line := range f.lines {
			b.WriteString(line + "\n")
		}
	}
}

// run adds the metrics of the run: version, verdict, findings, errors.
func (m *metrics) run(r *Result) {
	labels := []result.Label{{Key: "version", Value: r.Tool.Version}, {Key: "revision", Value: r.Tool.Revision}, {Key: "command", Value: r.Command}}
	if r.Facts != nil {
		labels = append(labels, result.Label{Key: "simulated", Value: strconv.FormatBool(r.Simulated)})
	}
	m.add("pincheck_run_info", "The program and the command that ran.", 1, labels...)
	if !r.Started.IsZero() {
		m.add("pincheck_run_start_timestamp_seconds", "When the run began, since the Unix epoch.", float64(r.Started.UnixMilli())/1e3)
		m.add("pincheck_run_duration_seconds", "Time that the run took.", r.Seconds)
		m.add("pincheck_run_complete", "Whether the run came to its end.", float64(b2i(r.Complete)))
	}
	m.add("pincheck_run_errors", "Errors of the run itself.", float64(len(r.Errors)))
	if r.Verdict != "" {
		for _, v := range doctor.Verdicts() {
			m.add("pincheck_verdict", "1 for the verdict of the run, 0 for the others.", float64(b2i(v == r.Verdict)), result.Label{Key: "verdict", Value: string(v)})
		}
	}
	m.findings("pincheck", "of the run", r.Findings)
}

// findings adds the findings, and how many there are.
func (m *metrics) findings(prefix, of string, all []doctor.Finding) {
	count := map[doctor.Severity]int{}
	for _, f := range all {
		count[f.Severity]++
	}
	for _, s := range doctor.Severities() {
		m.add(prefix+"_findings", "Findings "+of+".", float64(count[s]), result.Label{Key: "severity", Value: string(s)})
	}
	for _, f := range all {
		labels := []result.Label{{Key: "id", Value: f.ID}, {Key: "severity", Value: string(f.Severity)}}
		if f.Device != nil {
			labels = append(labels, result.Label{Key: result.Device, Value: strconv.Itoa(*f.Device)})
		}
		// No evidence: it has figures, each of which would be a series of its own.
		m.add(prefix+"_finding_info", "A finding "+of+".", 1, labels...)
	}
}

// WatchMetrics returns the findings of pincheck watch in Prometheus' text format. Their names are not those of
// a run: node_exporter refuses a series that two files have.
func WatchMetrics(found []doctor.Finding, looked time.Time) []byte {
	m := &metrics{families: map[string]*family{}}
	m.add("pincheck_watch_last_look_timestamp_seconds", "When the host was read, since the Unix epoch.", float64(looked.UnixMilli())/1e3)
	m.findings("pincheck_watch", "that the host has now", found)
	var b bytes.Buffer
	m.write(&b)
	return b.Bytes()
}

// device adds the metrics of a GPU.
func (m *metrics) device(d *doctor.Device) {
	device := result.Label{Key: result.Device, Value: strconv.Itoa(d.Ordinal)}
	m.add("pincheck_gpu_info", "A GPU of the run.", 1, device,
		result.Label{Key: "name", Value: d.Name}, result.Label{Key: "uuid", Value: d.UUID}, result.Label{Key: "pci_bus_id", Value: d.PCIBusID})
	m.add("pincheck_gpu_errors", "Calls and measurements that failed on the GPU.", float64(len(d.Errors)), device)
	if d.MemoryTotal > 0 {
		m.add("pincheck_gpu_memory_bytes", "Memory of the GPU.", float64(d.MemoryTotal), device)
		m.add("pincheck_gpu_memory_free_bytes", "Free memory of the GPU.", float64(d.MemoryFree), device)
	}
	if d.Link != nil {
		m.add("pincheck_gpu_link_bytes_per_second", "Rate of the GPU's link each way, as it is trained now; 0 is unknown.", 1e9*d.Link.Rate, device)
		m.add("pincheck_gpu_link_max_bytes_per_second", "Highest rate of the GPU's link each way; 0 is unknown.", 1e9*d.Link.MaxRate, device)
	}
}

// A metricUnit is the end of a metric's name, its unit in words, and the base units in one.
type metricUnit struct {
	suffix, words string
	scale         float64
}

var metricUnits = map[result.Unit]metricUnit{
	result.GBPerSecond: {"_bytes_per_second", "bytes per second", 1e9}, result.Seconds: {"_seconds", "seconds", 1}, result.Bytes: {"_bytes", "bytes", 1},
	result.Ratio: {"_ratio", "a ratio", 1}, result.PerSecond: {"_per_second", "per second", 1}, result.Count: {"", "a count", 1},
}

// series adds the statistics of a series, and its reference.
func (m *metrics) series(s listed) {
	if len(s.Samples) == 0 {
		return
	}
	in, known := metricUnits[s.Unit]
	if !known {
		in = metricUnit{"_" + metricName(string(s.Unit)), plain(string(s.Unit)), 1}
	}
	base := "pincheck_series_" + strings.TrimSuffix(metricName(s.Name), in.suffix)
	labels := append([]result.Label{{Key: "bench", Value: s.bench}}, s.Labels...)
	for _, stat := range []struct {
		name string
		v    float64
	}{{"median", s.Median}, {"min", s.Min}, {"max", s.Max}, {"p10", s.P10}, {"p90", s.P90}, {"p99", s.P99}} {
		at := append([]result.Label{{Key: "stat", Value: stat.name}}, labels...)
		m.add(base+in.suffix, fmt.Sprintf("Measured: %s, in %s.", strings.ReplaceAll(plain(s.Name), "_", " "), in.words), in.scale*stat.v, at...)
	}
	if s.Expected != nil {
		m.add(base+"_expected"+in.suffix, "What such hardware reaches, in the unit of the series.", in.scale*s.Expected.Value, labels...)
	}
}
