package report

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
)

// maxTicketEvidence is the number of lines of evidence in a ticket.
const maxTicketEvidence = 3

// writeTicket writes a result for a ticket: verdict, cause, three lines of evidence and fix of the gravest finding,
// each on one line, and the ids of the others. It has neither colors nor tables.
func writeTicket(b *bytes.Buffer, r *Result) {
	line := func(label, text string) {
		if text = strings.TrimSpace(plain(text)); text != "" {
			if label != "-" {
				label += ":"
			}
			fmt.Fprintf(b, "%s %s\n", label, text)
		}
	}
	label, text, _ := verdictText(r)
	if r.Facts != nil && r.Simulated {
		label = "Simulated GPU: " + label
	}
	line("Verdict", joinedWith(": ", label, text))
	for _, e := range r.Errors {
		line("Error", e)
	}
	all := grouped(r.Findings)
	if len(all) > 0 {
		writeTicketFinding(line, b, all[0][0])
	}
	var others []string
	for _, g := range all[min(1, len(all)):] {
		others = append(others, fmt.Sprintf("%s (%s)", g[0].ID, g[0].Severity))
	}
	line("Also", joined(others...))
	if r.Facts != nil {
		line("Machine", joined(hostLine(r)...))
		line("Read from", joined(r.Sources...))
	}
	line("Checked by", joinedWith(", ", r.Tool.Name+" "+r.Tool.Version, r.Started.UTC().Format("2006-01-02 15:04 UTC")))
}

func writeTicketFinding(line func(label, text string), b *bytes.Buffer, f doctor.Finding) {
	line("Finding", f.ID)
	line("Cause", f.Because())
	if len(f.Evidence) > 0 {
		b.WriteString("Evidence:\n")
	}
	for _, e := range f.Evidence[:min(len(f.Evidence), maxTicketEvidence)] {
		line("-", e)
	}
	line("Fix", f.Remedy)
	line("To confirm", f.Settle)
}
