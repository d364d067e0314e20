//go:build linux

package benchmarks

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights/httpfs"
)

// BenchmarkRemote is a file behind an HTTP server of another process, which takes a time for each request and sends at a
// rate, to a GPU; and as many plain readers of the same ranges, which drop the bytes. CPU time is that of the readers.
func BenchmarkRemote(b *testing.B) { bench(b, "Remote") }

var _ = func() bool {
	for _, at := range []struct{ rate, n int }{{1e9, 512 * mib}, {10e9, 2 * gib}} {
		for _, delay := range []time.Duration{0, 20 * time.Millisecond, 200 * time.Millisecond} {
			name := fmt.Sprintf("%dGBps-%dms", at.rate/1e9, delay/time.Millisecond)
			quick := at.rate > 1e9 && delay > 0
			add("Remote",
				row{name: name + "/upload", cpu: true, quick: quick, prepare: uploadRemote(at.n, at.rate, delay)},
				row{name: name + "/plain-readers", cpu: true, quick: quick, prepare: readRemote(at.n, at.rate, delay)})
		}
	}
	return true
}()

// A remote is the server of a file.
type remote struct {
	content []byte
	rate    int // bytes a second, of all requests together
	delay   time.Duration

	mu   sync.Mutex
	next time.Time // when the next bytes may be sent
}

// serverEnv makes a process the server of a file, until its standard input ends: bytes, rate, delay.
const serverEnv = "PINNED_BENCH_SERVER"

// serve returns the URL of a file with the first n bytes of the source, which another process serves.
func (f *fixture) serve(n, rate int, delay time.Duration) string {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %d", serverEnv, n, rate, delay))
	cmd.Stderr = os.Stderr
	in := must(cmd.StdinPipe())(f)
	out := must(cmd.StdoutPipe())(f)
	err := cmd.Start()
	if errors.Is(err, syscall.ENOEXEC) {
		f.Skip("an emulator starts no child processes")
	}
	f.check(err)
	f.later(func() error { return errors.Join(in.Close(), cmd.Wait()) })
	address, err := bufio.NewReader(out).ReadString('\n')
	f.check(err)
	return strings.TrimSpace(address)
}

// serveFile is the process that serve starts.
func serveFile() error {
	r := &remote{}
	n := 0
	if _, err := fmt.Sscanf(os.Getenv(serverEnv), "%d %d %d", &n, &r.rate, &r.delay); err != nil {
		return fmt.Errorf("%s: %w", serverEnv, err)
	}
	r.content = make([]byte, n)
	pattern(0).fill(r.content)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Printf("http://%v/file\n", listener.Addr())
	return http.Serve(listener, r)
}

func (r *remote) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	var from, to int
	if _, err := fmt.Sscanf(request.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil || from < 0 || from > to {
		http.Error(w, "want a range", http.StatusBadRequest)
		return
	}
	to = min(to+1, len(r.content))
	time.Sleep(r.delay)
	w.Header().Set("ETag", `"1"`)
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, len(r.content)))
	w.Header().Set("Content-Length", fmt.Sprint(to-from))
	w.WriteHeader(http.StatusPartialContent)
	for from < to {
		n := min(to-from, 256*kib)
		r.wait(n)
		if _, err := w.Write(r.content[from:][:n]); err != nil {
			return
		}
		from += n
	}
}

// wait waits until n bytes may be sent.
func (r *remote) wait(n int) {
	r.mu.Lock()
	now := time.Now()
	if r.next.Before(now.Add(-10 * time.Millisecond)) { // it was idle
		r.next = now
	}
	at := r.next
	r.next = at.Add(time.Duration(n) * time.Second / time.Duration(r.rate))
	r.mu.Unlock()
	if d := at.Sub(now); d > time.Millisecond {
		time.Sleep(d)
	}
}

func uploadRemote(n, rate int, delay time.Duration) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, dst, c := f.memoryAndCopier()
		fsys, name, err := httpfs.New(ctx, f.serve(n, rate, delay), httpfs.Options{})
		f.check(err)
		f.later(fsys.Close)
		file := must(fsys.Open(name))(f)
		f.later(file.Close)
		op := func() error { _, err := c.UploadFrom(ctx, dst, file.(transfer.RangeOpener), 0, n); return err }
		return task{bytes: n, op: op, verify: uploaded(dev, dst, n, func() []byte { return f.source()[:n] })}
	}
}

// readRemote reads the ranges that uploadRemote reads.
func readRemote(n, rate int, delay time.Duration) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		address := f.serve(n, rate, delay)
		readers := min(max(n/(8*mib), 1), 8)
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: readers, ReadBufferSize: 64 * kib}}
		f.later(func() error { client.CloseIdleConnections(); return nil })
		mems := make([][]byte, readers)
		for i := range mems {
			mems[i] = make([]byte, mib)
		}
		var read atomic.Int64
		op := func() error {
			return onEach(readers, func(i int) error {
				from, to := n*i/readers, n*(i+1)/readers
				request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
				if err != nil {
					return err
				}
				request.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", from, to-1))
				response, err := client.Do(request)
				if err != nil {
					return err
				}
				defer response.Body.Close()
				for left := to - from; left > 0 && err == nil; {
					got := 0
					got, err = io.ReadFull(response.Body, mems[i][:min(left, mib)])
					left -= got
					read.Add(int64(got))
				}
				return err
			})
		}
		return task{bytes: n, op: op, verify: func(run func() error) error {
			read.Store(0)
			if err := run(); err != nil {
				return err
			}
			if got := read.Load(); got != int64(n) {
				return fmt.Errorf("%d bytes were read: want %d", got, n)
			}
			return nil
		}}
	}
}
