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
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Look again and again, and print what changes",
		Long: `watch reads what the host shows, at an interval, and prints findings that appear
and that end. It does not start CUDA, copies nothing and takes no memory of a
GPU, so that it can run beside other work. It ends on Ctrl-C and SIGTERM.

What comes and goes is not reported each time: a finding appears when it was seen
in 3 of the last 4 looks, and ends when it was not seen in 3 of them (--damping).
What the first look finds appears at once.

With --format jsonl each change is an object in a line. With --textfile the
findings are also metrics for the textfile collector of node_exporter; the file
is removed when watch ends.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := o.validate()
			switch {
			case err != nil:
				return err
			case format != report.Text && format != report.JSONLines || o.output != "":
				return usagef("watch writes text or jsonl to standard output")
			case o.sim:
				return usagef("watch looks at this host: it has no --sim")
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
				options: o, sys: sys, out: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr(), lines: format == report.JSONLines,
				textfile: textfile, seen: conditions{damping: damped},
			}).run(ctx, interval)
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", interval, "time from one look to the next")
	named(cmd.Flags(), "interval", "time")
	cmd.Flags().Var(&damped, "damping", "report a change that k of the last n looks have seen")
	cmd.Flags().StringVar(&textfile, "textfile", "", "write the findings to this file for node_exporter, such as\n/var/lib/node_exporter/textfile_collector/pincheck-watch.prom")
	named(cmd.Flags(), "textfile", "path")
	complete(cmd, "interval")
	complete(cmd, "damping")
	return cmd
}

// A watch prints how the findings change.
type watch struct {
	*options
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
		f.Processes = doctor.Processes(w.sys.root)
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
	err := report.WriteFile(w.textfile, report.WatchMetrics(w.seen.now(), now))
	if err != nil && !w.failed {
		complain(w.stderr, fmt.Errorf("--textfile: %w; this is said once", err))
	}
	w.failed = err != nil
}

// removeTextfile removes the file: node_exporter would serve it for ever.
func (w *watch) removeTextfile() {
	if w.textfile == "" {
		return
	}
	if err := os.Remove(w.textfile); err != nil && !errors.Is(err, fs.ErrNotExist) && !w.failed {
		complain(w.stderr, fmt.Errorf("--textfile: %w", err))
	}
}

// print writes the findings that ended, and those that appeared.
func (w *watch) print(now time.Time, ended, appeared []doctor.Finding, first bool) error {
	if first && len(appeared) == 0 && !w.lines {
		_, err := fmt.Fprintf(w.out, "%s nothing to be mended\n", now.Format(time.RFC3339))
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
