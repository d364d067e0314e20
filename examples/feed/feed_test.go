//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/loader"
)

const width = 16

var addresses atomic.Int32

func newAddress() string {
	return fmt.Sprintf("@pinned-feed-test-%d-%d", os.Getpid(), addresses.Add(1))
}

// start runs a feeder until the test ends. end ends it before, and returns its error.
func start(t testing.TB, f *feeder, consumers int) (address string, end func() error) {
	t.Helper()
	address = newAddress()
	listener, err := listen(address)
	require.NoError(t, err)
	if f.log == nil {
		f.log = log.New(io.Discard, "", 0)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.run(ctx, listener, consumers) }()
	end = sync.OnceValue(func() error {
		if consumers == 0 {
			cancel()
		}
		defer cancel()
		return <-ended
	})
	t.Cleanup(func() {
		cancel()
		_ = end()
		require.Empty(t, ringsOf(os.Getpid()), "the rings are gone")
	})
	return address, end
}

// lines are what a feeder logs, a message each.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

func (l lines) await(text string) {
	for !strings.Contains(<-l, text) {
	}
}

// ringsOf returns the rings that a process has mapped or open.
func ringsOf(pid int) (found []string) {
	maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:pinned-feed") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.Contains(to, "memfd:pinned-feed") {
			found = append(found, to)
		}
	}
	return found
}

// delivered returns what a loader delivers of a shard.
func delivered(t testing.TB, data dataset, rank, world, epochs int, o loader.Options) (list []received) {
	t.Helper()
	l, err := loader.NewHost(shardOf(data, rank, world), o, func(n int) ([]byte, error) { return make([]byte, n), nil })
	require.NoError(t, err)
	for range l.Epochs(epochs) {
		for b, err := range l.Batches(t.Context()) {
			require.NoError(t, err)
			r := received{Epoch: b.Epoch(), Number: b.Number(), Position: b.Position()}
			for at := range b.Len() {
				r.Indices = append(r.Indices, int(binary.LittleEndian.Uint64(b.Host(index)[8*at:])))
			}
			list = append(list, r)
		}
	}
	require.NoError(t, l.Close())
	return list
}

// plain returns batches without their places in a ring.
func plain(list []received) []received {
	list = slices.Clone(list)
	for i := range list {
		list[i].serial, list[i].offsets = 0, nil
	}
	return list
}

func memoryData(t testing.TB, n int) dataset {
	t.Helper()
	data, err := newInMemory(vectors{n, width})
	require.NoError(t, err)
	return data
}

// Consumers at the same time have the batches of their shards, in the loader's order, with every byte;
// together they have all samples, each once an epoch.
func TestConsumersHaveTheirShards(t *testing.T) {
	const n, world, epochs = 203, 2, 3
	for name, data := range map[string]dataset{
		"in memory": memoryData(t, n), "one at a time": vectors{n, width},
	} {
		t.Run(name, func(t *testing.T) {
			o := loader.Options{BatchSize: 16, Shuffle: true, Seed: 5, Workers: 7, Prefetch: 3}
			address, end := start(t, &feeder{data: data, o: o, epochs: epochs}, world)
			var clients []*client
			for rank := range world {
				clients = append(clients, connect(t, address, hello{Rank: rank, World: world}))
			}
			seen := make([]int, n)
			for rank, c := range clients {
				require.Equal(t, 101, c.w.Samples)
				got := c.all()
				require.Equal(t, delivered(t, data, rank, world, epochs, o), plain(got))
				for _, b := range got {
					for _, i := range b.Indices {
						require.Equal(t, rank, i%world)
						seen[i]++
					}
				}
			}
			require.NoError(t, end())
			for i, times := range seen[:n/world*world] {
				require.Equal(t, epochs, times, i)
			}
		})
	}
}

// A consumer that begins after a batch of another has the batches that the other one would have had.
func TestResumeAtAnyBatch(t *testing.T) {
	data, o := memoryData(t, 100), loader.Options{BatchSize: 16, Shuffle: true, Seed: 1, Prefetch: 2}
	want := delivered(t, data, 0, 1, 2, o)
	address, _ := start(t, &feeder{data: data, o: o, epochs: 2}, 0)
	for i := range want[:len(want)-1] {
		c := connect(t, address, hello{World: 1, Start: want[i].Position})
		require.Equal(t, want[i+1:], plain(c.all()), "after batch %d", i)
	}
}

// A consumer that holds batches stops its own loader when the ring is full, and no other's. Nothing that it
// holds is written, and what it releases is.
func TestBatchesStayUntilTheirRelease(t *testing.T) {
	data, o := memoryData(t, 400), loader.Options{BatchSize: 8, Prefetch: 3, Shuffle: true}
	address, _ := start(t, &feeder{data: data, o: o, epochs: 1}, 0)
	holder := connect(t, address, hello{World: 1})
	var held []received
	for range 4 {
		b, err := holder.next()
		require.NoError(t, err)
		held = append(held, b)
	}
	connect(t, address, hello{World: 1}).all() // another one goes on
	for i := 4; i < 40; i++ {
		for _, b := range held {
			require.NoError(t, holder.check(b))
		}
		at := i % 3
		holder.release(held[at])
		b, err := holder.next()
		require.NoError(t, err)
		require.Equal(t, i, b.Number)
		require.Equal(t, held[at].offsets, b.offsets)
		held[at] = b
	}
	holder.bye()
}

// A consumer may stop anywhere, with or without a word. Without one it is an error of the feeder, which
// serves the others.
func TestAConsumerThatEnds(t *testing.T) {
	data, o := memoryData(t, 400), loader.Options{BatchSize: 8, Prefetch: 3}
	logged := make(lines, 100)
	address, end := start(t, &feeder{data: data, o: o, epochs: 1, log: log.New(logged, "", 0)}, 2)
	other := connect(t, address, hello{Rank: 1, World: 3})
	dial(t, address).Close() // before its hello
	for held := range 5 {
		dying := connect(t, address, hello{Rank: 2, World: 3})
		for range min(held, 4) {
			_, err := dying.next()
			require.NoError(t, err)
		}
		dying.die()
	}
	for range 6 { // in any order: five that died, and one that left before its hello
		logged.await("ended")
	}
	stopping := connect(t, address, hello{World: 3})
	_, err := stopping.next()
	require.NoError(t, err)
	stopping.bye()
	other.all()
	err = end()
	require.Equal(t, 5, strings.Count(err.Error(), "rank 2 of 3: the consumer ended without a word"), err)
	require.NotContains(t, err.Error(), "a consumer: ", "a connection without a hello is no consumer")
	require.NotContains(t, err.Error(), "rank 0")
	require.NotContains(t, err.Error(), "rank 1")
}

// What is not the protocol ends the connection with a reason on both sides, and nothing else.
func TestWrongMessagesEndTheirConnection(t *testing.T) {
	data, o := memoryData(t, 40), loader.Options{BatchSize: 8, Prefetch: 3}
	address, end := start(t, &feeder{data: data, o: o, epochs: 1}, 0)
	refusal := func(message string) string {
		conn := dial(t, address)
		_, err := conn.Write([]byte(message))
		require.NoError(t, err)
		answer, err := receive(conn, make([]byte, maxMessage))
		require.NoError(t, err)
		_, err = receive(conn, make([]byte, maxMessage))
		require.ErrorIs(t, err, errDied)
		return string(answer)
	}
	for message, want := range map[string]string{
		"x":                                   "no hello",
		"[]":                                  "no hello",
		"{}":                                  "the consumer has version 0, and this feeder 2",
		`{"protocol":1}`:                      "the consumer has version 1, and this feeder 2",
		`{"protocol":2}`:                      "rank 0 of 0",
		`{"protocol":2,"world":-1}`:           "rank 0 of -1",
		`{"protocol":2,"rank":2,"world":2}`:   "rank 2 of 2",
		`{"protocol":2,"rank":"0","world":2}`: "no hello",
		`{"protocol":2,"world":41}`:           "40 samples for 41 ranks: none has a batch",
		`{"protocol":2,"world":9999999}`:      "rank 0 of 9999999",
		`{"protocol":2,"world":1,"start":{"epoch":1}}`:                                           "the start is at the end: there are 1 epochs",
		`{"protocol":2,"world":1,"start":{"epoch":-1}}`:                                          "Options.Start.Epoch is -1",
		`{"protocol":2,"world":1,"start":{"batch":1,"order":"x"}}`:                               "would skip or repeat samples",
		`{"protocol":2,"world":1,"start":{"epoch":0,"batch":` + strings.Repeat("1", 1000) + `}}`: "no hello",
	} {
		assert.Contains(t, refusal(message), want, message)
	}
	for name, message := range map[string][]byte{
		"nothing known":                    {1, 2, 3},
		"a kind of the feeder":             binary.LittleEndian.AppendUint32(nil, kindBatch),
		"a short release":                  releaseOf(0)[:15],
		"a long release":                   append(releaseOf(0), 0),
		"a release of what was never sent": releaseOf(1 << 40),
		"a release of none":                releaseOf(0)[:8],
		"a release of two with one serial": append([]byte{kindRelease, 0, 0, 0, 2}, releaseOf(0)[5:]...),
		"a long bye":                       append(binary.LittleEndian.AppendUint32(nil, kindBye), 0),
		"a packet too long":                make([]byte, maxMessage+1),
	} {
		c := connect(t, address, hello{World: 1})
		c.write(message)
		var err error
		for err == nil {
			_, err = c.next()
		}
		assert.ErrorIs(t, err, errFromFeeder, name)
		assert.ErrorContains(t, err, "wrong protocol", name)
	}
	c := connect(t, address, hello{World: 1})
	b, err := c.next()
	require.NoError(t, err)
	c.release(b)
	c.release(b) // twice
	for err == nil {
		_, err = c.next()
	}
	require.ErrorContains(t, err, "the release of batch 0, which the consumer does not have")
	require.Len(t, connect(t, address, hello{World: 1}).all(), 5)
	require.ErrorIs(t, end(), errProtocol)
}

// A sample that cannot be read is an error of the consumer, after the batches before it.
func TestASampleThatFails(t *testing.T) {
	address, end := start(t, &feeder{data: broken{vectors{40, width}}, o: loader.Options{BatchSize: 8, Prefetch: 9}, epochs: 1}, 0)
	c := connect(t, address, hello{World: 1})
	b, err := c.next()
	require.NoError(t, err)
	require.Zero(t, b.Number)
	_, err = c.next()
	require.ErrorIs(t, err, errFromFeeder)
	require.ErrorContains(t, err, "sample 9, batch 1 of epoch 0: broken")
	require.ErrorIs(t, end(), errBroken)
}

var errBroken = errors.New("broken")

type broken struct{ vectors }

func (b broken) Read(ctx context.Context, i int, sample [][]byte) error {
	if i == 9 {
		return errBroken
	}
	return b.vectors.Read(ctx, i, sample)
}

// The end of the feeder is an error of its consumers, also of those that take nothing.
func TestTheFeedersEnd(t *testing.T) {
	data, o := memoryData(t, 4000), loader.Options{BatchSize: 8, Prefetch: 3}
	address, end := start(t, &feeder{data: data, o: o, epochs: 1}, 0)
	one, idle := connect(t, address, hello{World: 1}), connect(t, address, hello{World: 1})
	b, err := one.next()
	require.NoError(t, err)
	one.release(b)
	require.ErrorIs(t, end(), errEnded)
	for _, c := range []*client{one, idle} {
		var err error
		for err == nil {
			_, err = c.next()
		}
		require.ErrorContains(t, err, "the feeder was ended")
	}
}

// Neither side can change the size of the ring under the other.
func TestTheRingIsSealed(t *testing.T) {
	data, o := memoryData(t, 40), loader.Options{BatchSize: 8}
	address, _ := start(t, &feeder{data: data, o: o, epochs: 1}, 0)
	c := connect(t, address, hello{World: 1})
	for _, size := range []int{0, c.w.Ring - 1, c.w.Ring + 4096} {
		require.ErrorIs(t, unix.Ftruncate(c.fd, int64(size)), unix.EPERM)
	}
	_, err := unix.FcntlInt(uintptr(c.fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.Error(t, err)
	c.bye()
}

// A socket file is its user's alone, ends with the feeder, and does not keep another one from beginning if
// it was left behind.
func TestSocketFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := listen(path)
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	_, err = listen(path)
	require.ErrorContains(t, err, "a feeder listens there already")
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close()) // as one that was killed
	l, err = listen(path)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoFileExists(t, path)

	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = listen(path)
	require.ErrorIs(t, err, unix.EADDRINUSE)
	require.FileExists(t, path, "it is no socket")
}

// Of feeders that begin together where another was killed, one has the socket, and the others leave it alone.
func TestOneFeederReplacesASocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	for range 50 {
		l, err := listen(path)
		require.NoError(t, err)
		l.SetUnlinkOnClose(false)
		require.NoError(t, l.Close()) // as one that was killed
		var (
			begin   = make(chan struct{})
			started sync.WaitGroup
			winners = make(chan *net.UnixListener, 8)
		)
		for range cap(winners) {
			started.Go(func() {
				<-begin
				if l, err := listen(path); err == nil {
					winners <- l
				} else {
					assert.ErrorContains(t, err, "a feeder listens there already")
				}
			})
		}
		close(begin)
		started.Wait()
		require.Len(t, winners, 1)
		l = <-winners
		require.NoError(t, dial(t, path).Close())
		require.NoError(t, l.Close())
		require.NoFileExists(t, path)
	}
}

// A lock that another program keeps on the directory ends the start.
func TestALockedDirectoryIsReported(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	require.NoError(t, unix.Flock(int(dir.Fd()), unix.LOCK_EX))
	_, err = listen(filepath.Join(dir.Name(), "socket"))
	require.ErrorIs(t, err, unix.EWOULDBLOCK)
	require.ErrorContains(t, err, "another program has locked it")
	_, err = listen(filepath.Join(dir.Name(), "none", "socket"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// A live socket of another program stays, whatever its kind.
func TestSocketsOfOthersStay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	other, err := net.Listen("unix", path)
	require.NoError(t, err)
	defer other.Close()
	_, err = listen(path)
	require.ErrorContains(t, err, "in use by another program")
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
}

// Nobody else may open a socket file, not even for the moment after bind.
func TestSocketFilesBeginPrivate(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	path := filepath.Join(t.TempDir(), "socket")
	l, err := listen(path)
	require.NoError(t, err)
	defer l.Close()
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "no chmod follows bind")
}

// The feeder's end does not wait for a connection that says nothing, and another feeder that is refused is no error of the first.
func TestConnectionsWithoutAHello(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := listen(path)
	require.NoError(t, err)
	logged := make(lines, 100)
	f := &feeder{data: memoryData(t, 40), o: loader.Options{BatchSize: 8}, epochs: 1, log: log.New(logged, "", 0)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.run(ctx, l, 0) }()
	_, err = listen(path)
	require.ErrorContains(t, err, "a feeder listens there already")
	logged.await("before its hello")
	dial(t, path)
	began := time.Now()
	cancel()
	require.NoError(t, <-ended)
	require.Less(t, time.Since(began), handshakeTimeout/2)
}

func TestArguments(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"x"}, `unexpected argument "x"`},
		{[]string{"-samples", "0"}, "-samples is 0: must be positive"},
		{[]string{"-width", "-1"}, "-width is -1: must be positive"},
		{[]string{"-epochs", "0"}, "-epochs is 0: must be positive"},
		{[]string{"-samples", "9223372036854775807"}, "9223372036854775807 samples of 1024 numbers: more than 1 TiB"},
		{[]string{"-samples", "4611686018427387904", "-width", "4"}, "4611686018427387904 samples of 4 numbers: more than 1 TiB"},
		{[]string{"-width", "9223372036854775807", "-wait", "1s"}, "samples of 9223372036854775807 numbers: more than 1 TiB"},
		{[]string{"-batch", "0"}, "-batch must be positive"},
		{[]string{"-wait", "-1s"}, "-wait"},
		{[]string{"-samples", "8", "-width", "8", "-listen", "/none/socket"}, "no such file or directory"},
	} {
		require.ErrorContains(t, run(t.Context(), test.args, io.Discard), test.want)
	}
	require.NoError(t, run(t.Context(), []string{"-h"}, io.Discard))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, run(ctx, []string{"-samples", "8", "-width", "8", "-listen", newAddress()}, io.Discard))
}

func TestSlowVectorsAreNormalised(t *testing.T) {
	s := shardOf(slow{vectors{10, 64}, 1}, 1, 2)
	sample := [][]byte{make([]byte, 256), make([]byte, 8)}
	require.NoError(t, s.Read(t.Context(), 2, sample))
	require.NoError(t, normalise(t.Context(), 2, sample))
	var sum, squares float64
	for _, x := range floats(sample[vector]) {
		sum += float64(x)
		squares += float64(x) * float64(x)
	}
	require.InDelta(t, 0, sum/64, 1e-5)
	require.InDelta(t, 1, squares/64, 1e-5)
	require.Equal(t, byte(5), sample[index][0])
}
