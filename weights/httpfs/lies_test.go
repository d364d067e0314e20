package httpfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// contentOf returns n bytes at random.
func contentOf(n int) []byte {
	mem := make([]byte, n)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(mem)
	return mem
}

// A server serves one file as net/http does, and lies about it where a test wants that.
type server struct {
	*httptest.Server
	content  []byte
	requests atomic.Int64
	// lie answers request i, or returns false for the truth.
	lie func(i int64, w http.ResponseWriter, r *http.Request) bool
}

func serve(t *testing.T, content []byte, lie func(int64, http.ResponseWriter, *http.Request) bool) *server {
	s := &server{content: content, lie: lie}
	s.Server = httptest.NewServer(s)
	s.Config.ErrorLog = nil
	t.Cleanup(s.Close)
	return s
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i := s.requests.Add(1) - 1
	if s.lie != nil && s.lie(i, w, r) {
		return
	}
	s.truth(w, r)
}

func (s *server) truth(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("ETag", `"v1"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(s.content))
}

// open returns the FS of a server, whose pauses take no time.
func (s *server) fs(t *testing.T, o Options) (fsys *FS, pauses *[]time.Duration) {
	pauses = new([]time.Duration)
	fsys, name, err := New(t.Context(), s.URL+"/dir/file?token=secret", o)
	require.NoError(t, err)
	require.Equal(t, "file", name)
	var mu sync.Mutex
	fsys.pause = func(ctx context.Context, d time.Duration) error {
		mu.Lock()
		defer mu.Unlock()
		*pauses = append(*pauses, d)
		return ctx.Err()
	}
	t.Cleanup(func() { _ = fsys.Close() })
	return fsys, pauses
}

// read reads a file from an offset on.
func read(fsys *FS, off int64) ([]byte, error) {
	f, err := fsys.Open("file")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	r, err := f.(*handle).OpenRange(context.Background(), off, info.Size()-off)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestFilesOfAServer(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, headBytes - 1, headBytes, headBytes + 1, 3 * headBytes} {
		s := serve(t, contentOf(n), nil)
		fsys, _ := s.fs(t, Options{})
		f, err := fsys.Open("file")
		require.NoError(t, err, n)
		info, err := f.Stat()
		require.NoError(t, err)
		require.EqualValues(t, n, info.Size())
		require.Equal(t, "file", info.Name())
		require.NoError(t, iotest.TestReader(struct{ io.Reader }{f}, s.content), n)
		at := f.(io.ReaderAt)
		for _, off := range []int{0, n / 2, n - 1, n, n + 5} {
			p := make([]byte, 100)
			got, err := at.ReadAt(p, int64(max(off, 0)))
			want := s.content[min(max(off, 0), n):]
			if len(want) < len(p) {
				require.Equal(t, io.EOF, err)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, want[:min(len(want), len(p))], p[:got])
		}
		_, err = at.ReadAt(make([]byte, 1), -1)
		require.ErrorContains(t, err, "negative")
		require.NoError(t, f.Close())
		require.ErrorIs(t, f.Close(), fs.ErrClosed)
		_, err = at.ReadAt(make([]byte, 1), 0)
		require.ErrorIs(t, err, fs.ErrClosed)
		got, err := read(fsys, 0)
		require.NoError(t, err)
		require.True(t, bytes.Equal(s.content, got))
	}
}

// Whatever a server does, a reader gets the file's bytes or an error that tells what happened.
func TestServersThatLie(t *testing.T) {
	t.Parallel()
	content := contentOf(3 * headBytes)
	other := contentOf(3*headBytes + 1)[1:]
	status := func(code int) func(http.ResponseWriter, *http.Request, *server) {
		return func(w http.ResponseWriter, _ *http.Request, _ *server) { w.WriteHeader(code) }
	}
	part := func(r string, n int, header ...string) func(http.ResponseWriter, *http.Request, *server) {
		return func(w http.ResponseWriter, _ *http.Request, _ *server) {
			w.Header().Set("ETag", `"v1"`)
			w.Header().Set("Content-Range", r)
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, n))
		}
	}
	cut := func(n int) func(http.ResponseWriter, *http.Request, *server) {
		return func(w http.ResponseWriter, r *http.Request, s *server) {
			s.truth(&cutWriter{ResponseWriter: w, left: n}, r)
			panic(http.ErrAbortHandler)
		}
	}
	all := len(content)
	for name, tt := range map[string]struct {
		from  int64 // the first request that the lie answers
		times int64 // 0 is always
		lie   func(w http.ResponseWriter, r *http.Request, s *server)
		want  string // error, "" for the right bytes
		is    error
	}{
		"busy for a while":           {0, 3, status(503), "", nil},
		"busy later":                 {1, 3, status(429), "", nil},
		"busy for ever":              {1, 0, status(503), "503 Service Unavailable (after 4 attempts)", nil},
		"bad gateway":                {1, 1, status(502), "", nil},
		"missing":                    {0, 0, status(404), "404 Not Found", fs.ErrNotExist},
		"gone later":                 {1, 0, status(410), "410 Gone", fs.ErrNotExist},
		"refused":                    {0, 0, status(403), "Authorization", fs.ErrPermission},
		"expired later":              {1, 0, status(401), "expired", fs.ErrPermission},
		"teapot":                     {0, 0, status(418), "418", nil},
		"no bytes there":             {1, 0, status(416), "has changed", nil},
		"cut before the answer":      {0, 1, cut(0), "", nil},
		"cut in the head":            {0, 2, cut(1000), "", nil},
		"cut in the range":           {1, 3, cut(50_000), "", nil},
		"cut for ever":               {1, 0, cut(0), "after 4 attempts", nil},
		"cut after each 10000 bytes": {0, 0, cut(10_000), "", nil},
		"a page": {0, 0, func(w http.ResponseWriter, _ *http.Request, _ *server) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = io.WriteString(w, "<html>log in</html>")
		}, "text/html", nil},
		"a page later": {1, 0, func(w http.ResponseWriter, _ *http.Request, _ *server) {
			_, _ = io.WriteString(w, "<html>log in</html>") // net/http sets its type
		}, "text/html", nil},
		"no ranges": {0, 0, func(w http.ResponseWriter, _ *http.Request, s *server) {
			w.Header().Set("Content-Length", strconv.Itoa(len(s.content)))
			_, _ = w.Write(s.content)
		}, "ignores ranges", nil},
		"no ranges later": {1, 0, func(w http.ResponseWriter, _ *http.Request, s *server) {
			w.Header().Set("ETag", `"v1"`)
			_, _ = w.Write(s.content)
		}, "ignores ranges", nil},
		"another version": {1, 0, func(w http.ResponseWriter, r *http.Request, _ *server) {
			w.Header().Set("ETag", `"v2"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(other))
		}, "has changed", nil},
		"another version in the range": {1, 0, func(w http.ResponseWriter, r *http.Request, _ *server) {
			r.Header.Del("If-Range")
			w.Header().Set("ETag", `"v2"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(other))
		}, "has changed", nil},
		"another size":   {1, 0, part(fmt.Sprintf("bytes %d-%d/%d", 0, all-1, all+5), all), "has changed", nil},
		"another range":  {1, 0, part(fmt.Sprintf("bytes 1-%d/%d", all-1, all), all-1), "bytes 1 to", nil},
		"a longer range": {0, 0, part(fmt.Sprintf("bytes 0-%d/%d", all-1, all), all), "want 0 to", nil},
		"a shorter range": {1, 1, func(w http.ResponseWriter, r *http.Request, s *server) {
			r.Header.Set("Range", "bytes=0-99")
			s.truth(w, r)
		}, "", nil},
		"no range":          {0, 0, part("", 5), "the size of the file", nil},
		"a range backwards": {0, 0, part("bytes 5-0/10", 5), "bytes 5 to 0", nil},
		"no size":           {0, 0, part("bytes 0-4/*", 5), "the size of the file", nil},
		"a wrong length":    {0, 0, part("bytes 0-4/10", 3), "a length of 3", nil},
		"compressed":        {0, 0, part("bytes 0-4/5", 5, "Content-Encoding", "gzip"), "encoding \"gzip\"", nil},
		"a redirect without end": {0, 0, func(w http.ResponseWriter, r *http.Request, _ *server) {
			http.Redirect(w, r, "/dir/file", http.StatusFound)
		}, "more than 10 redirects", nil},
		"a redirect": {0, 1, func(w http.ResponseWriter, r *http.Request, _ *server) {
			http.Redirect(w, r, "/elsewhere?signature=secret", http.StatusFound)
		}, "", nil},
		"stalls": {1, 1, func(w http.ResponseWriter, r *http.Request, _ *server) { <-r.Context().Done() }, "", nil},
		"stalls in the range": {1, 1, func(w http.ResponseWriter, r *http.Request, s *server) {
			s.truth(&cutWriter{ResponseWriter: w, left: 1000}, r)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s *server
			s = serve(t, content, func(i int64, w http.ResponseWriter, r *http.Request) bool {
				if i < tt.from || tt.times > 0 && i >= tt.from+tt.times {
					return false
				}
				tt.lie(w, r, s)
				return true
			})
			o := Options{Attempts: 4}
			if strings.HasPrefix(name, "stalls") {
				o.Timeout = 300 * time.Millisecond
				o.Attempts = 50 // under load the truth may be late as well
			}
			fsys, _ := s.fs(t, o)
			got, err := read(fsys, 0)
			assert.Zero(t, len(fsys.slots), "requests that have not ended")
			if tt.want == "" {
				require.NoError(t, err)
				require.True(t, bytes.Equal(content, got))
				return
			}
			require.ErrorContains(t, err, tt.want)
			require.NotContains(t, err.Error(), "secret")
			require.Contains(t, err.Error(), s.URL+"/dir/file")
			if tt.is != nil {
				require.ErrorIs(t, err, tt.is)
			}
			require.True(t, bytes.HasPrefix(content, got), "a wrong byte")
		})
	}
}

// A cutWriter drops the bytes after some.
type cutWriter struct {
	http.ResponseWriter
	left int
}

func (c *cutWriter) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	if _, err := c.ResponseWriter.Write(p[:n]); err != nil {
		return 0, err
	}
	if n > 0 {
		_ = http.NewResponseController(c.ResponseWriter).Flush()
	}
	if n < len(p) {
		return n, errors.New("cut")
	}
	return n, nil
}

// Pauses grow, are of at least half their length, and are those that the server asks for.
func TestPauses(t *testing.T) {
	t.Parallel()
	after := ""
	s := serve(t, contentOf(10), func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Retry-After", after)
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	fsys, pauses := s.fs(t, Options{})
	_, err := fsys.Open("file")
	require.ErrorContains(t, err, "after 8 attempts")
	require.EqualValues(t, 8, s.requests.Load())
	require.Len(t, *pauses, 7)
	for i, d := range *pauses {
		whole := 100 * time.Millisecond << i
		require.GreaterOrEqual(t, d, whole/2)
		require.LessOrEqual(t, d, whole)
	}
	after = "17"
	fsys, pauses = s.fs(t, Options{Attempts: 2})
	_, err = fsys.Open("file")
	require.Error(t, err)
	require.Equal(t, []time.Duration{17 * time.Second}, *pauses)
	require.Equal(t, maxRetryAfter, retryAfter("100000"))
	require.Equal(t, maxRetryAfter, retryAfter(time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)))
	require.Zero(t, retryAfter(time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)))
	require.Zero(t, retryAfter("soon"))
}

// Contexts end requests and pauses, those of the FS and of the range.
func TestContextsEndRequests(t *testing.T) {
	t.Parallel()
	cause := errors.New("enough")
	began := make(chan bool, 1)
	content := contentOf(3 * headBytes)
	s := serve(t, content, func(i int64, _ http.ResponseWriter, r *http.Request) bool {
		if i == 0 {
			return false
		}
		began <- true
		<-r.Context().Done()
		return true
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	fsys, name, err := New(ctx, s.URL+"/file", Options{})
	require.NoError(t, err)
	f, err := fsys.Open(name)
	require.NoError(t, err)
	mine, end := context.WithCancelCause(t.Context())
	r, err := f.(*handle).OpenRange(mine, 5, int64(len(content)))
	require.NoError(t, err)
	go func() {
		<-began
		end(cause)
	}()
	_, err = io.ReadAll(r)
	require.ErrorIs(t, err, cause)
	_, again := r.Read(make([]byte, 1))
	require.Equal(t, err, again)
	require.NoError(t, r.Close())
	go func() {
		<-began
		cancel(cause)
	}()
	_, err = f.(*handle).ReadAt(make([]byte, 10), headBytes)
	require.ErrorIs(t, err, cause)
	_, err = fsys.Open("other")
	require.ErrorIs(t, err, cause)
	require.Empty(t, fsys.slots)
}

// The end of the FS's context ends the pause, and the wait for a connection, of a range that has another context.
func TestContextsEndWaits(t *testing.T) {
	t.Parallel()
	cause := errors.New("enough")
	s := serve(t, contentOf(3*headBytes), func(i int64, w http.ResponseWriter, _ *http.Request) bool {
		if i == 0 {
			return false
		}
		w.Header().Set("Retry-After", "60")
		w.WriteHeader(http.StatusTooManyRequests)
		return true
	})
	for name, prepare := range map[string]func(fsys *FS, cancel func()){
		"pause": func(fsys *FS, cancel func()) {
			fsys.pause = func(ctx context.Context, d time.Duration) error {
				cancel()
				return pause(ctx, d)
			}
		},
		"connection": func(fsys *FS, cancel func()) {
			fsys.slots <- struct{}{}
			cancel()
		},
	} {
		s.requests.Store(0)
		ctx, cancel := context.WithCancelCause(t.Context())
		fsys, file, err := New(ctx, s.URL+"/file", Options{Connections: 1})
		require.NoError(t, err)
		f, err := fsys.Open(file)
		require.NoError(t, err)
		prepare(fsys, func() { cancel(cause) })
		r, err := f.(*handle).OpenRange(t.Context(), headBytes, 10)
		require.NoError(t, err)
		_, err = r.Read(make([]byte, 1))
		require.ErrorIs(t, err, cause, name)
		require.NoError(t, r.Close())
	}
}

// No more requests than allowed are made at once, and connections are used again.
func TestConnections(t *testing.T) {
	t.Parallel()
	var now, most, connections atomic.Int64
	content := contentOf(40 * headBytes)
	s := &server{content: content}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := now.Add(1)
		defer now.Add(-1)
		for {
			old := most.Load()
			if n <= old || most.CompareAndSwap(old, n) {
				break
			}
		}
		s.truth(w, r)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	fsys, _ := s.fs(t, Options{Connections: 3})
	f, err := fsys.Open("file")
	require.NoError(t, err)
	var running sync.WaitGroup
	for i := range 30 {
		running.Go(func() {
			p := make([]byte, headBytes)
			_, err := f.(io.ReaderAt).ReadAt(p, int64(headBytes+i*headBytes))
			assert.NoError(t, err)
			assert.True(t, bytes.Equal(content[headBytes+i*headBytes:][:headBytes], p))
		})
	}
	running.Wait()
	require.LessOrEqual(t, most.Load(), int64(4)) // a handler may end after its client
	require.Less(t, connections.Load(), int64(20))
	require.Empty(t, fsys.slots)
}

func TestHeadersAndURLs(t *testing.T) {
	t.Parallel()
	seen := make(chan *http.Request, 10)
	s := serve(t, contentOf(10), func(_ int64, _ http.ResponseWriter, r *http.Request) bool {
		seen <- r.Clone(context.Background())
		return false
	})
	fsys, _ := s.fs(t, Options{Header: http.Header{"authorization": {"Bearer x"}, "Range": {"bytes=5-6"}}})
	_, err := fsys.Open("sub/a b")
	require.NoError(t, err)
	r := <-seen
	assert.Equal(t, "/dir/sub/a b", r.URL.Path)
	assert.Equal(t, "secret", r.URL.Query().Get("token"))
	assert.Equal(t, "Bearer x", r.Header.Get("Authorization"))
	assert.Equal(t, fmt.Sprintf("bytes=0-%d", headBytes-1), r.Header.Get("Range"))
	info, err := fs.Stat(fsys, "sub/a b")
	require.NoError(t, err)
	require.EqualValues(t, 10, info.Size())
	require.Empty(t, seen, "one request for a file")
	for raw, want := range map[string]string{ // how names that have a slash are written
		"/m/resolve/refs%2Fpr%2F1/model.gguf": "/m/resolve/refs%2Fpr%2F1/model.gguf",
		"/o/a%2fmodel.gguf?alt=media":         "/o/a%2fmodel.gguf",
		"/a b/c+d%20e.gguf":                   "/a%20b/c+d%20e.gguf",
		"/model.gguf":                         "/model.gguf",
	} {
		escaped, name, err := New(t.Context(), s.URL+raw, Options{})
		require.NoError(t, err)
		require.NotContains(t, name, "/")
		_, err = escaped.Open(name)
		require.NoError(t, err)
		require.Equal(t, want, (<-seen).URL.EscapedPath())
	}
	for _, name := range []string{"../x", "/x", ""} {
		_, err = fsys.Open(name)
		require.ErrorIs(t, err, fs.ErrInvalid, name)
	}
	_, err = fsys.Open(".")
	require.ErrorIs(t, err, errors.ErrUnsupported)
	for raw, want := range map[string]string{"ftp://h/x": "http or https", "http://": "with a host", "http://u:secret@[x": "not a URL", "model": "http or https"} {
		_, _, err = New(t.Context(), raw, Options{})
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "secret")
	}
	_, _, err = New(t.Context(), s.URL, Options{Attempts: -1})
	require.ErrorContains(t, err, "negative")
	_, name, err := New(t.Context(), s.URL+"/a/", Options{})
	require.NoError(t, err)
	require.Equal(t, ".", name)
	require.ErrorIs(t, checkRedirect(&http.Request{URL: fsys.urlOf("x")}, []*http.Request{{URL: &url.URL{Scheme: "https"}}}), errDowngrade)
	_, err = (&FS{}).Open("x")
	require.ErrorContains(t, err, "New")
	require.NoError(t, (*FS)(nil).Close())
}

// idle is a body that returns no bytes and no error.
type idle struct{ io.Closer }

func (idle) Read([]byte) (int, error) { return 0, nil }

type idleTransport struct{ http.RoundTripper }

func (t idleTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		response.Body = idle{response.Body}
	}
	return response, err
}

// Reads that return nothing, as those of a Client's own Transport may, are no endless loop.
func TestReadsWithoutBytes(t *testing.T) {
	t.Parallel()
	s := serve(t, contentOf(1000), nil)
	fsys, pauses := s.fs(t, Options{Attempts: 3, Client: &http.Client{Transport: idleTransport{http.DefaultTransport}}})
	_, err := fsys.Open("file")
	require.ErrorIs(t, err, io.ErrNoProgress)
	require.ErrorContains(t, err, "after 3 attempts")
	require.Len(t, *pauses, 2)
	require.Empty(t, fsys.slots)
}
