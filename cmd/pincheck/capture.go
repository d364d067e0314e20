package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// captureFile is written unless --output names another file.
const captureFile = "pincheck-capture.tar.gz"

func newCapture(o *options, sys system) *cobra.Command {
	var withNames bool
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "Write what the checks read into a small archive, to diagnose it elsewhere",
		Long: `capture does what pincheck does, and writes what was read and measured into
an archive: ` + captureFile + `, unless --output names another file.
pincheck --from FILE comes to the same findings, on any machine.

Names of the host and its users, home directories, IP and MAC addresses and the
UUIDs of GPUs are replaced. Serial numbers are not read.

` + exitHelp,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.output == "" {
				o.output = captureFile
			}
			recorder := hostinfo.Record(sys.root)
			sys.processes, sys.root = sys.root, recorder
			s, err := o.fill(cmd, sys, "capture", func(ctx context.Context, s *session) error {
				return s.check(ctx, probe.Steps{Verify: true, Bandwidth: true})
			})
			if err != nil {
				return err
			}
			return s.writeArchive(recorder, withNames)
		},
	}
	cmd.Flags().BoolVar(&withNames, "with-names", false, "keep the names, addresses and UUIDs")
	return cmd
}

// writeArchive writes the archive. An interrupted run has fewer facts in it.
func (s *session) writeArchive(recorder *hostinfo.Recorder, withNames bool) error {
	a := &capture.Archive{Host: recorder.Host()}
	if s.result.Facts != nil || !s.result.Complete {
		facts := doctor.Facts{Devices: []doctor.Device{}}
		if s.result.Facts != nil {
			facts = *s.result.Facts
			a.Environ = capture.Environ(facts.Host)
		}
		facts.Host = nil // the files are in the archive
		facts.Stopped = s.result.Stopped
		text, err := json.MarshalIndent(&facts, "", "  ")
		if err != nil {
			return outputError{err}
		}
		a.Facts = append(text, '\n')
	}
	if !withNames {
		a = a.WithoutNames(s.names())
	}
	var b bytes.Buffer
	err := capture.Write(&b, a)
	if err == nil {
		err = report.WriteFile(s.output, b.Bytes())
	}
	if err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	if !s.quiet {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "written: %s\n", s.output)
	}
	for _, text := range s.result.Errors {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "pincheck: %s\n", text)
	}
	if s.result.Complete {
		return nil
	}
	s.result.Conclude(false)
	return verdictError{s.result, s.failOn(), s.cmd.Context().Err() != nil}
}

// names returns the names of this machine and its user, which the archive replaces.
func (s *session) names() (n capture.Names) {
	if s.sys.hostname != nil {
		if name, err := s.sys.hostname(); err == nil {
			n.Hosts = append(n.Hosts, name)
		}
	}
	for _, variable := range []string{"USER", "LOGNAME", "SUDO_USER"} {
		n.Users = append(n.Users, s.sys.getenv(variable))
	}
	if home := s.sys.getenv("HOME"); home != "" {
		n.Users = append(n.Users, path.Base(home))
	}
	return n
}

// readArchive puts the facts of an archive into the result.
func (s *session) readArchive() error {
	file, err := os.Open(s.from)
	if err != nil {
		return usagef("--from: %w", err)
	}
	defer file.Close()
	a, err := capture.Read(file)
	if err != nil {
		return usagef("--from %s: %w", s.from, err)
	}
	facts, err := doctor.FromCapture(hostinfo.Read(a.Host, a.Environ), a.Facts)
	if err != nil {
		return usagef("--from %s: %w", s.from, err)
	}
	s.result.HostName = "" // it is another's
	s.setFacts(facts)
	if facts.Stopped != "" {
		return stoppedRun(facts.Stopped)
	}
	return nil
}

// A stoppedRun is the error for an archive of an interrupted run. It has the reason.
type stoppedRun string

func (s stoppedRun) Error() string { return "the run of this archive was ended: " + string(s) }
