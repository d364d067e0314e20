package report

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// At is how far a run is.
type At struct {
	What  string        // is done now
	Share float64       // that is done, 0 to 1
	Left  time.Duration // 0 is unknown
}

// Progress shows how far a run is: on a terminal in a line that is drawn again and again, elsewhere in a line every
// few seconds, also while nothing changes. It ignores errors of writing, because a run must not fail for its progress.
// A nil Progress shows nothing.
type Progress struct {
	w     io.Writer
	began time.Time
	style *Style // of a terminal; nil elsewhere
	stop  chan struct{}
	wg    sync.WaitGroup

	shown atomic.Pointer[shown]
}

// shown is how far a run was at a time since its beginning.
type shown struct {
	At
	after time.Duration
}

const (
	drawEvery = 200 * time.Millisecond // on a terminal
	lineEvery = 5 * time.Second
)

// NewProgress returns a Progress that writes to w until it is closed: a bar that is drawn again and
// again on a terminal that can, else a line now and then.
func NewProgress(w io.Writer, getenv func(string) string) *Progress {
	p := &Progress{w: w, began: time.Now(), stop: make(chan struct{})}
	every, write := lineEvery, p.line
	if IsTerminal(w) && getenv("TERM") != "dumb" {
		style := StyleFor(w, getenv)
		p.style, every, write = &style, drawEvery, p.draw
	}
	p.wg.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				write(time.Since(p.began))
			case <-p.stop:
				return
			}
		}
	})
	return p
}

// Show says how far the run is now.
func (p *Progress) Show(at At) {
	if p == nil {
		return
	}
	at.Share = min(max(at.Share, 0), 1)
	p.shown.Store(&shown{at, time.Since(p.began)})
}

// now returns how far the run is after a time, with what is left of it then.
func (p *Progress) now(spent time.Duration) At {
	last := p.shown.Load()
	if last == nil {
		return At{}
	}
	at := last.At
	if at.Left > 0 {
		at.Left = max(at.Left-(spent-last.after), 1)
	}
	return at
}

// draw replaces the line of a terminal. Where that is wide enough, a bar is between what is done and the share.
func (p *Progress) draw(spent time.Duration) {
	at := p.now(spent)
	end := fmt.Sprintf(" %3.0f%% %s", 100*at.Share, whole(spent))
	if at.Left > 0 {
		end += ", " + whole(at.Left) + " left"
	}
	room := max(p.style.Width-1-len(end), 0)
	what, bar := clip(plain(at.What), room), ""
	if p.style.Width >= 60 {
		what = clip(what, room/2)
		n := max(room-len([]rune(what))-len(" []"), 0)
		bar = " [" + pad(strings.Repeat("█", int(at.Share*float64(n))), n) + "]"
	}
	_ = p.style.write(p.w, "\r"+pad(what+bar+end, p.style.Width-1))
}

// line writes one line.
func (p *Progress) line(spent time.Duration) {
	at := p.now(spent)
	text := fmt.Sprintf("%3.0f%%, %s spent", 100*at.Share, whole(spent))
	if at.Left > 0 {
		text += fmt.Sprintf(", about %s left", whole(at.Left))
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
	if p.style != nil {
		_, _ = io.WriteString(p.w, "\r"+strings.Repeat(" ", p.style.Width-1)+"\r")
	}
}
