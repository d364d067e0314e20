package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/licenses"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cmd/pincheck/internal/supportfile"
	"github.com/gopinned/pinned/cudart"
)

// system gives the commands access to the machine. Tests replace its fields.
type system struct {
	environ []string
	root    fs.FS
	// processes is where other processes are read; nil for root. pincheck capture records what
	// is read of root, and an archive has no files of other processes.
	processes fs.FS
	// shared is the directory of memory that processes share, empty for none.
	shared string
	open   func(context.Context, cudart.Options) (*cudart.Runtime, error)
	// isolated makes probes run in child processes, also with --sim.
	isolated bool
	hostname func() (string, error) // nil leaves it out
	// experiments are the experiments of pincheck bench.
	experiments []measure.Experiment
	// expect returns measure.Env.Expect for an Env. nil for none.
	expect func(measure.Env) func(*result.Series) *result.Expected
	// after and now replace time.After and time.Now in tests. nil stands for these.
	after func(time.Duration) <-chan time.Time
	now   func() time.Time
	// releaseGrace replaces the constant of this name, unless it is 0.
	releaseGrace time.Duration
	// callGrace and tick are probe.Local's Grace and Tick.
	callGrace, tick time.Duration
	// adjust, if not nil, changes the plans: tests make them small.
	adjust func(probe.Plans) probe.Plans
}

func (s system) getenv(name string) string {
	value, _ := hostinfo.LookupEnv(s.environ, name)
	return value
}

// sharedMemory lists the memory that processes share.
func (s system) sharedMemory() []doctor.SharedMemory {
	if s.shared == "" {
		return nil
	}
	return doctor.SharedMemoryIn(s.shared, time.Now())
}

// timer is time.After.
func (s system) timer(d time.Duration) <-chan time.Time {
	if s.after == nil {
		return time.After(d)
	}
	return s.after(d)
}

// clock is time.Now.
func (s system) clock() time.Time {
	if s.now == nil {
		return time.Now()
	}
	return s.now()
}

// run is the whole program, apart from the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer, sys system) int {
	o := &options{}
	root := newRoot(o, sys)
	root.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	root.SetOut(stdout)
	root.SetErr(stderr)
	strict(root)
	cmd, err := root.ExecuteContextC(ctx)
	if asksForNPD(args) {
		err = npdFailed(stdout, err)
	} else if usage := (usageError{}); errors.As(err, &usage) && o.output == "" {
		// Programs that asked for JSON get JSON.
		if f := report.Format(o.format); f == report.JSON || f == report.JSONLines {
			r := &report.Result{Command: "pincheck", Tool: tool(), Started: time.Now().UTC(), Verdict: doctor.Failed, Errors: []string{err.Error()}}
			if failed := report.Write(stdout, r, f, report.Style{}); failed != nil {
				err = outputError{failed}
			}
		}
	}
	return exitCode(cmd, err, stderr)
}

func newRoot(o *options, sys system) *cobra.Command {
	check := func(cmd *cobra.Command, _ []string) error {
		switch {
		case o.version && o.npd:
			return usagef("--npd and --version exclude each other")
		case o.version:
			return o.writeVersion(cmd)
		}
		if len(o.from) > 0 {
			return o.produce(cmd, sys, "check", true, func(_ context.Context, s *session) error { return s.readSources() })
		}
		o.quiet = o.quiet || o.npd // what it prints is one line
		return o.produce(cmd, sys, "check", true, func(ctx context.Context, s *session) error {
			return s.check(ctx, probe.Steps{Verify: true, Bandwidth: true})
		})
	}
	root, same := newCommand("pincheck"), newCommand("pincheck")
	root.Short = "Check pinned memory and copies between CPU and GPU"
	same.Use, same.Short, same.Aliases = "check", "check this machine (the default command)", []string{"doctor"}
	root.SilenceUsage, root.SilenceErrors = true, true
	root.SetFlagErrorFunc(flagError)
	root.Flags().BoolVar(&o.version, "version", false, "print the version")
	for _, c := range []*cobra.Command{root, same} {
		c.Args, c.RunE = noArgs, check
		o.share(c, onGPUs, asResult, ofFindings)
		c.Flags().StringArrayVar(&o.from, "from", nil, "check what FILE has of a machine instead: an archive of pincheck capture, "+supportfile.Known+"; repeatable")
		named(c.Flags(), "from", "FILE")
		offerTickets(c)
		c.Flags().BoolVar(&o.npd, "npd", false, "one line for Kubernetes' node-problem-detector; exit status 0 ok, 1 not ok, 2 unknown")
	}
	for _, group := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Check:", []*cobra.Command{same, newDevices(o, sys), newVerify(o, sys), newWatch(o, sys)}},
		{"Measure:", []*cobra.Command{newBench(o, sys), newCompare(o, sys), newReport(o, sys)}},
		{"Understand:", []*cobra.Command{newExplain(sys), newCapture(o, sys)}},
	} {
		root.AddGroup(&cobra.Group{ID: group.title, Title: group.title})
		for _, c := range group.commands {
			c.GroupID = group.title
			root.AddCommand(c)
		}
	}
	root.AddCommand(
		text("licenses", "print the licenses of the code in pincheck", "Print the licenses of the code that pincheck contains.", func(*cobra.Command) string { return licenses.Text }),
		text("man", "print the manual page", "Print the manual page. To read it: pincheck man | man -l -", manual),
		text("schema", "print the JSON Schema of --format json", "Print the JSON Schema of what --format json writes.", func(*cobra.Command) string { return report.Schema }),
		newVersion(o),
		&cobra.Command{Use: "exit-status", Short: "What the exit status means"}, // a help topic: a command that only shows its help
	)
	return root
}

func newVerify(o *options, sys system) *cobra.Command {
	s := probe.Steps{Verify: true}
	cmd := newCommand("verify")
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return o.produce(cmd, sys, "verify", true, func(ctx context.Context, session *session) error { return session.check(ctx, s) })
	}
	o.share(cmd, onGPUs, asResult, []string{"expect-gpus", "fail-on", "ignore"})
	offerTickets(cmd)
	cmd.Flags().BoolVar(&s.Full, "full", false, "all combinations, up to 4 GiB a copy")
	return cmd
}

func newDevices(o *options, sys system) *cobra.Command {
	cmd := newCommand("devices")
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return o.produce(cmd, sys, "devices", false, func(ctx context.Context, s *session) error {
			return s.check(ctx, probe.Steps{})
		})
	}
	o.share(cmd, onGPUs, asResult)
	return cmd
}

// versionFormats are the formats of a version, which has no page.
var versionFormats = []report.Format{report.Text, report.JSON, report.JSONLines, report.Prometheus, report.CSV}

func newVersion(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "print the version",
		Long:  "Print the version of pincheck, and what it was built from.",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.writeVersion(cmd) },
	}
	o.share(cmd, []string{"output"})
	o.formats(cmd, versionFormats...)
	return cmd
}

func (o *options) writeVersion(cmd *cobra.Command) error {
	format, err := o.validate(versionFormats...)
	if err != nil {
		return err
	}
	s := &session{options: o, cmd: cmd, format: format, result: &report.Result{Command: "version", Tool: tool(), Started: time.Now().UTC(), Complete: true}}
	return s.write()
}

// text is a command that writes a text to standard output.
func text(use, short, long string, of func(root *cobra.Command) string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), of(cmd.Root()))
			return afterWriting(err)
		},
	}
}
