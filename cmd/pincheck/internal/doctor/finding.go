package doctor

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
)

// Severity is what a finding means for the reader.
type Severity string

// The severities, the gravest first.
const (
	// Problem is something broken, wrong or refused, or clearly below what this hardware
	// reaches: it should be fixed before the machine is relied on.
	Problem Severity = "problem"
	// Warning is something that works, and costs time or memory, or will fail under
	// conditions that are named.
	Warning Severity = "warning"
	// Note is worth knowing. Nothing has to be done.
	Note Severity = "note"
)

// Severities returns all severities, the gravest first.
func Severities() []Severity { return []Severity{Problem, Warning, Note} }

// AtLeast reports whether s is as grave as other, or graver.
func (s Severity) AtLeast(other Severity) bool { return s.weight() <= other.weight() }

func (s Severity) weight() int {
	if i := slices.Index(Severities(), s); i >= 0 {
		return i
	}
	return len(Severities())
}

// Certainty is how sure a cause is.
type Certainty string

// The certainties, the surest first.
const (
	Certain  Certainty = "certain"
	Likely   Certainty = "likely"
	Possible Certainty = "possible"
)

// rank returns 0 for the surest.
func (c Certainty) rank() int { return slices.Index([]Certainty{Certain, Likely, Possible}, c) }

// weaker returns the next lower certainty.
func (c Certainty) weaker() Certainty {
	if c == Certain {
		return Likely
	}
	return Possible
}

// Finding is the result of a check. A check returns summary and evidence, and names one of the
// causes on the finding's page. Evaluate adds the texts of the page.
type Finding struct {
	// ID is the check's. cmd/pincheck/internal/findings has a page of this name.
	ID       string   `json:"id"`
	Severity Severity `json:"severity"`
	Device   *int     `json:"device,omitempty"` // absent if it is about the host
	Summary  string   `json:"summary"`          // what is wrong; the page has it where it is the same each time
	// Evidence is what was read or measured: files with their values, rates, calls.
	Evidence []string `json:"evidence,omitempty"`
	Cause    string   `json:"cause,omitempty"` // why, as far as is known
	Cost     string   `json:"cost,omitempty"`  // what it costs the user
	Remedy   string   `json:"remedy,omitempty"`
	// Certainty is how sure the cause is, Against what speaks against it, Alternatives are other findings
	// that would explain the same as well, and Settle is what would tell.
	Certainty    Certainty `json:"certainty"`
	Against      []string  `json:"against,omitempty"`
	Alternatives []string  `json:"alternatives,omitempty"`
	Settle       string    `json:"settle,omitempty"`
	// Suppressed are the ids of findings that follow from this one and are left out.
	Suppressed []string `json:"followers,omitempty"`

	because string          // name of the cause, if the page has several
	means   meaning         // of an error's code: cause and remedy instead of the page's, where it is known
	values  findings.Values // for the words in italics of the cause
}

// Because returns the cause in words, with how sure it is and what speaks against it.
func (f *Finding) Because() string {
	why := f.Cause
	switch {
	case why == "":
	case f.Certainty == Likely:
		why = "Likely: " + why
	case f.Certainty == Possible:
		why = "Possible: " + why
	}
	if len(f.Against) > 0 {
		why = strings.TrimSpace(why + " But " + strings.Join(f.Against, ", and ") + ".")
	}
	return why
}

// near adds the GPU's NUMA node to the values, which remedies of many pages name. It is a letter if it is unknown.
func (f *Finding) near(d *Device) {
	values := findings.Values{"NODE": "N"}
	if d != nil && d.NUMANode != nil {
		values["NODE"] = strconv.Itoa(*d.NUMANode)
	}
	maps.Copy(values, f.values)
	f.values = values
}

// describe adds what the page has of a finding, with the words of the places where the process runs.
func (f *Finding) describe(places ...string) {
	c := causeOf(f.ID, f.because)
	if f.means != (meaning{}) {
		known := causeOf(f.means.page, f.means.cause)
		c.Why, c.Do, c.LastResort, c.Confidence, c.Confirm = known.Why, known.Do, known.LastResort, known.Confidence, known.Confirm
	}
	c = c.With(f.values, places...)
	f.Certainty = cmp.Or(f.Certainty, Certainty(c.Confidence), Certain)
	if len(f.Against) > 0 {
		f.Certainty = f.Certainty.weaker()
	}
	f.Summary = cmp.Or(f.Summary, c.Found)
	f.Cause, f.Cost, f.Remedy, f.Settle = c.Why, c.Cost, cmp.Or(f.Remedy, c.Do), c.Confirm
	if c.LastResort != "" && f.Certainty == Certain {
		f.Remedy = strings.TrimSuffix(f.Remedy, ".") + ". " + c.LastResort
	}
	f.because, f.means, f.values = "", meaning{}, nil
}

// word returns a name that a host shows as one word of a command that a remedy says: what a shell takes for more
// is a question mark.
func word(name string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r == 0x7f || strings.ContainsRune("|&;<>()$`\\\"'*[]{}!#~", r) {
			return '?'
		}
		return r
	}, name)
}

// causeOf returns a cause of a page. There is none for a name that no page has, which tests find.
func causeOf(page, name string) findings.Cause {
	p, ok := findings.Get(page)
	if !ok {
		return findings.Cause{}
	}
	c, _ := p.Cause(name)
	return c
}

// Verdict is the conclusion of a run.
type Verdict string

// The verdicts.
const (
	Healthy    Verdict = "healthy"    // bytes and speed of every GPU were compared, and nothing is wrong
	Measured   Verdict = "measured"   // nothing failed, and not all speeds could be compared
	Unknown    Verdict = "unknown"    // nothing was found, and of a GPU nothing was measured
	Warnings   Verdict = "warnings"   // there are warnings, and no problems
	Problems   Verdict = "problems"   // there are problems
	Unusable   Verdict = "unusable"   // no GPU can be used
	Incomplete Verdict = "incomplete" // stopped before its end
	Failed     Verdict = "failed"     // the command did not run, such as for wrong usage
)

// Verdicts returns all verdicts.
func Verdicts() []Verdict {
	return []Verdict{Healthy, Measured, Unknown, Warnings, Problems, Unusable, Incomplete, Failed}
}
