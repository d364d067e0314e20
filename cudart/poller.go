package cudart

import (
	"runtime"
	"sync/atomic"
	"time"
)

// A poller queries for all waits of a runtime, on a thread of its own. It starts with
// the first wait, and ends when there have been none for a while, so that a Runtime
// without waits occupies nothing.
type poller struct {
	waits *waits
	bell  *bell
	watch *time.Timer
	round atomic.Int64 // odd while it queries
}

const (
	idleFor  = time.Second // without waits, before a poller ends
	maxStuck = 8           // pollers that may be inside the library at once
)

// startPoller needs w.mu.
func (w *waits) startPoller() {
	p := &poller{waits: w, bell: newBell()}
	p.watch = time.AfterFunc(time.Hour, p.replace)
	p.watch.Stop()
	w.poller = p
	go p.run()
}

// replace starts another poller if this one has been inside the library for too long.
// The other one leaves out the stream or event with which this one is stuck. This one
// ends when its call returns.
func (p *poller) replace() {
	w := p.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.poller != p || w.closed || p.round.Load()%2 == 0 || w.stuck == maxStuck {
		return
	}
	w.stuck++
	w.startPoller()
}

// An inquiry is about the first wait of a queue.
type inquiry struct {
	queue *waitQueue
	n     uint64
	since time.Time
}

// run keeps its thread, which ends with it, because the precision of sleeps belongs to
// the thread.
func (p *poller) run() {
	runtime.LockOSThread()
	p.bell.precise()
	defer p.bell.close()
	var list []inquiry
	for {
		var more bool
		if list, more = p.list(list[:0]); !more {
			return
		}
		if len(list) == 0 {
			if !p.bell.wait(idleFor) && p.endIdle() {
				return
			}
			continue
		}
		begin := time.Now()
		p.round.Add(1)
		p.watch.Reset(stuckAfter)
		ended, youngest := p.askAll(list, begin)
		p.watch.Stop()
		p.round.Add(1)
		clear(list) // keeps no stream from being collected
		if ended {
			continue // more may be done by now
		}
		sleep := max(min(max(youngest/16, minSleep), maxSleep), time.Since(begin))
		p.bell.wait(sleep)
	}
}

// list appends the queues to query for. It returns false if this poller must end.
func (p *poller) list(list []inquiry) ([]inquiry, bool) {
	w := p.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.poller != p:
		w.stuck--
		if w.poller != nil {
			w.poller.bell.ring() // for the queue that it left out
		}
		return nil, false
	case w.closed:
		w.poller = nil
		return nil, false
	}
	rest := w.queues[:0]
	for _, q := range w.queues {
		if q.listed = q.first != nil; !q.listed {
			continue
		}
		rest = append(rest, q)
		if !q.asking {
			list = append(list, inquiry{q, q.first.n, q.first.since})
		}
	}
	clear(w.queues[len(rest):])
	w.queues = rest
	return list, true
}

// endIdle ends the poller if there are no waits.
func (p *poller) endIdle() bool {
	w := p.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.poller == p && len(w.queues) == 0 {
		w.poller = nil
		return true
	}
	return false
}

// askAll queries for each queue. It returns whether waits have ended, and the age of the
// youngest wait that has not.
func (p *poller) askAll(list []inquiry, now time.Time) (ended bool, youngest time.Duration) {
	youngest = maxSleep * 16
	for _, i := range list {
		if p.ask(i) {
			ended = true
		} else {
			youngest = min(youngest, now.Sub(i.since))
		}
	}
	return ended, youngest
}

func (p *poller) ask(i inquiry) (ended bool) {
	w, q := p.waits, i.queue
	if q.line != nil {
		if !q.line.reached(i.n) {
			return false
		}
		w.end(q, q.line.done.Load(), nil)
		return true
	}
	w.setAsking(q, true)
	done, err := q.event.Query()
	w.setAsking(q, false)
	if !done && err == nil {
		return false
	}
	w.end(q, 0, err)
	return true
}

func (w *waits) setAsking(q *waitQueue, asking bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	q.asking = asking
}
