package kernellog

import "strings"

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
