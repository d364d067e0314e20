package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/gopinned/pinned/verify"
)

// Progress shows how many round trips are done: on a terminal in one line that is
// overwritten, elsewhere in a line every few seconds.
type Progress struct {
	w        io.Writer
	terminal bool
	label    string
	now      func() time.Time
	last     time.Time
	width    int // of the line on the terminal
}

const (
	terminalEvery = 100 * time.Millisecond
	lineEvery     = 5 * time.Second
	terminalWidth = 79
)

// NewProgress returns a Progress that writes to w, with a label.
func NewProgress(w io.Writer, terminal bool, label string) *Progress {
	return &Progress{w: w, terminal: terminal, label: label, now: time.Now}
}

// Show is for verify.Plan.Progress. It ignores errors of writing, because a run must not
// fail for its progress.
func (p *Progress) Show(at verify.Progress) {
	every := lineEvery
	if p.terminal {
		every = terminalEvery
	}
	now := p.now()
	if at.CasesDone < at.CasesTotal && now.Sub(p.last) < every {
		return
	}
	p.last = now
	share := 1.0
	if at.BytesTotal > 0 {
		share = float64(at.BytesDone) / float64(at.BytesTotal)
	}
	line := plain(fmt.Sprintf("%s: %.0f %%, %s of %s round trips, %s of %s", p.label, 100*share,
		count(at.CasesDone), count(at.CasesTotal), decimal(at.BytesDone), decimal(at.BytesTotal)))
	if at.CasesDone > 0 && at.CasesDone < at.CasesTotal {
		line += "  " + plain(at.Case.String())
	}
	if !p.terminal {
		fmt.Fprintln(p.w, line)
		return
	}
	if runes := []rune(line); len(runes) > terminalWidth {
		line = string(runes[:terminalWidth]) // a line that wraps cannot be overwritten
	}
	pad := max(0, p.width-len([]rune(line)))
	p.width = len([]rune(line))
	fmt.Fprint(p.w, "\r"+line+strings.Repeat(" ", pad))
}

// Close clears the line on a terminal.
func (p *Progress) Close() {
	if p.terminal && p.width > 0 {
		fmt.Fprint(p.w, "\r"+strings.Repeat(" ", p.width)+"\r")
		p.width = 0
	}
}
