package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A table has the rows of one build beside what they are to reach.
type table struct {
	Schema  int        `json:"schema"`
	Date    time.Time  `json:"date"`
	Seconds float64    `json:"seconds"`
	Host    hostFacts  `json:"host"`
	Build   string     `json:"build"` // commit
	Rows    []tableRow `json:"rows"`
}

// A tableRow is a figure of a row, with its goal if it has one.
type tableRow struct {
	Row       string    `json:"row"` // and the figure's name behind a blank
	Unit      string    `json:"unit,omitempty"`
	Measured  float64   `json:"measured"` // the median
	Samples   []float64 `json:"samples,omitempty"`
	Reference string    `json:"reference,omitempty"` // a line of C, or a row
	Value     float64   `json:"reference_value,omitempty"`
	Ratio     float64   `json:"ratio,omitempty"` // of Measured to Value
	Target    string    `json:"target,omitempty"`
	Met       *bool     `json:"met,omitempty"` // nil if that is not known
	// Note is why there is no figure, or no reference.
	Note string `json:"note,omitempty"`
	// Failed is set if a row could not be measured, though the host has all that it needs.
	Failed bool `json:"failed,omitempty"`
}

// tableSamples is the number of samples of each row.
const tableSamples = 5

func tableCommand(ctx context.Context, flags *flag.FlagSet, sim func() int, dir *string, sampleTime *time.Duration, args []string) (code int, err error) {
	cDir := flags.String("c", "", "a folder with programs of testdata/baseline")
	rows := flags.String("rows", "^gpus/", "only rows whose names match this regular expression, and those that these are compared with")
	budget := flags.Duration("time", 5*time.Minute, "the time after which no row begins")
	out := flags.String("out", "", "a file for the result as JSON")
	if err := flags.Parse(args); err != nil {
		return exitUsage, nil
	}
	only, err := regexp.Compile(*rows)
	switch {
	case err != nil:
		return exitUsage, fmt.Errorf("-rows: %w", err)
	case flags.NArg() > 0 || *budget <= 0:
		flags.Usage()
		return exitUsage, nil
	}
	self, err := os.Executable()
	if err != nil {
		return exitFailed, err
	}
	if *dir, err = os.MkdirTemp(*dir, "pinned-guard-"); err != nil {
		return exitFailed, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(*dir), os.RemoveAll(shmFolder(*dir))) }()
	c := &comparison{
		start: func(ctx context.Context, _ build, v variant) (side, error) {
			s, err := startChild(ctx, self, v.cpus, childArgs(sim(), *dir, *sampleTime)...)
			if err != nil {
				return nil, err
			}
			return s, nil
		},
		c:   (&baseline{dir: *cDir, files: *dir, outputs: map[string][]line{}, errs: map[string]error{}}).lines,
		now: time.Now, log: os.Stderr, rows: only, pairs: tableSamples, budget: *budget,
	}
	result, err := c.runAlone(ctx)
	if err != nil {
		return exitFailed, err
	}
	t := tableOf(result, readHost())
	t.writeText(os.Stdout)
	if *out != "" {
		err = writeJSON(*out, t)
	}
	if err != nil || slices.ContainsFunc(t.Rows, func(r tableRow) bool { return r.Failed }) {
		return exitFailed, err
	}
	return exitSame, nil
}

// runAlone measures rows of the new build alone, those of most GPUs first.
func (c *comparison) runAlone(ctx context.Context) (*comparisonResult, error) {
	result := &comparisonResult{began: c.now()}
	p := &pair{start: c.start}
	s, err := c.start(ctx, newBuild, p.variant)
	if err != nil {
		return nil, err
	}
	p.sides[newBuild] = s
	result.hellos[newBuild] = s.hello()
	list := c.planAlone(s.hello())
	if len(list) == 0 {
		return nil, errors.Join(errors.New("no row matches"), p.close())
	}
	for _, m := range list {
		switch {
		case m.GPUs > len(s.hello().GPUs):
			m.err = replyError{text: fmt.Sprintf("needs %d GPUs", m.GPUs), leftOut: true}
		case ctx.Err() != nil:
			m.err = context.Cause(ctx)
		case c.now().Sub(result.began) >= c.budget:
			m.err = fmt.Errorf("not begun within %v", c.budget)
		default:
			samples := c.pairs
			if m.Once {
				samples = 1 // each is a process, and its figure a count
			}
			c.measure(ctx, p, m, samples, 0)
		}
	}
	result.add(list, p.close())
	result.took = c.now().Sub(result.began)
	return result, nil
}

// planAlone returns the rows that match, and those that their goals name.
func (c *comparison) planAlone(h *hello) (list []*measurement) {
	wanted := map[string]bool{}
	for _, r := range h.Rows {
		if r.Of == "" && c.rows.MatchString(r.Name) {
			wanted[r.Name] = true
			for _, g := range r.Goals {
				if r.GPUs <= len(h.GPUs) {
					wanted[cmp.Or(g.Row, r.Name)] = true
				}
			}
		}
	}
	for _, r := range h.Rows {
		if wanted[r.Name] {
			list = append(list, &measurement{rowInfo: r, onlyNew: true})
		}
	}
	slices.SortStableFunc(list, func(a, b *measurement) int {
		rank := func(r rowInfo) int {
			if r.Once { // in a moment
				return math.MinInt
			}
			return -r.GPUs
		}
		return cmp.Compare(rank(a.rowInfo), rank(b.rowInfo))
	})
	return list
}

// tableOf puts the figures of one build beside their goals.
func tableOf(c *comparisonResult, host hostFacts) *table {
	h := c.hellos[newBuild]
	host.GPUs, host.CUDA, host.Library, host.Go = h.GPUs, h.Driver, h.Library, h.Go
	t := &table{Schema: 1, Date: c.began.UTC().Truncate(time.Second), Seconds: c.took.Round(time.Second).Seconds(), Host: host, Build: h.Commit}
	byName := map[string]*measurement{}
	for _, m := range c.measurements {
		byName[m.Name] = m
	}
	for _, m := range c.measurements {
		if m.err != nil {
			var failed replyError
			t.Rows = append(t.Rows, tableRow{Row: m.Name, Note: m.err.Error(), Failed: !errors.As(m.err, &failed) || !failed.leftOut})
			continue
		}
		for _, s := range m.figures {
			t.Rows = append(t.Rows, m.tableRow(s, byName))
		}
	}
	for _, err := range c.failures {
		t.Rows = append(t.Rows, tableRow{Row: "end of the process", Note: err.Error(), Failed: true})
	}
	return t
}

func (m *measurement) tableRow(s *series, byName map[string]*measurement) tableRow {
	r := tableRow{Row: strings.TrimSuffix(m.Name+" "+s.name, " "), Unit: s.unit, Measured: round(median(s.values[newBuild])), Samples: rounded(s.values[newBuild])}
	if c, ok := m.inC[s.name]; ok {
		r.Reference, r.Value = c.Name, round(c.Value)
	}
	i := slices.IndexFunc(m.Goals, func(g goal) bool { return g.Figure == s.name })
	if i < 0 {
		return r.compared()
	}
	g := m.Goals[i]
	if g.Row != "" {
		r.Reference, r.Value = g.Row, 0
		if of := byName[g.Row]; of != nil && of.err == nil {
			for _, f := range of.figures {
				if f.name == s.name {
					r.Value = round(median(f.values[newBuild]))
				}
			}
		}
	}
	r = r.compared()
	known, met := r.Value > 0, r.Ratio <= g.Ratio
	switch {
	case g.Ratio == 0:
		r.Target, known, met = "0", true, r.Measured == 0
	case isRate(s.unit):
		r.Target, met = fmt.Sprintf(">= %gx", g.Ratio), r.Ratio >= g.Ratio
	default:
		r.Target = fmt.Sprintf("<= %gx", g.Ratio)
	}
	if known {
		r.Met = &met
	} else {
		r.Note = cmp.Or(m.withoutC, "no figure of "+g.Row)
	}
	return r
}

// compared adds the ratio.
func (r tableRow) compared() tableRow {
	if r.Value > 0 {
		r.Ratio = round(r.Measured / r.Value)
	}
	return r
}

// tableFormat has the columns of a table, as scripts/gpu-test.sh has them too.
const tableFormat = "%-41s %11s  %-10s %-50s %6s  %-9s %s\n"

func (t *table) writeText(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n%s, %d cores, %s, Linux %s, driver %s, %s\n\n", strings.Join(t.Host.GPUs, ", "), t.Build,
		t.Host.CPU, t.Host.Cores, t.Host.Memory, t.Host.Kernel, t.Host.Driver, t.Host.Library)
	fmt.Fprintf(w, tableFormat, "row", "measured", "CPU s/GB", "C or reference", "ratio", "target", "met")
	for i, r := range t.Rows {
		if r.Unit == cpuUnit { // beside its row
			continue
		}
		cpu := ""
		if i+1 < len(t.Rows) && t.Rows[i+1].Unit == cpuUnit {
			if cpu = number(t.Rows[i+1].Measured); t.Rows[i+1].Value > 0 {
				cpu += "/" + number(t.Rows[i+1].Value)
			}
		}
		measured, reference, met := "", "", ""
		switch {
		case r.Failed:
			met = "FAILED: " + r.Note
		case r.Unit == "":
			met = "left out: " + r.Note
		default:
			measured = strings.TrimSpace(cmp.Or(number(r.Measured), "0") + " " + r.Unit)
		}
		if r.Value > 0 {
			reference = number(r.Value) + " " + r.Reference
		}
		switch {
		case r.Met != nil && *r.Met:
			met = "yes"
		case r.Met != nil:
			met = "NO"
		case r.Target != "":
			met = "? " + r.Note
		}
		fmt.Fprintf(w, tableFormat, r.Row, measured, cpu, reference, number(r.Ratio), r.Target, met)
	}
}
