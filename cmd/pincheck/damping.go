package main

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
)

// A damping is how often a condition has to be seen, or not, until its change is reported: in k of the last n
// looks.
//
// What comes and goes at every look is in at most half of them, rounded up. k has to be more, or it would be
// reported each time.
type damping struct{ k, n int }

// String and Set make it the value of a flag: 3/4.
func (d *damping) String() string { return fmt.Sprintf("%d/%d", d.k, d.n) }

func (d *damping) Type() string { return "K/N" }

// maxLooks is the largest n.
const maxLooks = 1000

func (d *damping) Set(text string) error {
	var k, n int
	var rest string
	if got, _ := fmt.Sscanf(text, "%d/%d%s", &k, &n, &rest); got != 2 || k < 1 || n < k || n > maxLooks {
		return fmt.Errorf("%q: want k/n, such as 3/4: seen in 3 of the last 4 looks (1/1 reports each change)", text)
	}
	if k <= (n+1)/2 && n > 1 {
		return fmt.Errorf("%q: what comes and goes at every look is in %d of %d: want at least %d/%d", text, (n+1)/2, n, (n+1)/2+1, n)
	}
	*d = damping{k, n}
	return nil
}

// conditions are what a host was seen to have at the last looks. Findings of one id about one GPU are one
// condition, whatever their severity and their figures.
type conditions struct {
	damping
	known map[subject]*condition
	order []subject // in which they were first seen
}

type subject struct {
	id     string
	device int // -1 for the host
}

type condition struct {
	looks    []doctor.Severity // the gravest severity at each of the last n looks, the newest last; empty for not seen
	latest   []doctor.Finding  // as it was last seen
	reported []doctor.Finding  // nil if it is not reported
}

// look takes what one look found, and returns what is to be reported. The first look stands for those before it.
func (c *conditions) look(found []doctor.Finding) (ended, appeared []doctor.Finding) {
	before := c.n - 1
	if c.known == nil {
		c.known = map[subject]*condition{}
		before = 0
	}
	now := map[subject][]doctor.Finding{}
	for _, one := range found {
		s := subject{one.ID, -1}
		if one.Device != nil {
			s.device = *one.Device
		}
		now[s] = append(now[s], one)
		if c.known[s] == nil {
			c.known[s] = &condition{looks: make([]doctor.Severity, before, c.n)}
			c.order = append(c.order, s)
		}
	}
	for _, s := range c.order {
		at := c.known[s]
		at.take(now[s], c.n)
		switch absent := count(at.looks, ""); {
		case at.reported == nil && c.n-absent >= c.k:
			at.reported = at.latest
			appeared = append(appeared, at.reported...)
		case at.reported != nil && absent >= c.k:
			ended = append(ended, at.reported...)
			at.reported = nil
		case at.reported != nil && len(now[s]) > 0 && gravest(now[s]) != gravest(at.reported) && count(at.looks, gravest(now[s])) >= c.k:
			ended, appeared = append(ended, at.reported...), append(appeared, now[s]...)
			at.reported = now[s]
		}
		if at.reported == nil && count(at.looks, "") == c.n {
			delete(c.known, s)
		}
	}
	c.order = slices.DeleteFunc(c.order, func(s subject) bool { return c.known[s] == nil })
	return ended, appeared
}

// take adds a look. A condition of the first look has no looks before it: they were alike.
func (c *condition) take(found []doctor.Finding, n int) {
	severity := doctor.Severity("")
	if len(found) > 0 {
		severity = gravest(found)
		c.latest = found
	}
	for len(c.looks) < n-1 {
		c.looks = append(c.looks, severity)
	}
	c.looks = append(c.looks, severity)
	c.looks = c.looks[len(c.looks)-n:]
}

// now returns what is reported, by severity and then as it was first seen.
func (c *conditions) now() (all []doctor.Finding) {
	for _, s := range c.order {
		all = append(all, c.known[s].reported...)
	}
	slices.SortStableFunc(all, bySeverity)
	return all
}

func bySeverity(a, b doctor.Finding) int {
	return slices.Index(doctor.Severities(), a.Severity) - slices.Index(doctor.Severities(), b.Severity)
}

func gravest(found []doctor.Finding) doctor.Severity {
	return slices.MinFunc(found, bySeverity).Severity
}

func count(looks []doctor.Severity, one doctor.Severity) (n int) {
	for _, s := range looks {
		if s == one {
			n++
		}
	}
	return n
}
