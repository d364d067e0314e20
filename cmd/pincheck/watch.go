package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	interval := time.Minute
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Look again and again, and print what changes",
		Long: `watch reads what the host shows, at an interval, and prints findings that appear
and that end. It does not start CUDA, copies nothing and takes no memory of a
GPU, so that it can run beside other work. It ends on Ctrl-C and SIGTERM.

With --format jsonl each change is an object in a line.`,
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
			}
			ctx := cmd.Context()
			if o.timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, o.timeout)
				defer cancel()
			}
			return (&watch{options: o, sys: sys, out: cmd.OutOrStdout(), lines: format == report.JSONLines}).run(ctx, interval)
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", interval, "time from one look to the next")
	named(cmd.Flags(), "interval", "time")
	complete(cmd, "interval")
	return cmd
}

// A watch prints how the findings change.
type watch struct {
	*options
	sys   system
	out   io.Writer
	lines bool // JSON
	last  []doctor.Finding
}

// change is a line of --format jsonl.
type change struct {
	Time    time.Time      `json:"time"`
	Change  string         `json:"change"` // appeared or ended
	Finding doctor.Finding `json:"finding"`
}

func (w *watch) run(ctx context.Context, interval time.Duration) error {
	after := w.sys.after
	if after == nil {
		after = time.After
	}
	for first := true; ctx.Err() == nil; first = false {
		f := doctor.FromHost(hostinfo.Read(w.sys.root, w.sys.environ))
		f.ExpectedGPUs = w.expectGPUs
		f.Processes = doctor.Processes(w.sys.root)
		_, found := doctor.Evaluate(f, w.ignore...)
		if err := w.print(time.Now().UTC(), found, first); err != nil {
			return outputError{err}
		}
		select {
		case <-ctx.Done():
		case <-after(interval):
		}
	}
	return nil
}

// print writes the findings that appeared and those that ended since the last call. Two findings are
// the same if id, severity and GPU are equal; their figures may differ.
func (w *watch) print(now time.Time, found []doctor.Finding, first bool) error {
	old, fresh := without(w.last, found), without(found, w.last)
	w.last = found
	if first && len(found) == 0 && !w.lines {
		_, err := fmt.Fprintf(w.out, "%s nothing to be mended\n", now.Format(time.RFC3339))
		return err
	}
	for _, part := range []struct {
		name, sign string
		list       []doctor.Finding
	}{{"ended", "-", old}, {"appeared", "+", fresh}} {
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

// without returns the findings of a list that are not in others.
func without(list, others []doctor.Finding) (rest []doctor.Finding) {
	type key struct {
		id       string
		severity doctor.Severity
		device   int
	}
	keyOf := func(f doctor.Finding) key {
		k := key{f.ID, f.Severity, -1}
		if f.Device != nil {
			k.device = *f.Device
		}
		return k
	}
	known := map[key]bool{}
	for _, f := range others {
		known[keyOf(f)] = true
	}
	for _, f := range list {
		if !known[keyOf(f)] {
			rest = append(rest, f)
		}
	}
	return rest
}
