package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func newExplain(sys system) *cobra.Command {
	cmd := newCommand("explain [ID]")
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if len(args) > 1 {
			return usagef("want one id, and got %q", args)
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		out := cmd.OutOrStdout()
		style := report.StyleFor(out, sys.getenv)
		if len(args) == 0 {
			return afterWriting(listFindings(out, style))
		}
		page, ok := findings.Get(args[0])
		if !ok {
			return unknownID(args[0])
		}
		return afterWriting(report.WriteMarkdown(out, page.Text, style))
	}
	cmd.ValidArgsFunction = cobra.FixedCompletions(checkIDs(), cobra.ShellCompDirectiveNoFileComp)
	return cmd
}

// listFindings writes all findings by group, with severity and title.
func listFindings(out io.Writer, style report.Style) error {
	width := 0
	for _, id := range findings.IDs() {
		width = max(width, len(id))
	}
	if _, err := fmt.Fprintf(out, "%d findings. P is a problem, W a warning, N a note.\nTo read about one, run: pincheck explain ID\n", len(findings.IDs())); err != nil {
		return err
	}
	for _, g := range findings.Groups() {
		if _, err := fmt.Fprintf(out, "\n%s\n", g.Name); err != nil {
			return err
		}
		var entries [][2]string
		for _, id := range g.IDs {
			page, _ := findings.Get(id)
			entries = append(entries, [2]string{fmt.Sprintf("  %s  %-*s", strings.ToUpper(page.Severity[:1]), width, id), page.Title})
		}
		if err := report.WriteList(out, entries, style); err != nil {
			return err
		}
	}
	return nil
}

// checkIDs returns the ids of all checks.
func checkIDs() (ids []string) {
	for _, c := range doctor.Checks() {
		ids = append(ids, c.ID)
	}
	return ids
}

// unknownID is the error for an id without a finding. It suggests ids that are nearly the same, contain the word,
// or begin alike.
func unknownID(id string) error {
	const alike = 6 // letters
	closest, word := nearest(id, checkIDs()), strings.ToLower(strings.TrimSpace(id))
	var near []string
	for _, known := range checkIDs() {
		if known == closest || closest == "" && (len(word) > 2 && strings.Contains(known, word) || len(word) >= alike && strings.HasPrefix(known, word[:alike])) {
			near = append(near, known)
		}
	}
	if len(near) == 0 {
		return usagef("no finding %q.\nFor a list, run: pincheck explain", id)
	}
	last := len(near) - 1
	if last > 0 {
		near = []string{strings.Join(near[:last], ", "), near[last]}
	}
	return usagef("no finding %q. Did you mean %s?", id, strings.Join(near, " or "))
}
