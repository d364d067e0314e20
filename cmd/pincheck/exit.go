package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/gopinned/pinned/internal/doctor"
)

// The exit codes.
const (
	exitHealthy     = 0
	exitProblems    = 1
	exitUsage       = 2
	exitNoGPU       = 3
	exitInterrupted = 130
)

const exitHelp = `Exit codes:
  0    healthy
  1    problems found
  2    wrong usage
  3    no usable GPU
  130  interrupted`

// usageError is a mistake in how the command was called.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// judged is the outcome of a command that wrote its result.
type judged struct{ verdict doctor.Verdict }

func (j judged) Error() string { return string(j.verdict) }

// noGPUError is an outcome without a result, on platforms without CUDA.
type noGPUError struct{ err error }

func (e noGPUError) Error() string { return e.err.Error() }
func (e noGPUError) Unwrap() error { return e.err }

// exitCode returns the exit code for the error of a command, and prints the error to
// stderr unless the command has written a result.
func exitCode(ctx context.Context, err error, stderr io.Writer) int {
	var (
		verdict judged
		usage   usageError
		noGPU   noGPUError
		npd     npdStatus
	)
	switch {
	case err == nil:
		return exitHealthy
	case errors.As(err, &npd):
		return int(npd)
	case errors.As(err, &verdict):
		switch verdict.verdict {
		case doctor.Healthy:
			return exitHealthy
		case doctor.NoGPU:
			return exitNoGPU
		}
		return exitProblems
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "pincheck: interrupted: %v\n", err)
		return exitInterrupted
	case errors.As(err, &noGPU):
		fmt.Fprintf(stderr, "pincheck: %v\n", err)
		return exitNoGPU
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "pincheck: %v\nTry 'pincheck --help'.\n", err)
		return exitUsage
	}
	fmt.Fprintf(stderr, "pincheck: %v\n", err)
	return exitProblems
}
