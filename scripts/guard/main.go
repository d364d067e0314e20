package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := run(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
	}
	os.Exit(code)
}

const exitUsage = 64

func run(ctx context.Context, args []string) (code int, err error) {
	command := ""
	if len(args) > 0 {
		command, args = args[0], args[1:]
	}
	flags := flag.NewFlagSet("guard "+command, flag.ContinueOnError)
	simulate := flags.Bool("sim", false, "simulated GPUs, and small sizes")
	simGPUs := flags.Int("sim-gpus", 2, "the number of simulated GPUs")
	dir := flags.String("dir", "", "a folder for files, which others use too (default: one of its own)")
	sampleTime := flags.Duration("sample-time", 0, "the time of a sample, in place of the row's own")
	// sim is the number of simulated GPUs, 0 for real ones, and is known when the flags are parsed.
	sim := func() int {
		if !*simulate {
			return 0
		}
		return *simGPUs
	}
	switch command {
	case "serve":
		if err := flags.Parse(args); err != nil {
			return exitUsage, nil
		}
		f := newFixture(context.Background(), sim(), *dir)
		f.sampleTime = *sampleTime
		return status(serve(f, registered, os.Stdin, os.Stdout))
	case "once":
		verify := flags.Bool("verify", false, "compare the bytes, too")
		if err := flags.Parse(args); err != nil || flags.NArg() != 1 {
			return exitUsage, err
		}
		f := newFixture(context.Background(), sim(), *dir)
		f.verify = *verify
		return status(once(f, registered, flags.Arg(0), os.Stdout))
	case "rows":
		for _, r := range registered {
			fmt.Println(r.name)
		}
		return 0, nil
	case "load":
		threads, err := strconv.Atoi(append(args, "")[0])
		if err != nil {
			return exitUsage, err
		}
		return status(copyMemory(threads, os.Stdin))
	case "compare":
		return compareCommand(ctx, flags, sim, dir, sampleTime, args)
	case "table":
		return tableCommand(ctx, flags, sim, dir, sampleTime, args)
	}
	return exitUsage, errors.New("want compare, table, serve, once, rows or load: the package's documentation says what they do")
}

func status(err error) (int, error) {
	if err != nil {
		return exitFailed, err
	}
	return 0, nil
}

// copyMemory copies memory on threads until in ends.
func copyMemory(threads int, in io.Reader) error {
	for range threads {
		go func() {
			from, to := make([]byte, 64*mib), make([]byte, 64*mib)
			for {
				copy(to, from)
			}
		}()
	}
	_, err := io.Copy(io.Discard, in)
	return err
}

// startLoad has a process copy memory on half of the cores.
func startLoad(path string) (stop func() error, err error) {
	cmd := exec.Command(path, "load", strconv.Itoa(max(runtime.NumCPU()/2, 1)))
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		_ = in.Close() // it ends, but not soon where it uses all cores
		err := cmd.Process.Kill()
		_ = cmd.Wait()
		return err
	}, nil
}

func compareCommand(ctx context.Context, flags *flag.FlagSet, sim func() int, dir *string, sampleTime *time.Duration, args []string) (code int, err error) {
	oldPath := flags.String("old", "", "the guard of the earlier commit")
	newPath := flags.String("new", "", "the guard of the later commit")
	cDir := flags.String("c", "", "a folder with programs of testdata/baseline")
	rows := flags.String("rows", "", "only rows whose names match this regular expression")
	quick := flags.Bool("quick", false, "the most telling rows on all cores, in a third of the time")
	samples := flags.Int("samples", minPairs, "pairs of samples of each row, at least; 8 or more")
	budget := flags.Duration("time", 0, "the time for all of it, about (default 6m, or 2m with -quick)")
	out := flags.String("out", "", "a file for the result as JSON")
	if err := flags.Parse(args); err != nil {
		return exitUsage, nil
	}
	only, err := regexp.Compile(*rows)
	switch {
	case err != nil:
		return exitUsage, fmt.Errorf("-rows: %w", err)
	case *oldPath == "" || *newPath == "" || flags.NArg() > 0 || *samples < minPairs || *budget < 0:
		flags.Usage()
		return exitUsage, nil
	}
	if *budget == 0 {
		if *budget = 6 * time.Minute; *quick {
			*budget = 2 * time.Minute
		}
	}
	if *dir, err = os.MkdirTemp(*dir, "pinned-guard-"); err != nil {
		return exitFailed, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(*dir), os.RemoveAll(shmFolder(*dir))) }()
	childArgs := childArgs(sim(), *dir, *sampleTime)
	c := &comparison{
		start: func(ctx context.Context, b build, v variant) (side, error) {
			s, err := startChild(ctx, map[build]string{oldBuild: *oldPath, newBuild: *newPath}[b], v.cpus, childArgs...)
			if err != nil {
				return nil, err
			}
			return s, nil
		},
		load: func() (func() error, error) { return startLoad(*newPath) },
		c:    (&baseline{dir: *cDir, files: *dir, quick: *quick, outputs: map[string][]line{}, errs: map[string]error{}}).lines,
		now:  time.Now, log: os.Stderr,
		rows: only, quick: *quick, pairs: *samples, budget: *budget,
	}
	result, err := c.run(ctx)
	if err != nil {
		return exitFailed, err
	}
	r := reportOf(result, readHost())
	r.writeText(os.Stdout)
	if *out != "" {
		if err := writeJSON(*out, r); err != nil {
			return exitFailed, err
		}
	}
	return r.exitCode(), nil
}

// childArgs are the arguments of processes that measure.
func childArgs(simGPUs int, dir string, sampleTime time.Duration) []string {
	args := []string{"-dir", dir, "-sample-time", sampleTime.String()}
	if simGPUs > 0 {
		args = append(args, "-sim", "-sim-gpus", strconv.Itoa(simGPUs))
	}
	return args
}

// writeJSON writes a result as a line of JSON into a file, whose folder it makes.
func writeJSON(path string, result any) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	out := json.NewEncoder(file)
	out.SetEscapeHTML(false)
	return errors.Join(out.Encode(result), file.Close())
}
