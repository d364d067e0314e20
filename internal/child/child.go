// Package child runs functions in processes of their own: a process that has allocated
// nothing yet, that may hang in a driver, or that may crash, without harm to this one.
//
// The process is this same executable, started again. Its main function, or TestMain,
// calls [Serve] first, which does what [Run] asked for. Such a process ends with the one
// that started it, whatever way that ends.
package child

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"
)

// variable names the function that a process was started for.
const variable = "PINCHECK_CHILD"

// maxText limits what is kept of a child's output, in bytes.
const maxText = 1 << 20

// killed is how long Run waits for a process that was killed: one that hangs in the kernel
// ends when the kernel lets it.
const killed = time.Second

// ErrTimeout is returned for a process that had not answered at its time limit.
var ErrTimeout = errors.New("no answer within the time limit")

// A Func is what a process does: it decodes the request, and its answer is encoded.
// Func functions are made by [Handle].
type Func func(ctx context.Context, request json.RawMessage) (answer any, err error)

// Handle returns do as a Func. Requests and answers travel as JSON. Of an error the
// text arrives, and whether it wraps errors.ErrUnsupported.
func Handle[Request, Answer any](do func(context.Context, Request) (Answer, error)) Func {
	return func(ctx context.Context, text json.RawMessage) (any, error) {
		var request Request
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, fmt.Errorf("request: %w", err)
		}
		return do(ctx, request)
	}
}

// reply is what a process writes to its standard output.
type reply struct {
	Answer      json.RawMessage `json:"answer,omitempty"`
	Error       string          `json:"error,omitempty"`
	Unsupported bool            `json:"unsupported,omitempty"`
}

// Serve does nothing in a process that Run did not start. In one that it did, Serve does
// what was asked for and ends the process.
func Serve(funcs map[string]Func) {
	name, ok := os.LookupEnv(variable)
	if !ok {
		return
	}
	os.Unsetenv(variable) // the processes that this one starts are others
	// An interrupt of the terminal reaches this process too. The parent decides.
	signal.Ignore(os.Interrupt)
	// Where memory runs out the kernel should kill this process, not its parent. Where
	// that cannot be asked for, nothing is lost.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	if err := json.NewEncoder(os.Stdout).Encode(serve(funcs[name], name, os.Stdin, func() { os.Exit(1) })); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve reads a request, and answers it. It calls orphaned if in ends meanwhile, which is
// when the parent has ended.
func serve(do Func, name string, in io.Reader, orphaned func()) reply {
	if do == nil {
		return reply{Error: fmt.Sprintf("there is no function %q here", name)}
	}
	requests := json.NewDecoder(in)
	var request json.RawMessage
	if err := requests.Decode(&request); err != nil {
		return reply{Error: "request: " + err.Error()}
	}
	go func() {
		_, _ = io.Copy(io.Discard, in)
		orphaned()
	}()
	answer, err := do(context.Background(), request)
	if err != nil {
		return reply{Error: err.Error(), Unsupported: errors.Is(err, errors.ErrUnsupported)}
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return reply{Error: "answer: " + err.Error()}
	}
	return reply{Answer: text}
}

// Run starts this executable again, has it do the function of this name, and returns
// its answer. The process is killed when ctx ends, which is the error then, and at the
// limit: the error wraps ErrTimeout. Other errors are those of the function, and of
// processes that do not start, that crash, or that answer something else; they have what
// the process wrote to its standard error.
func Run[Answer any](ctx context.Context, limit time.Duration, name string, request any) (answer Answer, err error) {
	text, err := run(ctx, limit, name, request)
	if err == nil {
		if err = json.Unmarshal(text, &answer); err != nil {
			err = fmt.Errorf("answer %.200q: %w", text, err)
		}
	}
	if err != nil {
		return answer, fmt.Errorf("child: %s: %w", name, err)
	}
	return answer, nil
}

func run(ctx context.Context, limit time.Duration, name string, request any) (json.RawMessage, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if _, ok := os.LookupEnv(variable); ok { // else each process would start another one
		return nil, errors.New("this process was started by Run itself, and its main function or TestMain does not call Serve")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w of %v", ErrTimeout, limit))
	defer cancel()
	text, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = append(os.Environ(), variable+"="+name)
	cmd.WaitDelay = killed
	var stdout, stderr limited
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	in, err := cmd.StdinPipe() // Wait closes it, and so does the end of this process
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() {
		// A process that has crashed reads no request: its end says more.
		_, _ = in.Write(append(text, '\n'))
		ended <- cmd.Wait()
	}()
	select {
	case err = <-ended:
	case <-ctx.Done():
		select {
		case <-ended:
		case <-time.After(2 * killed):
			return nil, fmt.Errorf("%w; process %d was killed and has not ended: it hangs in the kernel", context.Cause(ctx), cmd.Process.Pid)
		}
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("the process ended early: %w%s", err, stderr.quote())
	}
	var r reply
	switch err := json.Unmarshal(stdout.Bytes(), &r); {
	case err != nil:
		return nil, fmt.Errorf("answer %.200q: %w%s", stdout.Bytes(), err, stderr.quote())
	case r.Error != "" && r.Unsupported:
		return nil, unsupported(r.Error)
	case r.Error != "":
		return nil, errors.New(r.Error)
	}
	return r.Answer, nil
}

// unsupported is the text of an error that wraps errors.ErrUnsupported.
type unsupported string

func (u unsupported) Error() string        { return string(u) }
func (u unsupported) Is(target error) bool { return target == errors.ErrUnsupported }

// limited keeps the first maxText bytes of what is written.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), maxText-l.Len())])
	return len(p), nil
}

// quote returns the first line of what a process that failed has written, for the end of
// a message.
func (l *limited) quote() string {
	line, _, _ := strings.Cut(strings.TrimSpace(l.String()), "\n")
	if line == "" {
		return ""
	}
	return fmt.Sprintf(": %.300s", line)
}
