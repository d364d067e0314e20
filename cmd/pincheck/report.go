package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// reportFile is the file that report writes, unless --output names another file.
const reportFile = "pincheck-report.html"

func newReport(o *options, sys system) *cobra.Command {
	full := false
	cmd := &cobra.Command{
		Use:   "report [FILE...]",
		Short: "Check, measure all, and write one HTML file with plots",
		Long: `report checks the GPUs, runs all experiments of pincheck bench, and writes one
HTML file with what was found, in words, plots and tables. The file needs
nothing else: no network, no fonts and no script.

With files it runs nothing, and shows what they hold: what --format json or
jsonl wrote, of one host or of many. - is the standard input.

The file is ` + reportFile + `, unless --output names another one. With
another --format the same results are written in that form.

` + exitHelp,
		ValidArgsFunction: cobra.FixedCompletions([]string{"json", "jsonl"}, cobra.ShellCompDirectiveFilterFileExt),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !cmd.Flags().Changed("format") {
				o.format = string(report.HTML)
			}
			if o.format == string(report.HTML) && o.output == "" {
				o.output = reportFile
			}
			var err error
			if len(args) > 0 {
				err = o.showFiles(cmd, args)
			} else {
				err = o.produce(cmd, sys, "report", true, func(ctx context.Context, s *session) error { return s.all(ctx, !full) })
			}
			if written := (verdictError{}); (err == nil || errors.As(err, &written)) && o.output != "" && !o.quiet {
				fmt.Fprintf(cmd.ErrOrStderr(), "written: %s\n", printable.Line(o.output))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&full, "full", false, "all sizes and long samples, which takes minutes")
	return cmd
}

// all checks the devices and runs all experiments on them.
func (s *session) all(ctx context.Context, quick bool) error {
	if err := s.check(ctx, probe.Steps{Verify: true, Bandwidth: true}); err != nil || len(s.result.Devices) == 0 {
		return err
	}
	checked := s.result.Facts
	err := s.bench(ctx, s.sys.experiments, measure.Options{Quick: quick}, true)
	// The facts are now those after the experiments, without what the check found.
	s.change(func(r *report.Result) {
		r.Probes, r.NVML, r.Together, r.PeerPaths = append(checked.Probes, r.Probes...), checked.NVML, checked.Together, checked.PeerPaths
		r.Processes = checked.Processes
		for i := range r.Devices {
			for _, c := range checked.Devices {
				if d := &r.Devices[i]; d.Ordinal == c.Ordinal {
					c.Errors = append(c.Errors, d.Errors...)
					*d = c
				}
			}
		}
	})
	return err
}

// showFiles writes a report about results that were kept.
func (o *options) showFiles(cmd *cobra.Command, names []string) error {
	format, err := o.validate()
	if err != nil {
		return err
	}
	if format != report.HTML {
		return usagef("--format %s: what is in files is shown as html only", format)
	}
	page, err := until(o, cmd, func() ([]byte, error) {
		var all []*report.Result
		for _, name := range names {
			results, err := readFile(name, cmd.InOrStdin(), report.ReadAll)
			if err != nil {
				return nil, usagef("%s: %w", name, err)
			}
			all = append(all, results...)
		}
		var b bytes.Buffer
		if err := report.WriteHTML(&b, all...); err != nil {
			return nil, outputError{err}
		}
		return b.Bytes(), nil
	})
	if err != nil {
		return err
	}
	if err := report.WriteFile(o.output, page); err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	return nil
}
