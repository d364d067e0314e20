package kernellog

import (
	"regexp"
	"strconv"
	"strings"
)

// A line is a message without its prefix. Seconds are since boot, -1 if unknown; when is the time as the log has it.
type line struct {
	text    string
	seconds float64
	when    string
}

const (
	maxLine   = 4 << 10 // bytes of a line that are parsed; the kernel's own are shorter
	maxPrefix = 200     // bytes of what journalctl writes in front of a message
	maxStamp  = 40      // bytes of a time
)

var (
	// 6,1234,5678901,-;text of /dev/kmsg: priority and facility, number, microseconds.
	kmsgPrefix = regexp.MustCompile(`^(\d{1,6}),\d+,(\d+),[^;]*;`)
	// <6> of the system call, and kern  :info  : of dmesg -x
	levelPrefix = regexp.MustCompile(`^(?:<\d+>|[a-z0-9]+ *:[a-z]+ *: )`)
	// [  12.345678] and [  12,345678], with the thread: [  12.345678][ T1234]
	secondsPrefix = regexp.MustCompile(`^\[ *(\d{1,10}[.,]\d+)\] ?(?:\[ *[A-Z]\d+\] ?)?`)
	// [Sun Feb 23 16:24:18 2025] of dmesg -T, with the names of any language
	datePrefix = regexp.MustCompile(`^\[([^\[\]]{4,40})\] ?`)
	// 2025-02-23T16:24:18,123456+00:00 of dmesg --time-format=iso
	isoPrefix = regexp.MustCompile(`^(\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:[+-]\d\d:?\d\d|Z)?) `)
)

// kernelTag ends the prefix of journalctl and syslog: Feb 23 16:24:18 name kernel: text.
const kernelTag = " kernel: "

// cut separates a message from its prefix. isLog is false for text that is no line of a kernel's log.
func cut(s string) (l line, isLog bool) {
	s = strings.TrimRight(s[:min(len(s), maxLine)], "\r\n")
	l = line{text: s, seconds: -1}
	if m := kmsgPrefix.FindStringSubmatch(s); m != nil {
		if priority, err := strconv.Atoi(m[1]); err != nil || priority >= 8 {
			return line{}, false // a program wrote it
		}
		if us, err := strconv.ParseInt(m[2], 10, 64); err == nil {
			l.seconds = float64(us) / 1e6
		}
		l.text = s[len(m[0]):]
		return l, true
	}
	if at := strings.Index(s[:min(len(s), maxPrefix)], kernelTag); at > 0 && s[0] != '[' {
		l.text, isLog = s[at+len(kernelTag):], true
		if fields := strings.Fields(s[:at]); len(fields) > 1 { // without the name of the host
			l.when = strings.Join(fields[:len(fields)-1], " ")
		}
	}
	if m := levelPrefix.FindString(l.text); m != "" {
		l.text = l.text[len(m):]
	}
	return l.cutTime(isLog)
}

// cutTime removes the times of dmesg.
func (l line) cutTime(isLog bool) (line, bool) {
	if m := secondsPrefix.FindStringSubmatch(l.text); m != nil {
		if s, err := strconv.ParseFloat(strings.Replace(m[1], ",", ".", 1), 64); err == nil {
			l.seconds = s
		}
		l.text, isLog = l.text[len(m[0]):], true
	} else if m := datePrefix.FindStringSubmatch(l.text); m != nil && !isLog {
		l.when, l.text, isLog = m[1], l.text[len(m[0]):], true
	} else if m := isoPrefix.FindStringSubmatch(l.text); m != nil && !isLog {
		l.when, l.text, isLog = m[1], l.text[len(m[0]):], true
	}
	if len(l.when) > maxStamp {
		l.when = l.when[:maxStamp]
	}
	return l, isLog
}

// newBoot reports whether a line is what journalctl writes between boots.
func newBoot(s string) bool {
	return strings.HasPrefix(s, "-- Boot ") || strings.HasPrefix(s, "-- Reboot --")
}

// maxKept is the size of each of the two parts of a log that are kept: the first lines that matter, which have the
// cause, and the last ones, which have the state.
const maxKept = 48 << 10

// A reducer keeps the lines of a log that matter, as they are. The zero value is ready.
type reducer struct {
	first strings.Builder
	last  []string // in a ring
	next  int
	size  int
}

// Reduce returns the lines of a log that matter, without the middle of a long log.
func Reduce(text string) string {
	var r reducer
	for s := range strings.Lines(text) {
		r.line(s)
	}
	return r.text()
}

func (r *reducer) line(s string) {
	if !Matters(s) {
		return
	}
	s = strings.TrimRight(s[:min(len(s), maxLine)], "\r\n") + "\n"
	if r.next == 0 && len(r.last) == 0 && r.first.Len()+len(s) <= maxKept {
		r.first.WriteString(s)
		return
	}
	r.last = append(r.last, s)
	r.size += len(s)
	for r.size > maxKept {
		r.size -= len(r.last[r.next])
		r.last[r.next] = ""
		r.next++
	}
	if r.next > 1024 {
		r.last, r.next = append([]string(nil), r.last[r.next:]...), 0
	}
}

func (r *reducer) text() string { return r.first.String() + strings.Join(r.last[r.next:], "") }
