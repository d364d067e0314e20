package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/docs/findings"
	"github.com/gopinned/pinned/internal/doctor"
	"github.com/gopinned/pinned/internal/report"
)

func newExplain(o *options, sys system) *cobra.Command {
	return &cobra.Command{
		Use:   "explain [ID]",
		Short: "Say what a finding means, and what to do",
		Long: `explain prints the page of a finding: what it means, why it happens, what was
looked at, what to do, and what others met. Without an id it lists all.`,
		Args: cobra.MaximumNArgs(1),
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
					entries = append(entries, [2]string{c.ID, fmt.Sprintf("%s: %s", c.Severity, c.Title)})
				}
				if err := report.WriteList(out, entries, report.StyleFor(out, sys.getenv)); err != nil {
					return outputError{err}
				}
				return nil
			}
			page, ok := findings.Page(args[0])
			if !ok {
				return unknownID("explain", args[0])
			}
			if _, err := fmt.Fprint(out, page); err != nil {
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

// unknownID is the error for an id that no check has. It suggests those that are near.
func unknownID(where, id string) error {
	near := nearest(id, checkIDs())
	var parts []string
	for _, known := range checkIDs() {
		if word := strings.ToLower(strings.TrimSpace(id)); known == near || len(word) > 2 && strings.Contains(known, word) {
			parts = append(parts, known)
		}
	}
	if len(parts) > 0 {
		return usagef("%s: there is no finding %q; did you mean %s?", where, id, strings.Join(parts, ", "))
	}
	return usagef("%s: there is no finding %q (pincheck explain lists all)", where, id)
}
