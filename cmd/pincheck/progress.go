package main

import (
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// progress shows how far a run is: on a terminal in a line that is drawn again and again, elsewhere in a line every
// few seconds, also while nothing changes. It ignores errors of writing, because a run must not fail for its progress.
// A nil progress shows nothing.
type progress struct {
	w     io.Writer
	began time.Time
	style *report.Style // of a terminal; nil elsewhere
	stop  chan struct{}
	wg    sync.WaitGroup

	shown atomic.Pointer[shown]
}

// shown is how far a run was at a time since its beginning.
type shown struct {
	report.At
	after time.Duration
}

const (
	drawEvery = 200 * time.Millisecond // on a terminal
	lineEvery = 5 * time.Second
)

// newProgress returns a progress that writes to w until it is closed.
func newProgress(w io.Writer, getenv func(string) string) *progress {
	p := &progress{w: w, began: time.Now(), stop: make(chan struct{})}
	every := lineEvery
	if report.IsTerminal(w) && getenv("TERM") != "dumb" {
		style := report.StyleFor(w, getenv)
		p.style, every = &style, drawEvery
	}
	p.wg.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				p.write(time.Since(p.began))
			case <-p.stop:
				return
			}
		}
	})
	return p
}

// show sets how far the run is now.
func (p *progress) show(at report.At) {
	at.Share = min(max(at.Share, 0), 1)
	p.shown.Store(&shown{at, time.Since(p.began)})
}

// write shows how far the run is after a time, with what is left of it then.
func (p *progress) write(spent time.Duration) {
	at := report.At{}
	if last := p.shown.Load(); last != nil {
		at = last.At
		if at.Left > 0 {
			at.Left = max(at.Left-(spent-last.after), 1)
		}
	}
	text := at.Line(spent)
	if p.style != nil {
		text = at.Bar(spent, *p.style)
	}
	_, _ = io.WriteString(p.w, text)
}

// close ends the display, and clears it on a terminal.
func (p *progress) close() {
	if p == nil {
		return
	}
	close(p.stop)
	p.wg.Wait()
	if p.style != nil {
		_, _ = io.WriteString(p.w, "\r"+strings.Repeat(" ", p.style.Width-1)+"\r")
	}
}
