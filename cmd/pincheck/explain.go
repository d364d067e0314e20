package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func newExplain(o *options, sys system) *cobra.Command {
	return &cobra.Command{
		Use:   "explain [ID]",
		Short: "Say what a finding means, and what to do",
		Long: `explain prints the page of a finding: what it means, what was looked at, each
cause with what it costs and what to do, and what others met. Without an id it
lists all. Words in <angle brackets> stand for what pincheck finds on a host.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("explain takes one id, and got %q", args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := o.validate()
			if err != nil {
				return err
			}
			if format != report.Text || o.output != "" {
				return usagef("explain writes text to standard output")
			}
			out := cmd.OutOrStdout()
			if len(args) == 0 {
				var entries [][2]string
				for _, c := range doctor.Checks() {
					entries = append(entries, [2]string{c.ID, fmt.Sprintf("%s: %s", c.Severity(), c.Title())})
				}
				if err := report.WriteList(out, entries, report.StyleFor(out, sys.getenv)); err != nil {
					return outputError{err}
				}
				return nil
			}
			page, ok := findings.Get(args[0])
			if !ok {
				return unknownID("explain", args[0])
			}
			if err := report.WriteMarkdown(out, page.Text, report.StyleFor(out, sys.getenv)); err != nil {
				return outputError{err}
			}
			return nil
		},
		ValidArgsFunction: cobra.FixedCompletions(checkIDs(), cobra.ShellCompDirectiveNoFileComp),
	}
}

// checkIDs returns the ids of all checks.
func checkIDs() (ids []string) {
	for _, c := range doctor.Checks() {
		ids = append(ids, c.ID)
	}
	return ids
}

// unknownID is the error for an id that no check has. It suggests those that are near, that
// contain it, or that begin alike.
func unknownID(where, id string) error {
	const alike = 6 // letters
	closest, word := nearest(id, checkIDs()), strings.ToLower(strings.TrimSpace(id))
	var parts []string
	for _, known := range checkIDs() {
		if known == closest || len(word) > 2 && strings.Contains(known, word) || len(word) >= alike && strings.HasPrefix(known, word[:alike]) {
			parts = append(parts, known)
		}
	}
	if len(parts) > 0 {
		return usagef("%s: there is no finding %q; did you mean %s?", where, id, strings.Join(parts, ", "))
	}
	return usagef("%s: there is no finding %q (pincheck explain lists all)", where, id)
}
