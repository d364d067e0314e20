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

// benchFlags are the flags of bench.
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
	cmd := &cobra.Command{
		Use:   "bench [NAME...]",
		Short: "Measure, and answer the question behind the figures",
		Long: `bench runs experiments by name, or all of them (all), and says what was seen.
Without a name it lists them. Before it starts it estimates the time, and checks
that there is the memory.

bench bandwidth --format reference writes a file of the reference table: what
copies reach on this type of machine, without names, addresses or numbers of
this one. docs/reference.md says how to add it to the table.

` + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return listExperiments(cmd, o, sys)
			}
			chosen, all, err := chooseExperiments(sys.experiments, args)
			if err != nil {
				return err
			}
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
				return usagef("--format reference is of the experiment %s: name it", referenceBench)
			}
			o.format = string(report.Text)
			return o.produceReference(cmd, sys, do)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return append(experimentNames(sys.experiments), "all"), cobra.ShellCompDirectiveNoFileComp
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.quick, "quick", false, "fewer sizes and shorter samples")
	flags.DurationVar(&f.duration, "duration", 0, "about how long each experiment measures, such as 10s (default: as long as it plans)")
	named(flags, "duration", "time")
	flags.Var(&f.sizes, "sizes", "sizes of copies, such as 64K,1MiB,4G: K, M and G are powers of 1024 (default: those of the experiment)")
	flags.IntVar(&f.pid, "pid", 0, "process to read (memory only)")
	named(flags, "pid", "number")
	flags.DurationVar(&f.watch, "watch", 0, "with --pid, count for this time how often it pins and unpins, such as 30s")
	named(flags, "watch", "time")
	flags.StringVar(&f.python, "python", "", "Python with PyTorch, such as python3, that is started for rows of PyTorch and DeepSpeed (memory only)")
	named(flags, "python", "path")
	f.frames.register(cmd)
	for _, name := range []string{"duration", "sizes", "pid", "watch"} {
		complete(cmd, name)
	}
	return cmd
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
		case len(chosen) != 1 || chosen[0].Name != memoryExperiment:
			return measure.Options{}, usagef("--pid is for pincheck bench %s alone", memoryExperiment)
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
		if len(chosen) != 1 || chosen[0].Name != memoryExperiment || f.pid > 0 {
			return measure.Options{}, usagef("--python is for pincheck bench %s alone, without --pid", memoryExperiment)
		}
		if cmd.Flags().Changed("sim") {
			return measure.Options{}, usagef("--python and --sim exclude each other: PyTorch has no simulated GPU")
		}
		if _, err := exec.LookPath(f.python); err != nil {
			return measure.Options{}, usagef("--python: %w", err)
		}
	}
	frames, err := f.frames.validate(cmd, chosen)
	return measure.Options{Quick: f.quick, Duration: f.duration, Sizes: f.sizes, Frames: frames, Python: f.python}, err
}

func experimentNames(all []measure.Experiment) []string {
	names := make([]string, 0, len(all)+1)
	for _, e := range all {
		names = append(names, e.Name)
	}
	return names
}

// listExperiments writes the list, as text.
func listExperiments(cmd *cobra.Command, o *options, sys system) error {
	format, err := o.validate()
	if err != nil {
		return err
	}
	if format != report.Text || o.output != "" {
		return usagef("the list of experiments is text on standard output: name one, or all")
	}
	var entries [][2]string
	for _, e := range sys.experiments {
		entries = append(entries, [2]string{e.Name, e.Short})
	}
	entries = append(entries, [2]string{"all", "all of these, one after the other"})
	out := cmd.OutOrStdout()
	if err := report.WriteList(out, entries, report.StyleFor(out, sys.getenv)); err != nil {
		return outputError{err}
	}
	return nil
}

// chooseExperiments returns the experiments with these names, in their order in all.
func chooseExperiments(known []measure.Experiment, args []string) (chosen []measure.Experiment, all bool, err error) {
	names := experimentNames(known)
	for _, name := range args {
		if name != "all" && !slices.Contains(names, name) {
			hint := ""
			if closest := nearest(name, append(names, "all")); closest != "" {
				hint = fmt.Sprintf("; did you mean %s?", closest)
			}
			return nil, false, usagef("unknown experiment %q%s (experiments are %s and all)", name, hint, strings.Join(names, ", "))
		}
	}
	all = slices.Contains(args, "all")
	for _, e := range known {
		if all || slices.Contains(args, e.Name) {
			chosen = append(chosen, e)
		}
	}
	return chosen, all, nil
}

// nearest returns the name with the lowest edit distance, if that is below 3, or "".
func nearest(name string, names []string) string {
	best, fewest := "", 3
	for _, n := range names {
		if d := distance(strings.ToLower(name), n); d < fewest && d < len(n) {
			best, fewest = n, d
		}
	}
	return best
}

// distance returns the edit distance (Levenshtein) between a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
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
		if s.sys.expect != nil && !s.sim { // the simulated GPU is none of those
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
