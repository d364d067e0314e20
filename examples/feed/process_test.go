//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/loader"
)

// asFeeder makes this program the feeder, instead of the tests.
const asFeeder = "PINNED_TEST_AS_FEEDER"

func TestMain(m *testing.M) {
	if os.Getenv(asFeeder) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// python returns the interpreter for which examples/pytorch is written.
func python(t testing.TB) string {
	t.Helper()
	path, err := interpreter()
	if err != nil {
		t.Skip("python3 is not installed: the consumer of examples/pytorch is not tried")
	}
	return path
}

// interpreter is python3 itself, which may be started by a slow script of that name.
var interpreter = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
})

// A process is a feeder or a consumer that runs.
type process struct {
	cmd    *exec.Cmd
	stdout *bufio.Reader
	stderr *syncBuffer
	waited chan error
}

func startProcess(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	out, in, err := os.Pipe()
	require.NoError(t, err)
	p := &process{cmd: cmd, stdout: bufio.NewReader(out), stderr: new(syncBuffer), waited: make(chan error, 1)}
	cmd.Stdout, cmd.Stderr = in, p.stderr
	require.NoError(t, cmd.Start())
	require.NoError(t, in.Close())
	go func() {
		p.waited <- cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = out.Close()
	})
	return p
}

// wait returns the exit status, and all of the output that was not read; -1 for a process that was killed,
// as one is that does not end.
func (p *process) wait(t testing.TB) (status int, rest string) {
	t.Helper()
	defer time.AfterFunc(time.Minute, p.kill).Stop()
	b, err := io.ReadAll(p.stdout)
	require.NoError(t, err)
	<-p.waited
	return p.cmd.ProcessState.ExitCode(), string(b)
}

func (p *process) kill() { _ = p.cmd.Process.Signal(syscall.SIGKILL) }

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// feederProcess starts a feeder of its own process.
func feederProcess(t testing.TB, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := hosttest.Command(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), asFeeder+"=1")
	return startProcess(t, cmd)
}

// await waits until the process has written a text to stderr.
func (p *process) await(t testing.TB, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(p.stderr.String(), text) }, time.Minute, time.Millisecond)
}

func consumerProcess(t testing.TB, address string, rank, world int, start loader.Position, stop int) *process {
	t.Helper()
	at, err := json.Marshal(start)
	require.NoError(t, err)
	cmd := exec.Command(python(t), "-B", filepath.Join("testdata", "consumer.py"), address,
		strconv.Itoa(rank), strconv.Itoa(world), strconv.Itoa(width), string(at), strconv.Itoa(stop))
	return startProcess(t, cmd)
}

// parse returns the batches that a consumer has printed; a last line may be cut off if it was killed.
func parse(t testing.TB, out string, killed bool) (list []received) {
	t.Helper()
	for line := range strings.Lines(out) {
		var b received
		if err := json.Unmarshal([]byte(line), &b); err != nil {
			require.True(t, killed && !strings.HasSuffix(line, "\n"), "%q: %v", line, err)
			continue
		}
		list = append(list, b)
	}
	return list
}

// Consumers in Python have the same batches as the loader, and go on where another one ended. They end when
// they have all, and then the feeder does.
func TestPythonConsumers(t *testing.T) {
	const samples, epochs = 200, 2
	address := newAddress()
	feeder := feederProcess(t, "-listen", address, "-consumers", "3", "-samples", strconv.Itoa(samples), "-width", strconv.Itoa(width),
		"-batch", "16", "-prefetch", "2", "-seed", "9", "-epochs", strconv.Itoa(epochs))
	feeder.await(t, "listens")
	data, o := memoryData(t, samples), loader.Options{BatchSize: 16, Prefetch: 2, Shuffle: true, Seed: 9}
	want := [][]received{delivered(t, data, 0, 2, epochs, o), delivered(t, data, 1, 2, epochs, o)}
	const stop = 5
	first := consumerProcess(t, address, 0, 2, loader.Position{}, stop)
	second := consumerProcess(t, address, 1, 2, loader.Position{}, 0)
	status, out := first.wait(t)
	require.Zero(t, status, first.stderr)
	require.Equal(t, want[0][:stop], parse(t, out, false))
	rest := consumerProcess(t, address, 0, 2, want[0][stop-1].Position, 0)
	status, out = rest.wait(t)
	require.Zero(t, status, rest.stderr)
	require.Equal(t, want[0][stop:], parse(t, out, false))
	status, out = second.wait(t)
	require.Zero(t, status, second.stderr)
	require.Equal(t, want[1], parse(t, out, false))
	status, _ = feeder.wait(t)
	require.Zero(t, status, feeder.stderr)
}

// kills is how many processes are killed: PINNED_SOAK asks for a thousand.
func kills() int {
	if os.Getenv("PINNED_SOAK") != "" {
		return 1000
	}
	return 20
}

// A random moment in the life of a consumer: when it has printed some of its batches, or after a time
// that ends in its beginning.
func await(t testing.TB, random *rand.Rand, consumer *process, batches int) (printed string) {
	t.Helper()
	n := random.IntN(2*batches) - batches
	if n < 0 {
		time.Sleep(time.Duration(random.IntN(100_000)) * time.Microsecond)
		return ""
	}
	for range n {
		line, err := consumer.stdout.ReadString('\n')
		if err != nil {
			break // it has ended
		}
		printed += line
	}
	return printed
}

// Either side is killed at any moment: all bytes that were delivered are right and in order, the other side
// ends with an error or goes on with others, and no memory, socket or process is left.
func TestEitherSideIsKilledAtAnyMoment(t *testing.T) {
	const samples, epochs, batches = 200, 2, 26
	data, o := memoryData(t, samples), loader.Options{BatchSize: 16, Prefetch: 2, Shuffle: true, Seed: 9}
	want := delivered(t, data, 0, 1, epochs, o)
	require.Len(t, want, batches)
	python(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	feeding := func(address string) *process {
		p := feederProcess(t, "-listen", address, "-samples", strconv.Itoa(samples), "-width", strconv.Itoa(width),
			"-batch", "16", "-prefetch", "2", "-seed", "9", "-epochs", strconv.Itoa(epochs))
		p.await(t, "listens")
		return p
	}
	address := newAddress()
	lasting := feeding(address) // of the consumers that are killed
	outcomes := map[string]int{}
	for i := range kills() {
		feeder, at := lasting, address
		killsFeeder := random.IntN(2) == 0
		if killsFeeder {
			at = newAddress()
			feeder = feeding(at)
		}
		consumer := consumerProcess(t, at, 0, 1, loader.Position{}, 0)
		printed := await(t, random, consumer, batches)
		if killsFeeder {
			feeder.kill()
		} else {
			consumer.kill()
		}
		status, rest := consumer.wait(t)
		got := parse(t, printed+rest, status < 0)
		require.Equal(t, append([]received(nil), want[:len(got)]...), got, "kill %d: the batches before it", i)
		outcomes[fmt.Sprintf("feeder killed: %v, status %d, any batches: %v", killsFeeder, status, len(got) > 0)]++
		switch {
		case killsFeeder:
			if len(got) < batches {
				require.Equal(t, 3, status, "kill %d: an error of the consumer: %s", i, consumer.stderr)
				require.Contains(t, consumer.stderr.String(), "FeedError: ")
			} else {
				require.Zero(t, status, consumer.stderr)
			}
			feeder.wait(t)
			l, err := listen(at)
			require.NoError(t, err, "kill %d: the address is free", i)
			require.NoError(t, l.Close())
		case status < 0:
			require.Empty(t, ringsOf(consumer.cmd.Process.Pid))
		default:
			require.Zero(t, status, "kill %d: it had ended: %s", i, consumer.stderr)
			require.Len(t, got, batches)
		}
	}
	t.Log(outcomes)
	require.Equal(t, want, plain(connect(t, address, hello{World: 1}).all()), "the feeder still feeds")
	require.Eventually(t, func() bool { return len(ringsOf(lasting.cmd.Process.Pid)) == 0 }, time.Minute, time.Millisecond, "the rings of dead consumers are gone")
	sockets, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", lasting.cmd.Process.Pid))
	require.NoError(t, err)
	open := 0
	for _, fd := range sockets {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "socket:") {
			open++
		}
	}
	require.Equal(t, 1, open, "the sockets of dead consumers are closed")
	require.NoError(t, lasting.cmd.Process.Signal(syscall.SIGTERM))
	lasting.wait(t)
	names, err := os.ReadFile("/proc/net/unix")
	require.NoError(t, err)
	require.NotContains(t, string(names), fmt.Sprintf("pinned-feed-test-%d-", os.Getpid()))
}

// skipped is what unittest prints about a test, or a class of tests, that was skipped.
var skipped = regexp.MustCompile(`(?m)^(\w+) .*\.\.\. skipped ['"](.*)['"]$`)

// The tests of examples/pytorch that need no GPU; those that need PyTorch are skipped where it is not
// installed.
func TestPythonFiles(t *testing.T) {
	for _, module := range []string{"test_feed", "test_managed", "test_pinned"} {
		t.Run(module, func(t *testing.T) {
			cmd := exec.Command(python(t), "-B", "-m", "unittest", "-v", module)
			cmd.Dir = filepath.Join("..", "pytorch")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			for _, line := range skipped.FindAllStringSubmatch(string(out), -1) {
				t.Run(line[1], func(t *testing.T) { t.Skip(line[2]) })
			}
		})
	}
}

// A feeder that has no descriptor left for a connection waits until it has one.
func TestAFeederWithoutDescriptorsGoesOn(t *testing.T) {
	address := newAddress()
	p := feederProcess(t, "-listen", address, "-consumers", "1", "-samples", "80", "-width", strconv.Itoa(width), "-batch", "8", "-epochs", "1")
	p.await(t, "listens on")
	var limit unix.Rlimit
	require.NoError(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &limit))
	require.NoError(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}, nil))
	first := dial(t, address)
	p.await(t, "too many open files: tried again")
	require.NoError(t, first.Close())
	require.NoError(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil))
	c := connect(t, address, hello{World: 1})
	require.Len(t, c.all(), 10)
	status, _ := p.wait(t)
	require.Zero(t, status, p.stderr.String())
	require.Contains(t, p.stderr.String(), "it ended before its hello")
}
