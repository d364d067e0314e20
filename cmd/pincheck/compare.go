package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func newCompare(o *options, sys system) *cobra.Command {
	threshold, all, judge := 3.0, false, false
	cmd := &cobra.Command{
		Use:   "compare A.json B.json ...",
		Short: "Say what differs between runs or hosts by more than chance",
		Long: `compare reads what pincheck bench --format json wrote, and what nvbandwidth -j
wrote (0.8 or later). A file may hold several documents, one after the other,
such as JSON lines of a fleet. - is the standard input.

Of two runs, the first is the measure for the second. A series is worse or
better if its medians differ by more than --threshold, and by more than runs of
one machine do: by the scatter of the samples, by what such runs were seen to
differ, and by how busy the machine was, as each run shows. Of a hundred
comparisons of one machine with itself, over all series together, at most one
finds a difference. Several runs of one side in a file are surer than one.

Runs of the simulated GPU are shown, and get no verdict.

Of three or more runs, one a host, those hosts are named that are out of line
with the others, by the same measure and by the scatter of the hosts.

With --reference one run is judged by what such machines reach, as pincheck
itself does: a series is worse below 90 % of its row in the reference table, and
better above the inverse. Where files of the table are named with the run, they
are the table; pincheck bench --format reference writes one.

Exit codes:
  0  nothing is worse, and no host is out of line for the worse
  1  a series of the second run is worse, or a host is out of line for the worse
Others are those of wrong usage, of which a file that cannot be read is a case,
and of output that cannot be written: see pincheck --help.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("compare: name two or more files, or one of several documents")
			}
			return nil
		},
		ValidArgsFunction: cobra.FixedCompletions([]string{"json", "jsonl"}, cobra.ShellCompDirectiveFilterFileExt),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := o.validate()
			if err != nil {
				return err
			}
			if format != report.Text && format != report.JSON {
				return usagef("compare writes text or json, not %s", format)
			}
			if judge && cmd.Flags().Changed("threshold") {
				return usagef("compare: --threshold and --reference exclude each other: a reference counts as for pincheck")
			}
			c, err := until(o, cmd, func() (*compare.Comparison, error) {
				if judge {
					return judgeFiles(args, cmd.InOrStdin())
				}
				files, err := readFiles(args, cmd.InOrStdin())
				if err != nil {
					return nil, usageError{err}
				}
				c, err := compare.Compare(compare.Runs(files), compare.Options{Threshold: threshold / 100})
				if err != nil {
					return nil, usagef("compare: %w", err)
				}
				return c, nil
			})
			if err != nil {
				return err
			}
			if err := o.emit(cmd, sys, func(w io.Writer, style report.Style) error {
				return report.WriteComparison(w, c, tool(), format, style, all)
			}); err != nil {
				return err
			}
			if c.Verdict == compare.Worse {
				return verdictError{result: &report.Result{Verdict: doctor.Problems}}
			}
			return nil
		},
	}
	cmd.Flags().Float64Var(&threshold, "threshold", threshold, "least relevant difference in `per cent`")
	cmd.Flags().BoolVar(&judge, "reference", false, "judge one run by the reference table, or by files of it that are named with the run")
	cmd.Flags().BoolVar(&all, "all", false, "show also what is the same, however much it is")
	return cmd
}

func readFiles(names []string, stdin io.Reader) ([]compare.File, error) {
	var files []compare.File
	for _, name := range names {
		documents, err := readFile(name, stdin, report.ReadDocuments)
		if err != nil {
			return nil, fmt.Errorf("compare: %s: %w", name, err)
		}
		files = append(files, compare.File{Name: name, Documents: documents})
	}
	return files, nil
}

// readFile reads the file of a name, of which - is the standard input. Errors do not repeat the name.
//
// A pipe counts as a file if a program writes to it, as in <(command) of a shell. Without one, opening it would wait.
// Terminals and other devices are refused: they wait for somebody to type, or have no end.
func readFile[T any](name string, stdin io.Reader, read func(io.Reader) (T, error)) (content T, err error) {
	r := stdin
	if name != "-" {
		info, err := os.Stat(name)
		if err != nil {
			return content, withoutPath(err)
		}
		kind := info.Mode().Type()
		switch {
		case kind.IsDir():
			return content, errors.New("is a directory, not a file")
		case !kind.IsRegular() && kind != fs.ModeNamedPipe:
			return content, errors.New("is a terminal, another device or a socket, not a file")
		}
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return content, withoutPath(err)
		}
		defer f.Close()
		buffered := bufio.NewReader(f)
		if _, err := buffered.Peek(1); err == io.EOF && kind == fs.ModeNamedPipe {
			return content, errors.New("is a pipe that no program writes to, not a file")
		}
		r = buffered
	}
	content, err = read(r)
	return content, withoutPath(err)
}

// withoutPath leaves out the path of an error, which the caller names.
func withoutPath(err error) error {
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	return err
}
