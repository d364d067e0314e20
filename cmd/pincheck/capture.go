package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
)

// captureFile is written unless --output names another file.
const captureFile = "pincheck-capture.tar.gz"

func newCapture(o *options, sys system) *cobra.Command {
	var withNames bool
	cmd := newCommand("capture")
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
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
	}
	o.share(cmd, onGPUs, []string{"output", "quiet"}, ofFindings)
	cmd.Flags().Lookup("output").Usage = "write to FILE, atomically (default: " + captureFile + ")"
	cmd.Flags().BoolVar(&withNames, "with-names", false, "keep names, addresses and UUIDs")
	return cmd
}

// captured is facts.json in an archive: the facts without the host, whose files are there, and the
// errors of the run, without which --from would come to another verdict.
type captured struct {
	doctor.Facts
	Errors []string `json:"errors,omitempty"`
}

// writeArchive writes the archive, and returns the verdict as check does. An interrupted run has
// fewer facts in it.
func (s *session) writeArchive(recorder *hostinfo.Recorder, withNames bool) error {
	a := &capture.Archive{Host: recorder.Host()}
	if s.result.Facts != nil || !s.result.Complete || len(s.result.Errors) > 0 {
		facts := captured{doctor.Facts{Devices: []doctor.Device{}}, s.result.Errors}
		if s.result.Facts != nil {
			facts.Facts = *s.result.Facts
			a.Environ = capture.Environ(facts.Host)
		}
		facts.Host = nil // the files are in the archive
		facts.Stopped = s.result.Stopped
		facts.ExpectedGPUs, facts.ExpectedRate = 0, 0 // are asked for anew
		text, err := json.MarshalIndent(&facts, "", "  ")
		if err != nil {
			return outputError{err}
		}
		a.Facts = append(text, '\n')
	}
	a = a.WithoutSecrets()
	if !withNames {
		a = a.WithoutNames(s.names())
	}
	var b bytes.Buffer
	err := capture.Write(&b, a)
	if err == nil {
		err = writeFile(s.output, b.Bytes())
	}
	if err != nil {
		return outputError{fmt.Errorf("--output: %w", err)}
	}
	if !s.quiet {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "written: %s\n", printable.Line(s.output))
	}
	for _, text := range s.result.Errors {
		complain(s.cmd.ErrOrStderr(), s.cmd, errors.New(text))
	}
	s.result.Conclude(true, s.ignore...)
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

// A stoppedRun is the error for an archive of an interrupted run. It has the reason.
type stoppedRun string

func (s stoppedRun) Error() string { return "the run of this archive was ended: " + string(s) }
