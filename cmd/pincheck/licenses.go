package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/licenses"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func newLicenses(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "licenses",
		Short: "Print the licences of the code that pincheck contains",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := o.validate()
			if err != nil {
				return err
			}
			if format != report.Text || o.output != "" {
				return usagef("licenses writes text to standard output")
			}
			if _, err := fmt.Fprint(cmd.OutOrStdout(), licenses.Text); err != nil {
				return outputError{err}
			}
			return nil
		},
	}
}
