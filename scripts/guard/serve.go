package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// A reply answers a command: a line of JSON.
type reply struct {
	// Error is why it failed; LeftOut says that the row cannot be measured on this host at all.
	Error   string  `json:"error,omitempty"`
	LeftOut bool    `json:"left_out,omitempty"`
	Hello   *hello  `json:"hello,omitempty"`
	Sample  *sample `json:"sample,omitempty"`
}

// A hello is what a process says of itself when it starts.
type hello struct {
	Commit  string    `json:"commit"` // and what was planted
	Go      string    `json:"go"`
	Cores   int       `json:"cores"` // GOMAXPROCS
	GPUs    []string  `json:"gpus"`
	Library string    `json:"library"`
	Driver  string    `json:"driver"` // the newest CUDA version that the driver supports
	Rows    []rowInfo `json:"rows"`
}

// A rowInfo is what another process has to know of a row.
type rowInfo struct {
	Name     string            `json:"name"`
	Quick    bool              `json:"quick,omitempty"`
	Once     bool              `json:"once,omitempty"`
	TwoCores bool              `json:"two_cores,omitempty"`
	Busy     bool              `json:"busy,omitempty"`
	C        map[string]string `json:"c,omitempty"`
	Of       string            `json:"of,omitempty"`
	GPUs     int               `json:"gpus,omitempty"`
	// TableOnly and Goals are those of the row.
	TableOnly bool   `json:"table_only,omitempty"`
	Goals     []goal `json:"goals,omitempty"`
}

// commit is set by -ldflags "-X main.commit=...".
var commit = "unknown"

func helloOf(f *fixture, rows []row) *hello {
	h := &hello{Commit: commit, Go: runtime.Version(), Cores: runtime.GOMAXPROCS(0)}
	if planted != "0" {
		h.Commit += " slowed down by " + planted + " %"
	}
	for _, dev := range f.rt.Devices() {
		h.GPUs = append(h.GPUs, dev.Name())
	}
	library := f.rt.Library()
	h.Library, h.Driver = fmt.Sprintf("%s (%v)", library.Path, library.Runtime), library.Driver.String()
	for _, r := range rows {
		h.Rows = append(h.Rows, rowInfo{r.name, r.quick, r.once != nil, r.twoCores, r.busy, r.c, r.of, r.gpus, r.tableOnly, r.goals})
	}
	return h
}

// serve answers commands, each a line, until there are no more:
//
//	prepare ROW    make it ready, and verify that it does what it should
//	sample ROW     measure it
//	close ROW      release what it has
//
// Several rows may be ready at a time. A hello comes before the first answer.
func serve(f *fixture, rows []row, in io.Reader, out io.Writer) (err error) {
	replies := json.NewEncoder(out)
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.open(); err != nil {
		return replies.Encode(replyOf(nil, err))
	}
	if err := replies.Encode(reply{Hello: helloOf(f, rows)}); err != nil {
		return err
	}
	s := server{f: f, rows: map[string]row{}, ready: map[string]*task{}}
	for _, r := range rows {
		s.rows[r.name] = r
	}
	defer func() {
		for name := range s.ready {
			_, failed := s.do("close", name)
			err = errors.Join(err, failed)
		}
	}()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		command, name, _ := strings.Cut(lines.Text(), " ")
		if err := replies.Encode(replyOf(s.do(command, name))); err != nil {
			return err
		}
	}
	return nil
}

func replyOf(s *sample, err error) reply {
	if err == nil {
		return reply{Sample: s}
	}
	var why leftOut
	return reply{Error: err.Error(), LeftOut: errors.As(err, &why)}
}

// A server has the rows that are ready.
type server struct {
	f     *fixture
	rows  map[string]row
	ready map[string]*task
}

func (s *server) do(command, name string) (_ *sample, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	r, known := s.rows[name]
	t := s.ready[name]
	switch {
	case !known:
		return nil, fmt.Errorf("no row %q", name)
	case command == "prepare" && r.gpus > s.f.rt.DeviceCount():
		return nil, leftOut(fmt.Sprintf("needs %d GPUs", r.gpus))
	case command == "prepare" && t == nil && r.prepare != nil:
		if t, err = r.prepare(s.f); err != nil {
			return nil, err
		}
		s.ready[name] = t
		if err := t.verify(); err != nil {
			_, closing := s.do("close", name)
			return nil, errors.Join(fmt.Errorf("verify: %w", err), closing)
		}
		return nil, nil
	case command == "sample" && t != nil:
		result, err := measure(r, t, s.f.timeOf(r))
		if err != nil {
			return nil, err
		}
		return &result, nil
	case command == "close" && t != nil:
		delete(s.ready, name)
		if t.close != nil {
			return nil, t.close()
		}
		return nil, nil
	}
	return nil, fmt.Errorf("%s %s: cannot be done now", command, name)
}

// timeOf is the time of a sample of a row.
func (f *fixture) timeOf(r row) time.Duration {
	return cmp.Or(f.sampleTime, r.target, 30*time.Millisecond)
}

// once measures a row about first calls, and writes one answer.
func once(f *fixture, rows []row, name string, out io.Writer) error {
	replied := reply{Error: fmt.Sprintf("no row %q about first calls", name)}
	for _, r := range rows {
		if r.name == name && r.once != nil {
			s, err := r.once(f)
			replied = replyOf(&s, errors.Join(err, f.close()))
		}
	}
	return json.NewEncoder(out).Encode(replied)
}
