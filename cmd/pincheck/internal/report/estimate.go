package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/gopinned/pinned/internal/units"
)

// Estimate is what an experiment will take, in bytes at its peak.
type Estimate struct {
	Name                           string
	Time                           time.Duration
	Pinned, Pageable, Device, Disk int
}

// WriteEstimates writes a line an experiment. It ignores errors of writing, as Progress
// does.
func WriteEstimates(w io.Writer, all []Estimate) {
	for _, e := range all {
		var parts []string
		for _, p := range []struct {
			n    int
			what string
		}{{e.Pinned, "pinned"}, {e.Pageable, "pageable"}, {e.Device, "on each GPU"}, {e.Disk, "on disk"}} {
			if p.n > 0 {
				parts = append(parts, units.Bytes(p.n)+" "+p.what)
			}
		}
		if len(parts) == 0 {
			parts = []string{"no memory to speak of"}
		}
		fmt.Fprintf(w, "%s: about %s, at most %s\n", plain(e.Name), units.Duration(e.Time), strings.Join(parts, ", "))
	}
}

// WriteList writes names with their descriptions beside them, or below where the line is
// narrow. The error is that of w.
func WriteList(w io.Writer, entries [][2]string, s Style) error {
	width := 0
	for _, e := range entries {
		width = max(width, len([]rune(e[0]))+2)
	}
	var b strings.Builder
	for _, e := range entries {
		head := pad(e[0], width)
		for _, line := range wrap(plain(e[1]), max(s.width()-width, 10)) {
			b.WriteString(strings.TrimRight(head+line, " ") + "\n")
			head = strings.Repeat(" ", width)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
