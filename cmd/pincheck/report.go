package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

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
	cmd := newCommand("report [FILE...] [flags]")
	cmd.ValidArgsFunction = cobra.FixedCompletions([]string{"json", "jsonl"}, cobra.ShellCompDirectiveFilterFileExt)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
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
	}
	o.share(cmd, onGPUs, asResult, ofFindings)
	cmd.Flags().Lookup("format").DefValue = string(report.HTML)
	cmd.Flags().Lookup("output").Usage = "write to FILE, atomically (default with html: " + reportFile + ")"
	cmd.Flags().BoolVar(&full, "full", false, "all sizes and long samples")
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
		r.Processes, r.Shared = checked.Processes, checked.Shared
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
	if o.format != string(report.HTML) {
		return usagef("--format %s: results in files are shown as html only", o.format)
	}
	if unused := given(cmd, slices.Concat(ofFindings, []string{"device", "library", "sim", "full", "no-host-name", "verbose"})...); len(unused) > 0 {
		return usagef("%s: with files nothing is measured or evaluated again", strings.Join(unused, ", "))
	}
	if _, err := o.validate(); err != nil {
		return err
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
	if err := writeFile(o.output, page); err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	return nil
}
