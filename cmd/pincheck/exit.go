package main

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// The exit codes. 2 is that of a fatal error of the Go runtime, and no other. Those from
// 64 on are as in sysexits.h.
const (
	exitOK          = 0
	exitProblems    = 1
	exitUnusable    = 3
	exitIncomplete  = 4
	exitWarnings    = 5
	exitUnknown     = 6
	exitUsage       = 64
	exitOutput      = 74
	exitInterrupted = 130
)

const exitHelp = `Exit codes:
  0    healthy, or measured
  1    problems found, or something failed
  3    no usable GPU
  4    incomplete: ended by --timeout, with what was found until then
  5    warnings and no problems (with --fail-on problem 0)
  6    unknown: nothing was found, and of a GPU nothing was measured
  64   wrong usage
  74   the output could not be written
  130  incomplete: interrupted, with what was found until then`

// usageError is a mistake in how the command was called.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// outputError is a result that could not be written.
type outputError struct{ err error }

func (e outputError) Error() string { return e.err.Error() }
func (e outputError) Unwrap() error { return e.err }

// verdictError is the error of a command that has written its result. It has the verdict, which
// decides the exit code.
type verdictError struct {
	result      *report.Result
	failOn      doctor.Severity
	interrupted bool
}

func (v verdictError) Error() string { return string(v.result.Verdict) }

func (v verdictError) code() int {
	switch v.result.Verdict {
	case doctor.Unusable:
		return exitUnusable
	case doctor.Incomplete:
		if v.interrupted {
			return exitInterrupted
		}
		return exitIncomplete
	case "", doctor.Healthy, doctor.Measured, doctor.Unknown, doctor.Warnings:
		if slices.ContainsFunc(v.result.Findings, func(f doctor.Finding) bool { return f.Severity.AtLeast(v.failOn) }) {
			return exitWarnings
		}
		if v.result.Verdict == doctor.Unknown {
			return exitUnknown
		}
		return exitOK
	}
	return exitProblems
}

// exitCode returns the exit code for the error of a command, and prints the error to
// stderr unless the command has written a result.
func exitCode(err error, stderr io.Writer) int {
	var (
		verdict verdictError
		output  outputError
		usage   usageError
		npd     npdStatus
		ended   endedError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &npd):
		return int(npd)
	case errors.As(err, &verdict):
		return verdict.code()
	case errors.As(err, &ended):
		complain(stderr, err)
		if ended.interrupted {
			return exitInterrupted
		}
		return exitIncomplete
	case errors.As(err, &output):
		complain(stderr, err)
		return exitOutput
	case errors.As(err, &usage):
		complain(stderr, err)
		fmt.Fprintln(stderr, "Try 'pincheck --help'.")
		return exitUsage
	}
	complain(stderr, err)
	return exitProblems
}

// complain prints an error, which may quote text from outside.
func complain(stderr io.Writer, err error) {
	fmt.Fprintf(stderr, "pincheck: %s\n", printable.Text(err.Error()))
}
