package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// shortestInterval is how often the files of a host may be read.
const shortestInterval = time.Second

func newWatch(o *options, sys system) *cobra.Command {
	interval, textfile := time.Minute, ""
	damped := damping{3, 4}
	cmd := newCommand("watch")
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		format, err := o.validate(report.Text, report.JSONLines)
		switch {
		case err != nil:
			return err
		case interval < shortestInterval:
			return usagef("--interval %v: must be at least %v", interval, shortestInterval)
		case textfile != "" && !strings.HasSuffix(textfile, ".prom"):
			return usagef("--textfile %s: node_exporter reads files whose names end in .prom", textfile)
		}
		ctx := cmd.Context()
		if o.timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, o.timeout)
			defer cancel()
		}
		return (&watch{
			options: o, cmd: cmd, sys: sys, out: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr(), lines: format == report.JSONLines,
			textfile: textfile, seen: conditions{damping: damped},
		}).run(ctx, interval)
	}
	o.share(cmd, []string{"expect-gpus", "ignore", "timeout"})
	o.formats(cmd, report.Text, report.JSONLines)
	cmd.Flags().Lookup("timeout").Usage = "stop after TIME, such as 8h"
	cmd.Flags().DurationVar(&interval, "interval", interval, "time from one check to the next")
	named(cmd.Flags(), "interval", "TIME")
	cmd.Flags().Var(&damped, "damping", "report a change that K of the last N checks had")
	named(cmd.Flags(), "damping", "K/N")
	cmd.Flags().StringVar(&textfile, "textfile", "", "also write metrics to FILE.prom for node_exporter")
	named(cmd.Flags(), "textfile", "FILE")
	complete[string](cmd, "interval")
	complete[string](cmd, "damping")
	return cmd
}

// A watch prints how the findings change.
type watch struct {
	*options
	cmd      *cobra.Command
	sys      system
	out      io.Writer
	stderr   io.Writer
	lines    bool   // JSON
	textfile string // empty for none
	failed   bool   // the textfile could not be written at the last look
	seen     conditions
}

// change is a line of --format jsonl.
type change struct {
	Time    time.Time      `json:"time"`
	Change  string         `json:"change"` // appeared or ended
	Finding doctor.Finding `json:"finding"`
}

func (w *watch) run(ctx context.Context, interval time.Duration) error {
	defer w.removeTextfile()
	for first := true; ctx.Err() == nil; first = false {
		f := doctor.FromHost(hostinfo.Read(w.sys.root, w.sys.environ))
		f.ExpectedGPUs = w.expectGPUs
		f.Processes, f.Shared = doctor.Processes(w.sys.root), w.sys.sharedMemory()
		_, found := doctor.Evaluate(f, w.ignore...)
		ended, appeared := w.seen.look(found)
		now := time.Now().UTC()
		if err := w.print(now, ended, appeared, first); err != nil {
			return outputError{err}
		}
		w.writeTextfile(now)
		select {
		case <-ctx.Done():
		case <-w.sys.timer(interval):
		}
	}
	return nil
}

// writeTextfile writes what is reported now. An error is printed once, until the file could be written again:
// the changes are printed all the same.
func (w *watch) writeTextfile(now time.Time) {
	if w.textfile == "" {
		return
	}
	err := writeFile(w.textfile, report.WatchMetrics(w.seen.now(), now))
	if err != nil && !w.failed {
		complain(w.stderr, w.cmd, fmt.Errorf("--textfile: %w (reported once)", err))
	}
	w.failed = err != nil
}

// removeTextfile removes the file: node_exporter would serve it for ever.
func (w *watch) removeTextfile() {
	if w.textfile == "" {
		return
	}
	if err := os.Remove(w.textfile); err != nil && !errors.Is(err, fs.ErrNotExist) && !w.failed {
		complain(w.stderr, w.cmd, fmt.Errorf("--textfile: %w", err))
	}
}

// print writes the findings that ended, and those that appeared.
func (w *watch) print(now time.Time, ended, appeared []doctor.Finding, first bool) error {
	if first && len(appeared) == 0 && !w.lines {
		_, err := fmt.Fprintf(w.out, "%s no findings\n", now.Format(time.RFC3339))
		return err
	}
	for _, part := range []struct {
		name, sign string
		list       []doctor.Finding
	}{{"ended", "-", ended}, {"appeared", "+", appeared}} {
		for _, one := range part.list {
			if w.lines {
				line, err := json.Marshal(change{now, part.name, one})
				if err == nil {
					_, err = fmt.Fprintf(w.out, "%s\n", printable.JSON(line))
				}
				if err != nil {
					return err
				}
				continue
			}
			subject := ""
			if one.Device != nil {
				subject = fmt.Sprintf("GPU %d: ", *one.Device)
			}
			if _, err := fmt.Fprintf(w.out, "%s %s %s %s: %s%s\n", now.Format(time.RFC3339), part.sign, one.Severity, one.ID, subject, printable.Line(one.Summary)); err != nil {
				return err
			}
		}
	}
	return nil
}
