package report

import (
	"fmt"
	"strings"
	"time"
)

// At is how far a run is.
type At struct {
	What  string        // is done now
	Share float64       // that is done, 0 to 1
	Left  time.Duration // 0 is unknown
}

// Line returns how far the run is after a time, as a line of text.
func (at At) Line(spent time.Duration) string {
	text := fmt.Sprintf("%3.0f%%, %s spent", 100*at.Share, whole(spent))
	if at.Left > 0 {
		text += fmt.Sprintf(", about %s left", whole(at.Left))
	}
	if at.What != "" {
		text += ": " + plain(at.What)
	}
	return text + "\n"
}

// Bar returns a line as wide as a terminal, and the return to its start. Where that is wide enough, a bar is between
// what is done and the share.
func (at At) Bar(spent time.Duration, s Style) string {
	end := fmt.Sprintf(" %3.0f%% %s", 100*at.Share, whole(spent))
	if at.Left > 0 {
		end += ", " + whole(at.Left) + " left"
	}
	room := max(s.Width-1-len(end), 0)
	what, bar := clip(plain(at.What), room), ""
	if s.Width >= 60 {
		what = clip(what, room/2)
		n := max(room-len([]rune(what))-len(" []"), 0)
		bar = " [" + pad(strings.Repeat("█", int(at.Share*float64(n))), n) + "]"
	}
	return "\r" + s.characters(pad(what+bar+end, s.Width-1))
}

// whole formats a time in whole seconds: 1m15s.
func whole(d time.Duration) string { return d.Round(time.Second).String() }
