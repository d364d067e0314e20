package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

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

// usageError is a mistake in how the command was called.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// outputError is a result that could not be written.
type outputError struct{ error }

func (e outputError) Unwrap() error { return e.error }

// afterWriting makes an error of writing an outputError.
func afterWriting(err error) error {
	if err != nil {
		return outputError{err}
	}
	return nil
}

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
func exitCode(cmd *cobra.Command, err error, stderr io.Writer) int {
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
		complain(stderr, cmd, err)
		if ended.interrupted {
			return exitInterrupted
		}
		return exitIncomplete
	case errors.Is(err, syscall.EPIPE):
		return exitOutput // its reader has seen enough, as in pincheck schema | head
	case errors.As(err, &output):
		complain(stderr, cmd, err)
		return exitOutput
	case errors.As(err, &usage):
		complain(stderr, cmd, err)
		if text := err.Error(); !strings.Contains(text, "Did you mean") && !strings.Contains(text, "\n") {
			fmt.Fprintf(stderr, "For help, run: %s --help\n", cmd.CommandPath())
		}
		return exitUsage
	}
	complain(stderr, cmd, err)
	return exitProblems
}

// complain prints an error of a command, which may quote text from outside.
func complain(stderr io.Writer, cmd *cobra.Command, err error) {
	fmt.Fprintf(stderr, "%s: %s\n", cmd.CommandPath(), printable.Text(err.Error()))
}
