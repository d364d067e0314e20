package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// referenceFormat is the format of pincheck bench that is a file of the reference table.
const referenceFormat = "reference"

// referenceBench is the experiment that the table is about.
const referenceBench = "bandwidth"

// expectedRates returns what the devices of an Env can be expected to reach.
func expectedRates(env measure.Env) func(*result.Series) *result.Expected {
	var gpus []reference.GPU
	for _, d := range env.Devices {
		gpus = append(gpus, reference.GPU{Label: strconv.Itoa(d.Ordinal()), Name: d.Name(), PCIBusID: d.PCIBusID()})
	}
	return reference.New(env.Host, gpus)
}

// produceReference runs bench, and writes this machine's file of the reference table. A machine that cannot have one
// has a failed run, of which nothing is written but the error.
func (o *options) produceReference(cmd *cobra.Command, sys system, do func(context.Context, *session) error) error {
	s, err := o.fill(cmd, sys, "bench", do)
	if err != nil {
		return err
	}
	s.result.Conclude(false, o.ignore...)
	text, err := referenceOf(s.result)
	if err != nil {
		s.result.Errors = append(s.result.Errors, err.Error())
		s.result.Conclude(false, o.ignore...)
		complain(cmd.ErrOrStderr(), cmd, fmt.Errorf("no reference is written: %w", err))
	} else if err := s.emit(cmd, sys, func(w io.Writer, _ report.Style) error {
		_, err := w.Write(printable.JSON(text))
		return err
	}); err != nil {
		return err
	}
	return verdictError{s.result, s.failOn(), cmd.Context().Err() != nil}
}

// referenceOf returns the file of the machine of a result. It has nothing that tells one machine of this type from
// another.
func referenceOf(r *report.Result) ([]byte, error) {
	at := slices.IndexFunc(r.Benches, func(b result.Bench) bool { return b.Name == referenceBench })
	switch {
	case !r.Complete:
		return nil, fmt.Errorf("the run is incomplete: %s", r.Stopped)
	case r.Facts == nil || len(r.Devices) == 0:
		return nil, errors.New("there is no GPU (run pincheck to learn why)")
	case at < 0:
		return nil, fmt.Errorf("the experiment %s did not run: %s", referenceBench, strings.Join(r.Errors, "; "))
	case len(r.Benches[at].Errors) > 0:
		return nil, errors.New(r.Benches[at].Errors[0])
	}
	linkByCopies(r)
	m := r.Facts.Machine(&r.Devices[0])
	for i := range r.Devices {
		if other := r.Facts.Machine(&r.Devices[i]); other != m {
			return nil, fmt.Errorf("GPU %d is %v, and GPU %d %v: name those of one type with --device", r.Devices[0].Ordinal, m, r.Devices[i].Ordinal, other)
		}
	}
	if r.Simulated {
		m.Driver = "simulated"
	}
	f, err := reference.Make(m, &r.Benches[at], strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Tool.Name, r.Tool.Version, r.Tool.Revision)))
	if err != nil {
		return nil, err
	}
	return f.JSON()
}

// linkByCopies gives the GPUs of a result the copies of the experiment bandwidth where they have none of a check: by
// them the doctor detects a link that was read when it slept again.
func linkByCopies(r *report.Result) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Bandwidth != nil {
			continue
		}
		d.Bandwidth = &result.Bench{}
		for _, b := range r.Benches {
			for _, s := range b.Series {
				if direction := s.Labels.Get(result.Direction); b.Name == referenceBench && s.Name == b.Name && s.Labels.Get(result.Device) == strconv.Itoa(d.Ordinal) &&
					(direction == result.HostToDevice || direction == result.DeviceToHost) {
					d.Bandwidth.Series = append(d.Bandwidth.Series, s)
				}
			}
		}
	}
}

// judgeFiles compares the one result in files with the reference table, or with the files of the table among them.
func judgeFiles(names []string, stdin io.Reader) (*compare.Comparison, error) {
	var run *report.Result
	var file string
	var references []*reference.File
	runs := 0
	for _, name := range names {
		documents, err := readFile(name, stdin, func(r io.Reader) ([]report.Judged, error) { return report.ReadJudged(name, r) })
		if err != nil {
			return nil, usagef("%s: %w", name, err)
		}
		for _, d := range documents {
			if d.Reference != nil {
				references = append(references, d.Reference)
			} else {
				run, file, runs = d.Result, name, runs+1
			}
		}
	}
	if runs != 1 {
		return nil, usagef("--reference compares one run of pincheck bench --format json, and these files have %d", runs)
	}
	table := reference.Builtin()
	if len(references) > 0 {
		var err error
		if table, err = reference.NewTable(references...); err != nil {
			return nil, usageError{err}
		}
	}
	document, err := run.Document()
	switch {
	case err != nil:
		return nil, usagef("%s: %w", file, err)
	case run.Facts == nil || len(run.Devices) == 0:
		return nil, usagef("%s: it has no GPU", file)
	case run.Simulated && references == nil:
		return nil, usagef("%s: is of a simulated GPU, which the reference table does not have: add a file of pincheck bench --sim --format reference", file)
	}
	linkByCopies(run)
	c, err := compare.Judge(compare.Runs([]compare.File{{Name: file, Documents: []compare.Document{document}}})[0], tableName(references), 1-doctor.LowShare,
		func(s *result.Series) *result.Expected {
			for i := range run.Devices {
				if d := &run.Devices[i]; s.Labels.Get(result.Device) == strconv.Itoa(d.Ordinal) {
					return run.Expected(table, d, s)
				}
			}
			return nil
		})
	if err != nil {
		return nil, usagef("%s: %v: %w", file, run.Facts.Machine(&run.Devices[0]), err)
	}
	return c, nil
}

// tableName names the files of a table, none for that of this program.
func tableName(files []*reference.File) string {
	var names []string
	for _, f := range files {
		names = append(names, f.Name)
	}
	return cmp.Or(strings.Join(names, ", "), "the table of "+tool().Name)
}
