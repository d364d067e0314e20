package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/supportfile"
)

// offerTickets adds the format ticket to the help of --format.
func offerTickets(cmd *cobra.Command) {
	f := cmd.Flags().Lookup("format")
	f.Usage = strings.Replace(f.Usage, " or html", ", html, or ticket (the gravest finding in a few lines)", 1)
}

// sources are the files of --from: an archive, texts, or both.
type sources struct {
	archive *capture.Archive
	name    string // of the archive
	texts   supportfile.Collection
}

// readSources puts the facts of the files of --from into the result.
func (s *session) readSources() error {
	if unused := given(s.cmd, "device", "library", "sim"); len(unused) > 0 {
		return usagef("--from excludes %s: files are read, and no GPU is used", strings.Join(unused, ", "))
	}
	var all sources
	for _, name := range s.from {
		if _, err := readFile(name, s.cmd.InOrStdin(), all.read(name)); err != nil {
			return usagef("--from %s: %w", name, err)
		}
	}
	facts, err := s.factsOf(&all)
	if err != nil {
		return err
	}
	s.result.HostName = "" // it is another's
	s.setFacts(facts)
	if all.texts.Cut && !s.quiet {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "--from: a file is cut off; pincheck used the part that is there\n")
	}
	if err := s.checkExpectation(facts); err != nil {
		return err
	}
	if facts.Stopped != "" {
		return stoppedRun(facts.Stopped)
	}
	return nil
}

// read returns a reader of one file.
func (all *sources) read(name string) func(io.Reader) (struct{}, error) {
	return func(r io.Reader) (none struct{}, err error) {
		buffered := bufio.NewReaderSize(r, supportfile.Peeked)
		if first, _ := buffered.Peek(1); string(first) == "{" {
			return none, fmt.Errorf("this is a result file, not an archive of pincheck\ncapture. To show it, run: pincheck report %s", name)
		}
		if err = all.texts.Read(buffered); !errors.Is(err, supportfile.ErrArchive) {
			return none, err
		}
		if all.archive != nil {
			return none, fmt.Errorf("a second archive beside %s: they are of different runs", all.name)
		}
		all.archive, err = capture.Read(buffered)
		all.name = name
		return none, err
	}
}

// factsOf returns the facts of the files. Beside an archive, which has all that its run read, texts add the kernel's
// log alone.
func (s *session) factsOf(all *sources) (*doctor.Facts, error) {
	a := all.archive
	if a == nil {
		host := hostinfo.Read(all.texts.Files(), nil)
		facts, err := doctor.FromTexts(host, all.texts.NVML(), all.texts.Mismatch, all.texts.Kinds()...)
		if err != nil {
			return nil, usagef("--from: %w", err)
		}
		return facts, nil
	}
	facts, err := doctor.FromCapture(hostinfo.Read(a.Files(), a.Environ), a.Facts)
	if err != nil {
		return nil, usagef("--from %s: %w", all.name, err)
	}
	var run struct{ Errors []string }
	if len(a.Facts) > 0 {
		if err := json.Unmarshal(a.Facts, &run); err != nil {
			return nil, usagef("--from %s: facts.json: %w", all.name, err)
		}
	}
	s.change(func(r *report.Result) { r.Errors = append(r.Errors, run.Errors...) })
	if len(all.texts.Kinds()) > 0 && len(facts.Host.KernelLog.Events) == 0 {
		facts.Host.KernelLog = hostinfo.Read(all.texts.Files(), nil).KernelLog
	}
	return facts, nil
}
