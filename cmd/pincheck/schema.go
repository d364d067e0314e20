package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func newSchema(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of what --format json writes",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := o.validate(); err != nil {
				return err
			}
			if o.output != "" {
				return usagef("schema writes to standard output")
			}
			if _, err := fmt.Fprint(cmd.OutOrStdout(), report.Schema); err != nil {
				return outputError{err}
			}
			return nil
		},
	}
}
