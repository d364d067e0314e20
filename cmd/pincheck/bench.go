package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// benchFlags are the flags of bench and of its experiments.
type benchFlags struct {
	quick    bool
	duration time.Duration
	sizes    sizes
	pid      int
	watch    time.Duration
	python   string
	frames   frameFlags
}

func newBench(o *options, sys system) *cobra.Command {
	f := &benchFlags{}
	cmd := newCommand("bench [NAME...] [flags]")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 { // an experiment would be a subcommand
			_, _, err := chooseExperiments(sys.experiments, args)
			return err
		}
		if cmd.Flags().NFlag() > 0 {
			return usagef("name an experiment, or all.\nFor a list, run: pincheck bench")
		}
		return afterWriting(writeHelp(cmd.OutOrStdout(), cmd))
	}
	f.register(o, cmd)
	for _, group := range []string{"Copies:", "Memory:", "Applications:"} {
		cmd.AddGroup(&cobra.Group{ID: group, Title: group})
	}
	for _, e := range sys.experiments {
		cmd.AddCommand(newExperiment(o, sys, f, e))
	}
	all := newExperiment(o, sys, f, measure.Experiment{
		Name: "all", Question: "every experiment", Long: "Runs every experiment, one after the other. Each one answers a question.",
	})
	cmd.AddCommand(all)
	return cmd
}

// newExperiment is the subcommand of an experiment. Its arguments are further experiments.
func newExperiment(o *options, sys system, f *benchFlags, e measure.Experiment) *cobra.Command {
	cmd := &cobra.Command{
		Use:     e.Name + " [NAME...] [flags]",
		Short:   e.Question,
		Long:    e.Question + "\n\n" + e.Long,
		GroupID: e.Group,
		Example: fmt.Sprintf(`
  pincheck bench %[1]s
  pincheck bench %[1]s --quick --device 0
  pincheck bench %[1]s --format json -o %[1]s.json
  pincheck bench %[1]s --sim    try it without a GPU`, e.Name),
		RunE: func(cmd *cobra.Command, args []string) error {
			chosen, all, err := chooseExperiments(sys.experiments, append([]string{cmd.Name()}, args...))
			if err != nil {
				return err
			}
			return f.run(o, cmd, sys, chosen, all)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return experimentNames(sys.experiments), cobra.ShellCompDirectiveNoFileComp
		},
		Annotations: map[string]string{exitNote: measureExit, related: e.Related},
	}
	f.register(o, cmd)
	flags := cmd.Flags()
	switch e.Name {
	case referenceBench:
		flags.Lookup("format").Usage += ", or reference: a row of the reference table (docs/reference.md)"
	case memoryExperiment:
		flags.IntVar(&f.pid, "pid", 0, "read the memory of this process, and measure nothing")
		named(flags, "pid", "PID")
		flags.DurationVar(&f.watch, "watch", 0, "with --pid, count for TIME how often the process pins and unpins")
		named(flags, "watch", "TIME")
		flags.StringVar(&f.python, "python", "", "also measure PyTorch and DeepSpeed with this Python, such as python3")
		named(flags, "python", "PATH")
		complete[string](cmd, "pid")
		complete[string](cmd, "watch")
	case framesExperiment:
		f.frames.register(cmd)
	}
	return cmd
}

// register gives bench, or an experiment, the flags that all experiments have.
func (f *benchFlags) register(o *options, cmd *cobra.Command) {
	o.share(cmd, onGPUs, asResult)
	flags := cmd.Flags()
	flags.BoolVar(&f.quick, "quick", false, "fewer sizes and shorter samples")
	flags.DurationVar(&f.duration, "duration", 0, "time for each experiment, such as 10s (default: what its plan needs)")
	named(flags, "duration", "TIME")
	flags.Var(&f.sizes, "sizes", "sizes of copies, such as 64K,1M,4G; K, M and G are powers of 1024")
	complete[string](cmd, "duration")
	complete[string](cmd, "sizes")
}

func (f *benchFlags) run(o *options, cmd *cobra.Command, sys system, chosen []measure.Experiment, all bool) error {
	options, err := f.validate(cmd, chosen)
	if err != nil {
		return err
	}
	do := func(ctx context.Context, s *session) error {
		if f.pid > 0 {
			return s.readMemory(ctx, f.pid, f.watch)
		}
		return s.bench(ctx, chosen, options, all)
	}
	if o.format != referenceFormat {
		return o.produce(cmd, sys, "bench", false, do)
	}
	if !slices.ContainsFunc(chosen, func(e measure.Experiment) bool { return e.Name == referenceBench }) {
		return usagef("--format reference belongs to bench %s", referenceBench)
	}
	o.format = string(report.Text)
	return o.produceReference(cmd, sys, do)
}

// memoryExperiment is the experiment that reads a process, for --pid.
const memoryExperiment = "memory"

// shortestDuration is the duration of an experiment with few cases and the fewest samples: it may take
// longer, as the estimate says.
const shortestDuration = 100 * time.Millisecond

// A process is watched for so long that some looks differ, and not for ever.
const (
	shortestWatch = time.Second
	longestWatch  = 24 * time.Hour
)

func (f *benchFlags) validate(cmd *cobra.Command, chosen []measure.Experiment) (measure.Options, error) {
	if cmd.Flags().Changed("duration") && f.duration < shortestDuration {
		return measure.Options{}, usagef("--duration %v: must be at least %v", f.duration, shortestDuration)
	}
	if cmd.Flags().Changed("pid") {
		switch {
		case f.pid <= 0:
			return measure.Options{}, usagef("--pid %d: must be the number of a process, from 1 on", f.pid)
		case len(chosen) != 1:
			return measure.Options{}, usagef("--pid: run bench %s alone", memoryExperiment)
		}
	}
	switch {
	case !cmd.Flags().Changed("watch"):
	case f.pid == 0:
		return measure.Options{}, usagef("--watch needs --pid")
	case f.watch < shortestWatch || f.watch > longestWatch:
		return measure.Options{}, usagef("--watch %v: must be from %v to %v", f.watch, shortestWatch, longestWatch)
	}
	if cmd.Flags().Changed("python") {
		if len(chosen) != 1 || f.pid > 0 {
			return measure.Options{}, usagef("--python: run bench %s alone, without --pid", memoryExperiment)
		}
		if cmd.Flags().Changed("sim") {
			return measure.Options{}, usagef("--python and --sim exclude each other: PyTorch has no simulated GPU")
		}
		if _, err := exec.LookPath(f.python); err != nil {
			return measure.Options{}, usagef("--python: %w", err)
		}
	}
	options := measure.Options{Quick: f.quick, Duration: f.duration, Sizes: f.sizes, Python: f.python}
	if cmd.Name() != framesExperiment {
		return options, nil
	}
	var err error
	options.Frames, err = f.frames.validate(cmd, chosen)
	return options, err
}

func experimentNames(all []measure.Experiment) []string {
	names := make([]string, 0, len(all)+1)
	for _, e := range all {
		names = append(names, e.Name)
	}
	return names
}

// chooseExperiments returns the experiments with these names, in their order in all.
func chooseExperiments(known []measure.Experiment, args []string) (chosen []measure.Experiment, all bool, err error) {
	names := experimentNames(known)
	for _, name := range args {
		if name == "all" || slices.Contains(names, name) {
			continue
		}
		if closest := nearest(name, append(names, "all")); closest != "" {
			return nil, false, usagef("no experiment %q. Did you mean %s?\nFor a list, run: pincheck bench", name, closest)
		}
		return nil, false, usagef("no experiment %q.\nFor a list, run: pincheck bench", name)
	}
	all = slices.Contains(args, "all")
	for _, e := range known {
		if all || slices.Contains(args, e.Name) {
			chosen = append(chosen, e)
		}
	}
	return chosen, all, nil
}

// readMemory reads a running process, and watches it for a time unless that is 0. It takes no GPU.
func (s *session) readMemory(ctx context.Context, pid int, watch time.Duration) error {
	read := func() (*result.Bench, error) { return bench.ReadMemory(s.sys.root, pid) }
	if watch > 0 {
		read = func() (*result.Bench, error) { return bench.WatchMemory(ctx, s.sys.root, pid, watch, s.sys.timer) }
	}
	b, err := read()
	if b != nil {
		s.change(func(r *report.Result) { r.Benches = append(r.Benches, *b) })
	}
	return err
}

// bench runs the experiments. If one cannot run as planned, that is wrong usage and nothing is
// measured; with all, it is an error in the result, and the others run.
func (s *session) bench(ctx context.Context, experiments []measure.Experiment, options measure.Options, all bool) error {
	run := func(devices []*cudart.Device) error {
		env := measure.Env{Options: options, Devices: devices, Host: s.readHost()}
		if s.sys.expect != nil && !s.sim { // the simulated GPU has no reference row
			env.Expect = s.sys.expect(env)
		}
		planned, total, err := s.estimate(experiments, env, all)
		if err != nil {
			return err
		}
		s.show(report.At{})
		var spent time.Duration
		for _, p := range planned {
			if err := bounded.Ended(ctx); err != nil {
				return err
			}
			b, err := measure.Run(ctx, p.Experiment, env, func(at measure.Progress) {
				share := float64(at.Done) / float64(max(at.Total, 1))
				s.show(report.At{
					What:  strings.TrimSuffix(p.Name+", "+at.What, ", "),
					Share: (spent.Seconds() + share*p.time.Seconds()) / max(total.Seconds(), 1e-9),
					Left:  at.Left + total - spent - p.time,
				})
			})
			if b != nil {
				s.change(func(r *report.Result) { r.Benches = append(r.Benches, *b) })
			}
			if err != nil {
				return err
			}
			spent += p.time
		}
		host := s.readHost() // links are trained up under load
		s.change(func(r *report.Result) {
			for i := range r.Devices {
				r.Devices[i].Relink(host)
			}
		})
		return nil
	}
	return s.withDevices(ctx, run)
}

// planned is an experiment with its estimate.
type planned struct {
	measure.Experiment
	time time.Duration
}

// estimate returns the experiments that can run with their estimated times, and writes a table of
// the estimates.
func (s *session) estimate(experiments []measure.Experiment, env measure.Env, all bool) (out []planned, total time.Duration, err error) {
	var lines []report.Estimate
	for _, e := range experiments {
		took, footprint, err := measure.Estimate(e, env)
		if err != nil {
			err = errors.New(strings.TrimPrefix(err.Error(), "measure: "))
			if !all {
				return nil, 0, usageError{err}
			}
			s.change(func(r *report.Result) { r.Errors = append(r.Errors, err.Error()) })
			continue
		}
		out = append(out, planned{e, took})
		total += took
		lines = append(lines, report.Estimate{Name: e.Name, Time: took, Pinned: footprint.Pinned, Pageable: footprint.Pageable, Device: footprint.Device, Disk: footprint.Disk})
	}
	if !s.quiet {
		s.hide()
		report.WriteEstimates(s.cmd.ErrOrStderr(), lines)
	}
	return out, total, nil
}
