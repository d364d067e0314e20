package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// npdStatus is the outcome of a run with --npd, which has printed its message.
type npdStatus int

func (s npdStatus) Error() string { return fmt.Sprintf("status %d for node-problem-detector", int(s)) }

// writeNPD prints a result for node-problem-detector. A message that cannot be printed
// makes the status unknown.
func writeNPD(w io.Writer, r *report.Result) error {
	message, status := report.NPD(r)
	if _, err := fmt.Fprintln(w, message); err != nil {
		return npdStatus(report.NPDUnknown)
	}
	return npdStatus(status)
}

// asksForNPD reports whether the arguments have --npd, also where they are wrong.
func asksForNPD(args []string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		name, value, _ := strings.Cut(arg, "=")
		on, err := strconv.ParseBool(value)
		return name == "--npd" && (err != nil || on)
	})
}

// npdFailed prints why there is no result. Nothing is known of the node then, so the
// status is unknown whatever the error.
func npdFailed(w io.Writer, err error) error {
	var status npdStatus
	if err == nil || errors.As(err, &status) {
		return err
	}
	fmt.Fprintln(w, report.NPDError(err)) // the status says what a lost message would
	return npdStatus(report.NPDUnknown)
}
