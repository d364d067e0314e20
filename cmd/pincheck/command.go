package main

import (
	"context"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/report"
)

// system is what the commands need of the machine.
type system struct {
	environ []string
	root    fs.FS
	open    func(cudart.Options) (*cudart.Runtime, error)
	// adjust changes the plans, if it is not nil: tests make them small.
	adjust func(plans) plans
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

// options are the flags that all commands share.
type options struct {
	sim     bool
	format  string
	device  string
	library string
	timeout time.Duration
	npd     bool
}

const longHelp = `pincheck finds the CUDA runtime library, the driver and the GPUs, sends bytes
to each GPU and back and compares them, measures copies between pinned memory
and the GPU both ways, and says what is wrong and what to do about it.

Without a GPU it reports which part is missing; with --sim it runs on a
simulated one, and says so.`

// run is the whole program, apart from the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer, sys system) int {
	root := newRoot(sys)
	root.SetArgs(append([]string{}, args...)) // nil would mean those of the process
	root.SetOut(stdout)
	root.SetErr(stderr)
	return exitCode(ctx, root.ExecuteContext(ctx), stderr)
}

func newRoot(sys system) *cobra.Command {
	o := &options{}
	root := &cobra.Command{
		Use:           "pincheck",
		Short:         "Check pinned memory and copies between CPU and GPU",
		Long:          longHelp + "\n\n" + exitHelp,
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := o.check(cmd, sys, "check", steps{verify: true, bandwidth: true, judge: true})
			if o.npd {
				return npdFailed(cmd.OutOrStdout(), err)
			}
			return err
		},
	}
	flags := root.PersistentFlags()
	flags.BoolVar(&o.sim, "sim", false, "run on a simulated GPU")
	flags.StringVar(&o.format, "format", string(report.Text), "output `form`: text or json")
	flags.StringVar(&o.device, "device", "all", "GPU to look at: its `number`, or all")
	flags.StringVar(&o.library, "library", "", "`path` of the libcudart to load (default: find one, see PINNED_CUDART)")
	flags.DurationVar(&o.timeout, "timeout", 0, "cancel after this `time`, such as 30s (default: no limit)")
	root.Flags().BoolVar(&o.npd, "npd", false, "print one line for Kubernetes' node-problem-detector,\nand exit with 0 for ok, 1 for not ok, 2 for unknown")
	complete(root, "format", "text", "json")
	complete(root, "device", "all", "0")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newVerify(o, sys), newDevices(o, sys), newCompare(o, sys), newVersion(o))
	return root
}

func newVerify(o *options, sys system) *cobra.Command {
	s := steps{verify: true, judge: true, progress: true}
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Prove that bytes survive the round trip to the GPU",
		Long: `verify sends patterns of many sizes and alignments to the GPU and back, over
pinned, registered, pageable, mapped and managed memory, into targets filled
with other bytes before, and compares every byte.

--full goes up to 4 GiB a copy and takes minutes.

` + exitHelp,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.check(cmd, sys, "verify", s) },
	}
	cmd.Flags().BoolVar(&s.full, "full", false, "all combinations, up to 4 GiB a copy")
	return cmd
}

func newDevices(o *options, sys system) *cobra.Command {
	return &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs, their memory and their links",
		Long:  "devices lists the GPUs without measuring: the links are as they are now,\nand idle GPUs train theirs down.\n\n" + exitHelp,
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.check(cmd, sys, "devices", steps{}) },
	}
}

func newVersion(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of pincheck",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := report.ParseFormat(o.format)
			if err != nil {
				return usageError{err}
			}
			r := &report.Result{Command: "version", Tool: tool()}
			return report.Write(cmd.OutOrStdout(), r, format, report.Style{})
		},
	}
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no argument, and got %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// complete offers the values of a flag to the shell. It fails only for a flag that does
// not exist, which a test would notice.
func complete(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
