package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// requestTimeout ends a child that does not reply, such as one that hangs in the driver.
const requestTimeout = 90 * time.Second

// A side is one of the builds that are compared, or a stand-in for it in tests.
type side interface {
	// hello returns what the build has said of itself.
	hello() *hello
	// request sends a command of serve, or "once ROW", and returns the sample if there is one. After an error
	// that is not a reply's the side is of no use any more.
	request(ctx context.Context, command string) (*sample, error)
	close() error
}

// A replyError is why a build could not do a command.
type replyError struct {
	text    string
	leftOut bool
}

func (e replyError) Error() string { return e.text }

// A child is a build that runs as a process: guard serve.
type child struct {
	path  string
	args  []string // of serve and once, behind the subcommand
	cpus  int      // it may run on, 0 for all
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan []byte // of its standard output; closed at the end
	said  *hello
}

// startChild starts a build.
func startChild(ctx context.Context, path string, cpus int, args ...string) (*child, error) {
	c := &child{path: path, args: args, cpus: cpus, lines: make(chan []byte)}
	c.cmd = exec.Command(path, append([]string{"serve"}, args...)...)
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := startOn(c.cmd, cpus); err != nil {
		return nil, err
	}
	c.in = in
	go func() {
		defer close(c.lines)
		scanner := bufio.NewScanner(out)
		scanner.Buffer(nil, 16*mib)
		for scanner.Scan() {
			c.lines <- append([]byte(nil), scanner.Bytes()...)
		}
	}()
	r, err := c.readReply(ctx)
	if err == nil && r.Hello == nil {
		err = errors.New(r.Error)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), c.close())
	}
	c.said = r.Hello
	return c, nil
}

func (c *child) hello() *hello { return c.said }

func (c *child) request(ctx context.Context, command string) (*sample, error) {
	if name, isOnce := strings.CutPrefix(command, "once "); isOnce {
		return c.once(ctx, name)
	}
	if _, err := io.WriteString(c.in, command+"\n"); err != nil {
		return nil, fmt.Errorf("%s: %w", c.path, err)
	}
	r, err := c.readReply(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", c.path, command, err)
	}
	return r.result()
}

func (r reply) result() (*sample, error) {
	if r.Error != "" {
		return nil, replyError{r.Error, r.LeftOut}
	}
	return r.Sample, nil
}

// readReply returns the next reply.
func (c *child) readReply(ctx context.Context) (r reply, err error) {
	timeout := time.NewTimer(requestTimeout)
	defer timeout.Stop()
	select {
	case line, ok := <-c.lines:
		if !ok {
			return r, errors.New("the process has ended")
		}
		return r, json.Unmarshal(line, &r)
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timeout.C:
		err = fmt.Errorf("no answer for %v", requestTimeout)
	}
	_ = c.cmd.Process.Kill()
	return r, err
}

// once measures a row in a process of its own, which ends.
func (c *child) once(ctx context.Context, name string) (*sample, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.path, append(append([]string{"once"}, c.args...), strings.Fields(name)...)...)
	cmd.Stderr = os.Stderr
	var out bytes.Buffer
	cmd.Stdout = &out
	err := startOn(cmd, c.cpus)
	if err == nil {
		err = cmd.Wait()
	}
	var r reply
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &r)
	}
	if err != nil {
		// The process that serves is well: this row alone has failed.
		return nil, replyError{text: fmt.Sprintf("%s once %s: %v", c.path, name, err)}
	}
	return r.result()
}

// close ends the process, and kills it if it does not.
func (c *child) close() error {
	_ = c.in.Close()
	killer := time.AfterFunc(requestTimeout, func() { _ = c.cmd.Process.Kill() })
	defer killer.Stop()
	for range c.lines { // what it says of its end
	}
	return c.cmd.Wait()
}
