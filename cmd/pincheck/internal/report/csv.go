package report

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// csvColumns are the columns of CSV. Those from device to method are labels; other labels
// are in labels, as key=value.
var csvColumns = []string{
	"host_name", "started", "command", "simulated", "bench", "series",
	result.Device, result.Direction, result.Size, result.Memory, result.Method, "labels",
	"unit", "better", "samples", "median", "min", "max", "mean", "spread", "cv", "p10", "p90", "p99",
	"expected", "expected_source", "bytes_per_sample", "cpu_s_per_gb", "verified", "numa_node", "sample_values",
}

// writeCSV writes a row a series, or what the commands show that have none: a row a GPU, or the
// program.
func writeCSV(b *bytes.Buffer, r *Result) error {
	w := csv.NewWriter(b)
	if r.Command == "devices" || r.Command == "version" {
		rows := inventory(r)
		for _, row := range rows {
			for i := range row {
				row[i] = plain(row[i])
			}
		}
		w.WriteAll(rows) // errors stay in w
		return w.Error()
	}
	w.Write(csvColumns) // errors stay in w
	simulated := r.Facts != nil && r.Simulated
	for _, s := range r.series() {
		w.Write(csvRow(r, s, simulated))
	}
	w.Flush()
	return w.Error()
}

// inventory returns the rows of devices and of version, below the names of their columns.
func inventory(r *Result) [][]string {
	if r.Command == "version" {
		t := r.Tool
		return [][]string{{"name", "version", "revision", "go", "platform"}, {t.Name, t.Version, t.Revision, t.Go, t.Platform}}
	}
	rows := [][]string{{"host_name", "started", "simulated", result.Device, "name", "uuid", "pci_bus_id", "compute_capability",
		"memory_total_bytes", "memory_free_bytes", "numa_node", "link_gt_per_s", "link_width", "link_gb_per_s"}}
	if r.Facts == nil {
		return rows
	}
	known := func(n int) string {
		if n == 0 {
			return ""
		}
		return strconv.Itoa(n)
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		row := []string{r.HostName, r.Started.UTC().Format(time.RFC3339), strconv.FormatBool(r.Simulated), strconv.Itoa(d.Ordinal), d.Name, d.UUID, d.PCIBusID,
			d.ComputeCapability, known(d.MemoryTotal), known(d.MemoryFree), "", "", "", ""}
		if d.NUMANode != nil {
			row[10] = strconv.Itoa(*d.NUMANode)
		}
		if l := d.Link; l != nil {
			row[11], row[12], row[13] = strconv.FormatFloat(l.Speed, 'g', -1, 64), known(l.Width), strconv.FormatFloat(l.Rate, 'g', -1, 64)
		}
		rows = append(rows, row)
	}
	return rows
}

func csvRow(r *Result, s listed, simulated bool) []string {
	number := func(v float64) string {
		if !isFinite(v) {
			return ""
		}
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
	named := []string{result.Device, result.Direction, result.Size, result.Memory, result.Method}
	cells := map[string]string{
		"host_name": r.HostName, "started": r.Started.UTC().Format(time.RFC3339), "command": r.Command, "simulated": strconv.FormatBool(simulated),
		"bench": s.bench, "series": s.Name, "unit": string(s.Unit), "better": string(s.Better), "samples": strconv.Itoa(len(s.Samples)),
		"verified": strconv.FormatBool(s.Verified),
	}
	if len(s.Samples) > 0 {
		for name, v := range map[string]float64{"median": s.Median, "min": s.Min, "max": s.Max, "mean": s.Mean, "spread": s.Spread, "cv": s.CV, "p10": s.P10, "p90": s.P90, "p99": s.P99} {
			cells[name] = number(v)
		}
	}
	var others, values []string
	for _, l := range s.Labels {
		if slices.Contains(named, l.Key) {
			cells[l.Key] = l.Value
		} else {
			others = append(others, fmt.Sprintf("%s=%s", l.Key, l.Value))
		}
	}
	for _, v := range s.Samples {
		values = append(values, number(v))
	}
	cells["labels"], cells["sample_values"] = strings.Join(others, ";"), strings.Join(values, " ")
	if s.Expected != nil {
		cells["expected"], cells["expected_source"] = number(s.Expected.Value), s.Expected.Source
	}
	if s.BytesPerSample > 0 {
		cells["bytes_per_sample"] = strconv.Itoa(s.BytesPerSample)
	}
	if s.CPUSecondsPerGB != nil {
		cells["cpu_s_per_gb"] = number(*s.CPUSecondsPerGB)
	}
	if s.NUMANode != nil {
		cells["numa_node"] = strconv.Itoa(*s.NUMANode)
	}
	row := make([]string, len(csvColumns))
	for i, name := range csvColumns {
		row[i] = plain(cells[name])
	}
	return row
}
