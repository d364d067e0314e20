// Package child runs functions in processes of their own: a process that has allocated
// nothing yet, that may hang in a driver, or that may crash, without harm to this one.
//
// The process is this same executable, started again. Its main function, or TestMain,
// calls [Serve] first, which does what [Run] asked for. Such a process ends with the one
// that started it, whatever way that ends.
package child

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
)

// variable is the environment variable that names the function of a child process.
const variable = "PINCHECK_CHILD"

// maxText limits what is kept of a child's standard error, in bytes.
const maxText = 1 << 20

// killGrace is the time that Run waits for the end of a process that it killed. A process that hangs
// in the kernel may not end.
const killGrace = time.Second

// reapGrace is the time that Run waits for the exit status of a process that closed its pipe without
// an answer. A dying process unpins its memory first, which takes seconds for hundreds of GB.
const reapGrace = 10 * time.Second

// ErrTimeout is wrapped by the error for a process that has not answered within its time limit.
var ErrTimeout = errors.New("no answer within the time limit")

// A StartError is the error for a process that never came to Serve: it could not be started, or another program
// than this one was started in its place, as where a dynamic loader or an emulator runs this one. It says nothing of the
// function.
type StartError struct {
	Path string // of what was started: this executable, as the operating system has it
	Err  error
}

func (e *StartError) Error() string {
	return fmt.Sprintf("%s does not start as a process of its own: %v", e.Path, e.Err)
}

func (e *StartError) Unwrap() error { return e.Err }

// executable is what is started, except in tests.
var executable = os.Executable

// A Func is the work of a child process. It decodes the request, may send answers while it works
// and wait for its turn, and returns the last answer. [Handle] and [HandleStream] make them.
type Func func(ctx context.Context, request json.RawMessage, turn <-chan struct{}, send func(any)) (result any, err error)

// Handle returns do as a Func. Requests and answers are sent as JSON. The parent gets the text of
// an error, and whether it wraps errors.ErrUnsupported.
func Handle[Request, Reply any](do func(context.Context, Request) (Reply, error)) Func {
	return HandleStream(func(ctx context.Context, request Request, _ <-chan struct{}, _ func(Reply)) (Reply, error) {
		return do(ctx, request)
	})
}

// HandleStream is [Handle] of a function that sends what it has so far, for [Stream]: should
// the process hang or crash, its caller has that. Send may be called from several goroutines. Before a part of its work
// that must not be done beside others, the function may wait until turn is closed.
func HandleStream[Request, Reply any](do func(ctx context.Context, request Request, turn <-chan struct{}, send func(Reply)) (Reply, error)) Func {
	return func(ctx context.Context, text json.RawMessage, turn <-chan struct{}, send func(any)) (any, error) {
		var request Request
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, fmt.Errorf("request: %w", err)
		}
		return do(ctx, request, turn, func(a Reply) { send(a) })
	}
}

// reply is a line of what a process writes to its standard output.
type reply struct {
	Value       json.RawMessage `json:"answer,omitempty"`
	Error       string          `json:"error,omitempty"`
	Unsupported bool            `json:"unsupported,omitempty"`
	More        bool            `json:"more,omitempty"` // it is not the last
	// Begun is the first line of each process: Serve has been reached. It has no answer.
	Begun bool `json:"begun,omitempty"`
}

// Serve does nothing in a process that Run or Stream did not start. In one that they did,
// Serve does what was asked for and ends the process.
func Serve(funcs map[string]Func) {
	name, ok := os.LookupEnv(variable)
	if !ok {
		return
	}
	os.Unsetenv(variable) // the processes that this one starts are others
	// An interrupt of the terminal reaches this process too, and so does the signal of a service
	// manager, or of timeout(1), that ends all of a group. The parent decides.
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	// Where memory runs out the kernel should kill this process, not its parent. Where
	// that cannot be asked for, nothing is lost.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	if err := serve(funcs[name], name, os.Stdin, os.Stdout, func() { os.Exit(1) }); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve reads a request, and answers it. A second value of in is its turn. It calls orphaned if
// in ends meanwhile, which is when the parent has ended. The error is that of writing.
func serve(do Func, name string, in io.Reader, out io.Writer, orphaned func()) error {
	var mu sync.Mutex
	lines := json.NewEncoder(out)
	write := func(result any, err error, more bool) error {
		r := reply{More: more}
		if err == nil {
			if r.Value, err = json.Marshal(result); err != nil {
				err = fmt.Errorf("answer: %w", err)
			}
		}
		if err != nil {
			r.Error, r.Unsupported = err.Error(), errors.Is(err, errors.ErrUnsupported)
		}
		mu.Lock()
		defer mu.Unlock()
		return lines.Encode(r)
	}
	if err := lines.Encode(reply{Begun: true, More: true}); err != nil {
		return err
	}
	if do == nil {
		return write(nil, fmt.Errorf("there is no function %q here", name), false)
	}
	requests := json.NewDecoder(in)
	var request json.RawMessage
	if err := requests.Decode(&request); err != nil {
		return write(nil, fmt.Errorf("request: %w", err), false)
	}
	turn := make(chan struct{})
	go func() {
		var word json.RawMessage
		if requests.Decode(&word) == nil {
			close(turn)
			_, _ = io.Copy(io.Discard, in)
		}
		orphaned()
	}()
	result, err := do(context.Background(), request, turn, func(partial any) {
		_ = write(partial, nil, true) // a parent that has ended reads nothing: see orphaned
	})
	return write(result, err, false)
}

// Run starts this executable again, has it do the function of this name, and returns
// its answer. The process is killed when ctx ends, which is the error then, and at the
// limit: the error wraps ErrTimeout. Other errors are those of the function, and of
// processes that do not start (a *StartError), that crash (they wrap an *exec.ExitError), or that answer
// something else; they have what the process wrote to its standard error.
func Run[Reply any](ctx context.Context, limit time.Duration, name string, request any) (Reply, error) {
	return Stream(ctx, limit, name, request, nil, func(Reply) {})
}

// Stream is [Run] of a function made by [HandleStream], whose turn it is when turn is closed. It calls each, one call at
// a time, with every answer that arrives before the last one. With an error it returns the newest
// of them: what the process had found before it hung, crashed or failed.
func Stream[Reply any](ctx context.Context, limit time.Duration, name string, request any, turn <-chan struct{}, each func(Reply)) (Reply, error) {
	var result Reply
	err := run(ctx, limit, name, request, turn, func(text json.RawMessage, more bool) error {
		var a Reply
		if err := json.Unmarshal(text, &a); err != nil {
			return fmt.Errorf("answer %.200q: %w", text, err)
		}
		if result = a; more {
			each(a)
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("child: %s: %w", name, err)
	}
	return result, err
}

func run(caller context.Context, limit time.Duration, name string, request any, turn <-chan struct{}, take func(result json.RawMessage, more bool) error) error {
	if err := bounded.Ended(caller); err != nil {
		return err
	}
	if _, ok := os.LookupEnv(variable); ok { // else each process would start another one
		return errors.New("this process was started by Run itself, and its main function or TestMain does not call Serve")
	}
	text, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	p := &process{caller: caller, ended: make(chan error, 1)}
	p.ctx, p.cancel = context.WithTimeoutCause(caller, limit, fmt.Errorf("%w of %v", ErrTimeout, limit))
	defer p.cancel()
	replies, err := p.start(name, text, turn)
	if err != nil {
		return err
	}
	defer replies.Close()
	replied := make(chan error, 1)
	go func() { replied <- read(replies, &p.begun, take) }()
	select {
	case err := <-replied:
		return p.answered(err)
	case <-p.ctx.Done():
		err := p.killed()
		replies.Close() // a process that has not ended holds the other end
		<-replied       // no answer is taken after the return
		return err
	}
}

// A process is one that run has started.
type process struct {
	caller context.Context
	ctx    context.Context // ends with the caller's, and at the limit; the process is killed then
	cancel context.CancelFunc
	cmd    *exec.Cmd
	stderr limited
	ended  chan error // has the error of Wait
	begun  bool       // it has reached Serve; not to be read before its replies have ended
}

// start starts the process and sends its request, and returns what its replies are read from.
func (p *process) start(name string, request []byte, turn <-chan struct{}) (replies *os.File, err error) {
	path, err := executable()
	if err != nil {
		return nil, &StartError{"this executable", err}
	}
	p.cmd = exec.CommandContext(p.ctx, path)
	p.cmd.Env = append(os.Environ(), variable+"="+name)
	p.cmd.WaitDelay = killGrace
	p.cmd.Stderr = &p.stderr
	in, err := p.cmd.StdinPipe() // Wait closes it, and so does the end of this process
	if err != nil {
		return nil, &StartError{path, err}
	}
	replies, stdout, err := os.Pipe()
	if err != nil {
		return nil, &StartError{path, err}
	}
	p.cmd.Stdout = stdout
	err = p.cmd.Start()
	stdout.Close()
	if err != nil {
		replies.Close()
		return nil, &StartError{path, err}
	}
	gone := make(chan struct{})
	go func() {
		// A process that has crashed reads no request: its end says more.
		_, _ = in.Write(append(request, '\n'))
		go func() {
			select {
			case <-turn:
				_, _ = in.Write([]byte("true\n"))
			case <-gone:
			}
		}()
		p.ended <- p.cmd.Wait()
		close(gone)
	}()
	return replies, nil
}

// cause is why the context has ended.
func (p *process) cause() error { return cmp.Or(bounded.Ended(p.caller), context.Cause(p.ctx)) }

// answered returns the error of a process whose replies have ended with err: io.EOF if there was no last one. An answer
// counts, and not how the process ends: one that has answered may hang in the driver's exit handlers.
func (p *process) answered(err error) error {
	if errors.Is(err, io.EOF) {
		return p.silent()
	}
	select {
	case <-p.ended:
	case <-time.After(killGrace):
		p.cancel()
	}
	if err != nil && !p.begun {
		return &StartError{p.cmd.Path, err}
	}
	return err
}

// silent returns why a process has closed its pipe without an answer.
func (p *process) silent() error {
	select {
	case end := <-p.ended:
		if Killed(end) {
			select { // the signal may be for this process too, which has not seen it yet
			case <-p.ctx.Done():
			case <-time.After(killGrace):
			}
		}
		if p.ctx.Err() == nil {
			return p.early(end)
		}
	case <-time.After(reapGrace):
		p.cancel()
		if context.Cause(p.ctx) == context.Canceled {
			return fmt.Errorf("process %d ended early, and hangs in the kernel", p.cmd.Process.Pid)
		}
	}
	return p.cause()
}

// early is the error of a process that nobody has killed here.
func (p *process) early(end error) error {
	if end == nil {
		end = errors.New("without an answer")
	}
	if !p.begun && !Killed(end) {
		return &StartError{p.cmd.Path, fmt.Errorf("%w%s", end, p.stderr.quote())}
	}
	return fmt.Errorf("the process ended early: %w%s", end, p.stderr.quote())
}

// killed waits for the end of a process whose context has ended, and returns why it has.
func (p *process) killed() error {
	select {
	case <-p.ended:
		return p.cause()
	case <-time.After(2 * killGrace):
		return fmt.Errorf("%w; process %d was killed and has not ended: it hangs in the kernel", p.cause(), p.cmd.Process.Pid)
	}
}

// Killed reports whether an error is of a process that somebody else ended by a signal, and not a
// fault of its own. Those that ask for the end may come before Serve ignores them.
func Killed(err error) bool {
	exit := (*exec.ExitError)(nil)
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && slices.Contains([]syscall.Signal{syscall.SIGKILL, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}, status.Signal())
}

// read gives each reply to take, until the last one or an error. io.EOF is an end without
// a last reply. It sets begun when the process has reached Serve.
func read(replies io.Reader, begun *bool, take func(result json.RawMessage, more bool) error) error {
	lines := bufio.NewReader(replies)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) == 0 || err != nil && err != io.EOF {
			return io.EOF
		}
		var r reply
		switch err := json.Unmarshal(line, &r); {
		case err != nil:
			return fmt.Errorf("answer %.200q: %w", line, err)
		case r.Error != "" && r.Unsupported:
			return unsupported(r.Error)
		case r.Error != "":
			return errors.New(r.Error)
		case r.Begun:
			*begun = true
			continue
		}
		if err := take(r.Value, r.More); err != nil || !r.More {
			return err
		}
	}
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
