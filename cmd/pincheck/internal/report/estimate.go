package report

import (
	"bytes"
	"fmt"
	"io"
	"time"

	"github.com/gopinned/pinned/internal/units"
)

// Estimate is what an experiment will take, in bytes at its peak.
type Estimate struct {
	Name                           string
	Time                           time.Duration
	Pinned, Pageable, Device, Disk int
}

// WriteEstimates writes a line: the time of all experiments, and the most memory that any of them takes. It ignores
// errors of writing, as Progress does.
func WriteEstimates(w io.Writer, all []Estimate) {
	if len(all) == 0 {
		return
	}
	sum := Estimate{Name: plain(all[0].Name)}
	for _, e := range all {
		sum.Time += e.Time
		sum.Pinned, sum.Pageable = max(sum.Pinned, e.Pinned), max(sum.Pageable, e.Pageable)
		sum.Device, sum.Disk = max(sum.Device, e.Device), max(sum.Disk, e.Disk)
	}
	if len(all) > 1 {
		sum.Name = units.Things(len(all), "experiment", "experiments")
	}
	var parts []string
	for _, p := range []struct {
		n    int
		what string
	}{{sum.Pinned, "pinned"}, {sum.Pageable, "pageable"}, {sum.Device, "on each GPU"}, {sum.Disk, "on disk"}} {
		if p.n > 0 {
			parts = append(parts, units.Bytes(p.n)+" "+p.what)
		}
	}
	memory := ""
	if len(parts) > 0 {
		memory = ", at most " + joined(parts...)
	}
	fmt.Fprintf(w, "%s: about %s%s\n", sum.Name, units.Duration(sum.Time), memory)
}

// WriteList writes names with their descriptions beside them, or below where the line is
// narrow. The error is that of w.
func WriteList(w io.Writer, entries [][2]string, s Style) error {
	width := 0
	for _, e := range entries {
		width = max(width, len([]rune(e[0]))+2)
	}
	var b bytes.Buffer
	p := page{&b, s}
	for _, e := range entries {
		p.hang(pad(e[0], width), width, "", wrap(plain(e[1]), max(s.width()-width, 10)))
	}
	return s.write(w, b.String())
}
