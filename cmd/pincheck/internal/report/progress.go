package report

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/cheggaaa/pb/v3"
)

// At is how far a run is.
type At struct {
	What  string        // is done now
	Share float64       // that is done, 0 to 1
	Left  time.Duration // 0 is unknown
}

// Progress shows how far a run is: on a terminal in a bar, elsewhere in a line every few
// seconds, also while nothing changes. It ignores errors of writing, because a run must
// not fail for its progress. A nil Progress shows nothing.
type Progress struct {
	w     io.Writer
	began time.Time
	bar   *pb.ProgressBar // nil if w is not a terminal
	stop  chan struct{}
	wg    sync.WaitGroup

	mu    sync.Mutex
	at    At
	shown time.Duration // when Left was set, since began
}

const (
	lineEvery = 5 * time.Second
	steps     = 1000 // of the bar
)

// NewProgress returns a Progress that writes to w until it is closed: a bar that is drawn again and
// again on a terminal that can, else a line now and then.
func NewProgress(w io.Writer, getenv func(string) string) *Progress {
	p := &Progress{w: w, began: time.Now(), stop: make(chan struct{})}
	if IsTerminal(w) && getenv("TERM") != "dumb" {
		p.bar = newBar(w, Width(w)).Start()
		return p
	}
	p.wg.Go(func() {
		t := time.NewTicker(lineEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				p.line(time.Since(p.began))
			case <-p.stop:
				return
			}
		}
	})
	return p
}

// newBar returns a progress bar for a terminal. A narrow one shows the share without a bar.
func newBar(w io.Writer, width int) *pb.ProgressBar {
	bar := `{{string . "what"}} {{bar . "[" "█" "█" " " "]"}} {{percent . "%3.0f%%"}} {{etime . "%s"}}{{string . "left"}}`
	if width < 60 {
		bar = `{{string . "what"}} {{percent . "%3.0f%%"}} {{etime . "%s"}}{{string . "left"}}`
	}
	return pb.New(steps).SetTemplateString(bar).Set(pb.Terminal, true).Set(pb.CleanOnFinish, true).SetWidth(width - 1).SetWriter(w)
}

// Show says how far the run is now.
func (p *Progress) Show(at At) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at.Share = min(max(at.Share, 0), 1)
	p.at, p.shown = at, time.Since(p.began)
	if p.bar == nil {
		return
	}
	left := ""
	if at.Left > 0 {
		left = ", " + whole(at.Left) + " left"
	}
	columns := p.bar.Width() - 27 // for the share and the times
	if columns > 32 {
		columns /= 2 // for the bar
	}
	p.bar.Set("what", clip(plain(at.What), max(columns, 0))).Set("left", left).SetCurrent(int64(at.Share * steps))
}

// line writes one line.
func (p *Progress) line(spent time.Duration) {
	p.mu.Lock()
	at, shown := p.at, p.shown
	p.mu.Unlock()
	text := fmt.Sprintf("%3.0f%%, %s spent", 100*at.Share, whole(spent))
	if left := at.Left - (spent - shown); at.Left > 0 {
		text += fmt.Sprintf(", about %s left", whole(max(left, 0)))
	}
	if at.What != "" {
		text += ": " + plain(at.What)
	}
	fmt.Fprintln(p.w, text)
}

// whole formats a time in whole seconds: 1m15s.
func whole(d time.Duration) string { return d.Round(time.Second).String() }

// Close ends the display, and clears it on a terminal.
func (p *Progress) Close() {
	if p == nil {
		return
	}
	close(p.stop)
	p.wg.Wait()
	if p.bar != nil {
		p.bar.Finish()
	}
}
