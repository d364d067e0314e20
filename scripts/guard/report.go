package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// A report is a comparison as JSON.
type report struct {
	Schema  int         `json:"schema"`
	Date    time.Time   `json:"date"`
	Seconds float64     `json:"seconds"`
	Host    hostFacts   `json:"host"`
	Old     string      `json:"old"` // commits
	New     string      `json:"new"`
	Rows    []rowReport `json:"rows"`
	Worse   []string    `json:"worse"`
	Unclear []string    `json:"unclear,omitempty"`
	// Failed are rows that could not be measured, LeftOut those that cannot be on this host, and WithoutC
	// those whose program in C has no figure: each with the reason.
	Failed   map[string]string `json:"failed,omitempty"`
	LeftOut  map[string]string `json:"left_out,omitempty"`
	WithoutC map[string]string `json:"without_c,omitempty"`
}

type hostFacts struct {
	CPU     string   `json:"cpu"`
	Cores   int      `json:"cores"`
	Memory  string   `json:"memory"`
	Kernel  string   `json:"kernel"`
	GPUs    []string `json:"gpus"`
	Driver  string   `json:"driver"`
	CUDA    string   `json:"cuda"` // the newest version that the driver supports
	Library string   `json:"library"`
	Go      string   `json:"go"`
}

// A rowReport is a figure of a row.
type rowReport struct {
	Row      string   `json:"row"` // with its variant, and the figure's name behind a blank
	Unit     string   `json:"unit"`
	More     bool     `json:"more_is_better"`
	OldLacks bool     `json:"old_lacks_it,omitempty"` // so that it is compared with what is beside it alone
	Old      float64  `json:"old,omitempty"`          // medians
	New      float64  `json:"new"`
	Ratio    float64  `json:"new_to_old,omitempty"` // of the medians
	Slowdown slowdown `json:"slowdown,omitzero"`
	Verdict  verdict  `json:"verdict,omitempty"`
	Rounds   int      `json:"rounds"` // of processes
	Beside   []beside `json:"beside,omitempty"`
	// Samples of the old build and of the new one, in order: those of the same index are a pair.
	OldSamples []float64      `json:"old_samples,omitempty"`
	NewSamples []float64      `json:"new_samples"`
	Details    map[string]any `json:"details,omitempty"`
}

// A slowdown is how many times the cost of the old build the new one has, and the bounds between which that lies
// with a probability of 99 %. Above 1 the new build is worse, whatever the unit.
type slowdown struct {
	Estimate float64 `json:"estimate"`
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
}

// A beside is what C or CUDA alone reached in the same run.
type beside struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Ratio float64 `json:"new_to_this"`
}

// reportOf puts a comparison into figures.
func reportOf(c *comparisonResult, host hostFacts) *report {
	host.GPUs, host.CUDA, host.Library, host.Go = c.hellos[newBuild].GPUs, c.hellos[newBuild].Driver, c.hellos[newBuild].Library, c.hellos[newBuild].Go
	r := &report{Schema: 1, Date: c.began.UTC().Truncate(time.Second), Seconds: c.took.Round(time.Second).Seconds(), Host: host,
		Old: c.hellos[oldBuild].Commit, New: c.hellos[newBuild].Commit,
		Worse: []string{}, Failed: map[string]string{}, LeftOut: map[string]string{}, WithoutC: map[string]string{}}
	for i, err := range c.failures {
		r.Failed[fmt.Sprintf("processes %d", i+1)] = err.Error()
	}
	for _, m := range c.measurements {
		name := m.fullName()
		var failed replyError
		switch {
		case errors.As(m.err, &failed) && failed.leftOut:
			r.LeftOut[name] = failed.text
			continue
		case m.err != nil:
			r.Failed[name] = m.err.Error()
		}
		if m.withoutC != "" {
			r.WithoutC[name] = m.withoutC
		}
		for _, s := range m.figures {
			row := m.report(s)
			r.Rows = append(r.Rows, row)
			switch row.Verdict {
			case worse:
				r.Worse = append(r.Worse, row.Row)
			case unclear:
				r.Unclear = append(r.Unclear, row.Row)
			}
		}
	}
	return r
}

// report puts a figure of a row into a rowReport.
func (m *measurement) report(s *series) rowReport {
	r := rowReport{Row: strings.TrimSuffix(m.fullName()+" "+s.name, " "), Unit: s.unit, More: isRate(s.unit), OldLacks: m.onlyNew, Rounds: len(s.rounds),
		New: round(median(s.values[newBuild])), OldSamples: rounded(s.values[oldBuild]), NewSamples: rounded(s.values[newBuild])}
	if s == m.figures[0] {
		r.Details = m.details
	}
	if len(s.values[oldBuild]) > 0 {
		r.Old = round(median(s.values[oldBuild]))
		r.Ratio = round(r.New / r.Old)
		e, v := s.evaluate()
		if len(slices.Concat(s.ratios()...)) >= minPairs {
			r.Slowdown, r.Verdict = slowdown{round(e.median), round(e.low), round(e.high)}, v
		}
	}
	if c, ok := m.inC[s.name]; ok {
		r.Beside = append(r.Beside, beside{c.Name, round(c.Value), round(r.New / c.Value)})
	}
	for _, of := range m.references {
		for _, f := range of.figures {
			if f.name == s.name && len(f.values[newBuild]) > 0 {
				v := median(f.values[newBuild])
				r.Beside = append(r.Beside, beside{strings.TrimPrefix(of.Name, m.Name+"/"), round(v), round(r.New / v)})
			}
		}
	}
	return r
}

// round keeps five digits.
func round(v float64) float64 {
	short, err := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	if err != nil {
		return v
	}
	return short
}

func rounded(values []float64) []float64 {
	short := make([]float64, len(values))
	for i, v := range values {
		short[i] = round(v)
	}
	return short
}

// Exit codes of compare, besides 64 for wrong usage.
const (
	exitSame   = 0
	exitWorse  = 1
	exitFailed = 2
)

// exitCode is exitWorse if a row is worse, or else exitFailed if one could not be measured.
func (r *report) exitCode() int {
	switch {
	case len(r.Worse) > 0:
		return exitWorse
	case len(r.Failed) > 0:
		return exitFailed
	}
	return exitSame
}

// writeText prints a table, and what must not be overlooked.
func (r *report) writeText(w io.Writer) {
	fmt.Fprintf(w, "%s: %s with new, %s with old\n%s, %d cores, %s, Linux %s, driver %s, %s\n\n", strings.Join(r.Host.GPUs, ", "),
		r.New, r.Old, r.Host.CPU, r.Host.Cores, r.Host.Memory, r.Host.Kernel, r.Host.Driver, r.Host.Library)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tunit\told\tnew\tnew/old\tslowdown\t99 %\tverdict\tbeside\tnew/beside")
	for _, row := range r.Rows {
		interval, said := "", strings.ToUpper(string(row.Verdict))
		if row.Verdict == same {
			said = ""
		}
		if row.Slowdown.High > 0 {
			interval = fmt.Sprintf("%.3f to %.3f", row.Slowdown.Low, row.Slowdown.High)
		}
		if row.OldLacks {
			said = "not in old"
		}
		cells := []string{row.Row, row.Unit, number(row.Old), number(row.New), number(row.Ratio), number(row.Slowdown.Estimate), interval, said}
		if len(row.Beside) == 0 {
			cells = append(cells, "", "")
		}
		for i, b := range row.Beside {
			if i > 0 {
				cells = slices.Repeat([]string{""}, 8)
			}
			cells = append(cells, fmt.Sprintf("%s %s", number(b.Value), b.Name), number(b.Ratio))
			fmt.Fprintln(t, strings.Join(cells, "\t"))
		}
		if len(row.Beside) == 0 {
			fmt.Fprintln(t, strings.Join(cells, "\t"))
		}
	}
	_ = t.Flush()
	for _, list := range []struct {
		title string
		names map[string]string
	}{{"left out", r.LeftOut}, {"without C", r.WithoutC}, {"COULD NOT BE MEASURED", r.Failed}} {
		for _, name := range slices.Sorted(maps.Keys(list.names)) {
			fmt.Fprintf(w, "%s: %s: %s\n", list.title, name, list.names[name])
		}
	}
	if len(r.Unclear) > 0 {
		fmt.Fprintf(w, "not known to 10 %%, more time or samples would show it: %s\n", strings.Join(r.Unclear, ", "))
	}
	switch {
	case len(r.Worse) > 0:
		fmt.Fprintf(w, "WORSE by more than 10 %% and the spread: %s\n", strings.Join(r.Worse, ", "))
	default:
		fmt.Fprintf(w, "nothing is worse by more than 10 %% and the spread, of %d figures in %.0f s\n", len(r.Rows), r.Seconds)
	}
}

// number prints three digits at least, and nothing for 0.
func number(v float64) string {
	switch {
	case v == 0:
		return ""
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

var (
	cpuModel      = regexp.MustCompile(`(?m)^model name\s*:\s*(.*)$`)
	memoryTotal   = regexp.MustCompile(`(?m)^MemTotal:\s*(\d+) kB`)
	driverVersion = regexp.MustCompile(`(\d+\.\d+(?:\.\d+)?)  `)
)

// readHost reads what /proc has of the host; what is missing is "unknown".
func readHost() hostFacts {
	find := func(file string, in *regexp.Regexp) string {
		text, err := os.ReadFile(file)
		if err != nil {
			return "unknown"
		}
		if m := in.FindSubmatch(text); m != nil {
			return strings.TrimSpace(string(m[1]))
		}
		return "unknown"
	}
	h := hostFacts{CPU: find("/proc/cpuinfo", cpuModel), Cores: runtime.NumCPU(), Kernel: find("/proc/sys/kernel/osrelease", regexp.MustCompile(`(.*)`)),
		Driver: find("/proc/driver/nvidia/version", driverVersion), Memory: find("/proc/meminfo", memoryTotal)}
	if n, err := strconv.Atoi(h.Memory); err == nil {
		h.Memory = fmt.Sprintf("%d GiB", n>>20)
	}
	return h
}
