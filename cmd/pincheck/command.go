package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
)

// system gives the commands access to the machine. Tests replace its fields.
type system struct {
	environ []string
	root    fs.FS
	// processes is where other processes are read; nil for root. pincheck capture records what
	// is read of root, and an archive has no files of other processes.
	processes fs.FS
	open      func(context.Context, cudart.Options) (*cudart.Runtime, error)
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
	value := ""
	for _, entry := range s.environ {
		if len(entry) > len(name) && entry[:len(name)] == name && entry[len(name)] == '=' {
			value = entry[len(name)+1:]
		}
	}
	return value
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

const longHelp = `pincheck finds the CUDA runtime library, the driver and the GPUs, sends bytes
to each GPU and back and compares them, measures copies between pinned memory
and the GPU both ways, and says what is slow, wrong or wasteful: with what was
seen, why, what it costs, and what to do. pincheck explain ID says more.

Without a GPU it reports which part is missing; with --sim it runs on a
simulated one, and says so.`

// run is the whole program, apart from the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer, sys system) int {
	o := &options{}
	root := newRoot(o, sys)
	root.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	root.SetOut(stdout)
	root.SetErr(stderr)
	strict(root)
	err := root.ExecuteContext(ctx)
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
	return exitCode(err, stderr)
}

func newRoot(o *options, sys system) *cobra.Command {
	check := func(cmd *cobra.Command, _ []string) error {
		switch {
		case o.version && o.npd:
			return usagef("--npd and --version exclude each other")
		case o.version:
			return o.writeVersion(cmd)
		}
		if o.from != "" {
			return o.produce(cmd, sys, "check", true, func(_ context.Context, s *session) error { return s.readArchive() })
		}
		o.quiet = o.quiet || o.npd // what it prints is one line
		return o.produce(cmd, sys, "check", true, func(ctx context.Context, s *session) error {
			return s.check(ctx, probe.Steps{Verify: true, Bandwidth: true})
		})
	}
	root := &cobra.Command{
		Use:           "pincheck",
		Short:         "Check pinned memory and copies between CPU and GPU",
		Long:          longHelp + "\n\n" + exitHelp,
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          check,
	}
	o.register(root)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{flagError(err)} })
	same := &cobra.Command{Use: "check", Aliases: []string{"doctor"}, Short: "The same as pincheck without a command", Long: root.Long, Args: noArgs, RunE: check}
	o.registerCheck(root)
	o.registerCheck(same)
	root.AddCommand(same, newVerify(o, sys), newDevices(o, sys), newBench(o, sys), newReport(o, sys), newCompare(o, sys), newCapture(o, sys), newExplain(o, sys), newWatch(o, sys), newLicenses(o), newMan(o), newSchema(o), newVersion(o))
	return root
}

// flagError is the error of a flag, in words of the command instead of those of package strconv.
func flagError(err error) error {
	invalid, number := (*pflag.InvalidValueError)(nil), (*strconv.NumError)(nil)
	if !errors.As(err, &invalid) {
		return err
	}
	name := invalid.GetFlag().Name
	cause := errors.Unwrap(invalid)
	want := ""
	switch {
	case errors.As(cause, &number) && errors.Is(cause, strconv.ErrRange):
		want = "the number is too large"
	case errors.As(cause, &number) && number.Func == "ParseFloat":
		want = "want a number, such as 2.5"
	case errors.As(cause, &number) && number.Func == "ParseBool":
		want = "want true or false"
	case errors.As(cause, &number):
		want = "want a whole number"
	case strings.HasPrefix(cause.Error(), "time: "):
		want = "want a time with its unit, such as 500ms, 30s or 2m"
	default:
		return fmt.Errorf("--%s: %w", name, cause)
	}
	return fmt.Errorf("--%s %q: %s", name, invalid.GetValue(), want)
}

// strict makes unknown topics of help and shells of completion wrong usage, which cobra's
// own commands do not. The output must be set: completion keeps it.
func strict(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			c.Run = nil
			c.RunE = help
		case "completion":
			c.Args = noArgs
			c.RunE = func(*cobra.Command, []string) error {
				return usagef("completion needs the name of a shell: bash, zsh, fish or powershell")
			}
			for _, shell := range c.Commands() {
				write := shell.RunE
				shell.RunE = func(cmd *cobra.Command, args []string) error {
					if err := write(cmd, args); err != nil {
						return outputError{err}
					}
					return nil
				}
			}
		}
	}
}

func help(cmd *cobra.Command, args []string) error {
	c, rest, err := cmd.Root().Find(args)
	if err == nil && len(rest) > 0 {
		err = noArgs(c, rest)
	}
	if err != nil {
		return usageError{err}
	}
	c.InitDefaultHelpFlag()
	return c.Help()
}

func newVerify(o *options, sys system) *cobra.Command {
	s := probe.Steps{Verify: true}
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Prove that bytes survive the round trip to the GPU",
		Long: `verify sends patterns of many sizes and alignments to the GPU and back, over
pinned, registered, pageable, mapped and managed memory, into targets filled
with other bytes before, and compares every byte.

--full goes up to 4 GiB a copy and takes minutes.

` + exitHelp,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.produce(cmd, sys, "verify", true, func(ctx context.Context, session *session) error { return session.check(ctx, s) })
		},
	}
	cmd.Flags().BoolVar(&s.Full, "full", false, "all combinations, up to 4 GiB a copy")
	return cmd
}

func newDevices(o *options, sys system) *cobra.Command {
	return &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs, their memory and their links",
		Long:  "devices lists the GPUs without measuring: the links are as they are now,\nand idle GPUs train theirs down.\n\n" + exitHelp,
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.produce(cmd, sys, "devices", false, func(ctx context.Context, s *session) error {
				return s.check(ctx, probe.Steps{})
			})
		},
	}
}

func newVersion(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of pincheck",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.writeVersion(cmd) },
	}
}

func (o *options) writeVersion(cmd *cobra.Command) error {
	format, err := o.validate()
	if err != nil {
		return err
	}
	if format == report.HTML {
		return usagef("--format html: version writes text, json, jsonl, prometheus or csv")
	}
	s := &session{options: o, cmd: cmd, format: format, result: &report.Result{Command: "version", Tool: tool(), Started: time.Now().UTC(), Complete: true}}
	return s.write()
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		if closest := nearest(args[0], names); closest != "" {
			return usagef("unknown command %q; did you mean %s?", args[0], closest)
		}
		return usagef("unknown command %q", args[0])
	}
	return usagef("%s takes no argument, and got %q", cmd.CommandPath(), args[0])
}

// complete offers the values of a flag to the shell. It fails only for a flag that does
// not exist, which a test would notice.
func complete(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
