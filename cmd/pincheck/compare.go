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
	cmd := newCommand("compare FILE... [flags]")
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usagef("name two or more files, or one with several results")
		}
		return nil
	}
	cmd.ValidArgsFunction = cobra.FixedCompletions([]string{"json", "jsonl"}, cobra.ShellCompDirectiveFilterFileExt)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		format, err := o.validate(report.ComparisonFormats()...)
		if err != nil {
			return err
		}
		if judge && cmd.Flags().Changed("threshold") {
			return usagef("--threshold and --reference exclude each other: with a reference the threshold is that of pincheck check")
		}
		c, err := until(o, cmd, func() (*compare.Comparison, error) {
			if judge {
				return judgeFiles(args, cmd.InOrStdin())
			}
			files, err := readFiles(args, cmd.InOrStdin())
			if err != nil {
				return nil, usageError{err}
			}
			c, err := compare.Compare(compare.Runs(files), threshold/100)
			if err != nil {
				return nil, usageError{err}
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
	}
	o.share(cmd, []string{"output", "timeout"})
	o.formats(cmd, report.ComparisonFormats()...)
	cmd.Flags().Lookup("timeout").Usage = "give up after TIME, such as 30s"
	cmd.Flags().Float64Var(&threshold, "threshold", threshold, "smallest relevant difference")
	named(cmd.Flags(), "threshold", "PERCENT")
	cmd.Flags().BoolVar(&judge, "reference", false, "compare one run with the reference table")
	cmd.Flags().BoolVar(&all, "all", false, "list series without a difference too")
	return cmd
}

func readFiles(names []string, stdin io.Reader) ([]compare.File, error) {
	var files []compare.File
	for _, name := range names {
		documents, err := readFile(name, stdin, report.ReadDocuments)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
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
