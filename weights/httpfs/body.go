package httpfs

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// A body reads a range of a file, by one request or, after failures, several.
type body struct {
	ctx     context.Context
	file    *file
	at, end int64

	response io.ReadCloser   // nil before a request and after a failure
	sent     context.Context // of the request
	cancel   context.CancelCauseFunc
	unlink   func() bool // of the context of the FS
	stall    *time.Timer // ends the request that does not go on
	failed   int         // attempts in a row without a byte
	empty    int         // reads in a row without a byte or an error
	err      error       // which is final
}

var errStalled = errors.New("the server does not go on")

// maxEmptyReads is the number of reads in a row in which a response may have no bytes, as in package bufio.
const maxEmptyReads = 100

// Read reads what the server has sent, and makes requests where that is needed.
func (b *body) Read(p []byte) (n int, err error) {
	for n == 0 && err == nil {
		switch {
		case b.err != nil:
			return 0, b.err
		case b.at >= b.end:
			b.stop()
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		}
		n, err = b.readSome(p[:min(int64(len(p)), b.end-b.at)])
		if b.at += int64(n); n > 0 {
			b.failed, b.empty = 0, 0
		}
		if b.empty++; err == nil && b.empty > maxEmptyReads {
			b.empty, err = 0, io.ErrNoProgress
		}
		if b.at == b.end {
			b.stop()
			return n, nil
		}
		if err != nil {
			b.stop()
			err = b.retry(err)
		}
	}
	return n, err
}

// readSome reads from a response.
func (b *body) readSome(p []byte) (n int, err error) {
	if b.response == nil {
		if err := b.request(); err != nil {
			return 0, err
		}
		if b.at >= b.end { // an empty file
			return 0, nil
		}
		p = p[:min(int64(len(p)), b.end-b.at)] // the first request reports the size
	}
	b.stall.Reset(b.file.fs.o.Timeout)
	n, err = b.response.Read(p)
	b.stall.Stop()
	if wrong := b.file.sums.add(b.at, p[:n]); wrong != nil {
		return 0, final{wrong}
	}
	if err != nil && context.Cause(b.sent) == errStalled {
		return n, errStalled
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
		if b.at+int64(n) == b.end {
			err = nil
		}
	}
	return n, err
}

// stop ends the request, and gives its place to others.
func (b *body) stop() {
	if b.cancel == nil {
		return
	}
	if b.response != nil {
		b.response.Close()
	}
	b.stall.Stop()
	b.unlink()
	b.cancel(nil)
	b.response, b.cancel = nil, nil
	<-b.file.fs.slots
}

// Close ends the request.
func (b *body) Close() error {
	b.stop()
	if b.err == nil {
		b.err = fs.ErrClosed
	}
	return nil
}

// A temporary error is tried again, after the time that the server asks for.
type temporary struct {
	error
	after time.Duration
}

func (t temporary) Unwrap() error { return t.error }

// A final error is not tried again.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// retry waits for the next attempt after an error, or returns what is final.
func (b *body) retry(err error) error {
	b.failed++
	var last final
	var t temporary
	errors.As(err, &t)
	switch {
	case b.ctx.Err() != nil:
		err = context.Cause(b.ctx)
	case b.file.fs.ctx.Err() != nil:
		err = context.Cause(b.file.fs.ctx)
	case errors.As(err, &last):
		err = last.error
	case b.failed >= b.file.fs.o.Attempts:
		err = fmt.Errorf("%w (after %d attempts)", err, b.failed)
	default:
		d := min(100*time.Millisecond<<min(b.failed-1, 10), 10*time.Second)
		d = d/2 + rand.N(d/2+1)
		if err = b.pause(max(d, t.after)); err == nil {
			return nil
		}
	}
	b.err = fmt.Errorf("httpfs: read %s at offset %d: %w", shown(b.file.url), b.at, err)
	return b.err
}

// pause waits, unless a context ends.
func (b *body) pause(d time.Duration) error {
	ctx, cancel := context.WithCancelCause(b.ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.file.fs.ctx, func() { cancel(context.Cause(b.file.fs.ctx)) })()
	return b.file.fs.pause(ctx, d)
}

// request asks for the rest of the range.
func (b *body) request() (err error) {
	f := b.file
	r, err := b.send(http.MethodGet, f.url, func(h http.Header) {
		h.Set("Range", fmt.Sprintf("bytes=%d-%d", b.at, b.end-1))
		if f.size >= 0 && isStrong(f.etag) {
			h.Set("If-Range", f.etag)
		}
	})
	if err != nil {
		return err
	}
	return b.check(r)
}

// send sends a request, whose header set completes, and waits for the response, which stop ends.
func (b *body) send(method string, to *url.URL, set func(http.Header)) (*http.Response, error) {
	f := b.file
	select {
	case f.fs.slots <- struct{}{}:
	case <-b.ctx.Done():
		return nil, context.Cause(b.ctx)
	case <-f.fs.ctx.Done():
		return nil, context.Cause(f.fs.ctx)
	}
	ctx, cancel := context.WithCancelCause(b.ctx)
	b.sent, b.cancel = ctx, cancel
	b.unlink = context.AfterFunc(f.fs.ctx, func() { cancel(context.Cause(f.fs.ctx)) })
	b.stall = time.AfterFunc(f.fs.o.Timeout, func() { cancel(errStalled) })
	request, err := http.NewRequestWithContext(ctx, method, to.String(), nil)
	if err != nil {
		return nil, final{errors.New("the URL makes no request")}
	}
	for key, values := range f.fs.o.Header {
		request.Header[http.CanonicalHeaderKey(key)] = values
	}
	request.Header.Set("Accept-Encoding", "identity")
	set(request.Header)
	response, err := f.fs.o.Client.Do(request)
	b.stall.Stop()
	if err != nil {
		return nil, requestError(ctx, err)
	}
	b.response = response.Body
	return response, nil
}

// requestError returns an error without the URL, whose query may be secret.
func requestError(ctx context.Context, err error) error {
	if context.Cause(ctx) == errStalled {
		return errStalled
	}
	var of *url.Error
	if errors.As(err, &of) {
		err = of.Err
	}
	var certificate *tls.CertificateVerificationError
	var name *net.DNSError
	if errors.Is(err, errDowngrade) || errors.Is(err, errRedirects) || errors.As(err, &certificate) || errors.As(err, &name) && name.IsNotFound {
		return final{err}
	}
	return err
}

func isStrong(etag string) bool { return etag != "" && !strings.HasPrefix(etag, "W/") }

// check compares a response with the request, and takes the size of the file from the first one.
func (b *body) check(r *http.Response) error {
	f := b.file
	switch r.StatusCode {
	case http.StatusPartialContent:
		return b.checkRange(r)
	case http.StatusOK:
		return b.checkWhole(r)
	case http.StatusRequestedRangeNotSatisfiable:
		if f.size < 0 && strings.HasSuffix(strings.TrimSpace(r.Header.Get("Content-Range")), "*/0") {
			f.remember(r, 0)
			b.end = 0
			return nil
		}
		return final{fmt.Errorf("the server does not have bytes %d to %d: the file has changed, or its size is unknown (%s)", b.at, b.end-1, r.Status)}
	}
	return statusError(r)
}

// statusError returns the error of a response that has not the file.
func statusError(r *http.Response) error {
	switch r.StatusCode {
	case http.StatusNotFound, http.StatusGone:
		return final{fmt.Errorf("%w (%s)", fs.ErrNotExist, r.Status)}
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired:
		return final{fmt.Errorf("%w (%s): the request needs an Authorization, or a URL that has not expired", fs.ErrPermission, r.Status)}
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return temporary{fmt.Errorf("the server answered %s", r.Status), retryAfter(r.Header.Get("Retry-After"))}
	}
	return final{fmt.Errorf("the server answered %s", r.Status)}
}

// checkRange compares the range of a response with the one that was asked for.
func (b *body) checkRange(r *http.Response) error {
	f := b.file
	from, to, size, ok := parseContentRange(r.Header.Get("Content-Range"))
	switch {
	case !ok:
		return final{fmt.Errorf("the server answered with the range %q, want bytes %d to %d and the size of the file", r.Header.Get("Content-Range"), b.at, b.end-1)}
	case from != b.at || to >= b.end || to < from || to >= size:
		return final{fmt.Errorf("the server answered with bytes %d to %d of %d, want %d to %d", from, to, size, b.at, b.end-1)}
	case r.ContentLength >= 0 && r.ContentLength != to-from+1:
		return final{fmt.Errorf("the server answered with bytes %d to %d, and a length of %d", from, to, r.ContentLength)}
	}
	if err := f.checkVersion(r, size); err != nil {
		return err
	}
	b.end = min(b.end, size)
	b.response = struct {
		io.Reader // which ends with the range, whatever the server sends
		io.Closer
	}{io.LimitReader(r.Body, to-from+1), r.Body}
	return nil
}

// checkWhole accepts the whole of a short file from a server that ignores ranges.
func (b *body) checkWhole(r *http.Response) error {
	f := b.file
	switch {
	case isPage(r.Header):
		return final{errors.New("the server answered with a page (text/html) instead of the file: a login or a proxy may be in between")}
	case f.size >= 0 && !f.isVersion(r):
		return final{errors.New("the file has changed since it was opened")}
	case b.at > 0 || r.ContentLength < 0 || r.ContentLength > headBytes:
		return final{fmt.Errorf("the server ignores ranges (it answered %s, want 206 Partial Content): download the file, or serve it by another server", r.Status)}
	}
	if err := f.checkVersion(r, r.ContentLength); err != nil {
		return err
	}
	b.end = min(b.end, r.ContentLength)
	return nil
}

// checkVersion returns an error unless the response is of the file as it was when it was opened. The first one is.
func (f *file) checkVersion(r *http.Response, size int64) error {
	encoding := r.Header.Get("Content-Encoding")
	switch {
	case encoding != "" && !strings.EqualFold(encoding, "identity"):
		return final{fmt.Errorf("the server sends the file in the encoding %q, although none was asked for", encoding)}
	case f.size < 0:
		f.remember(r, size)
		return nil
	case size != f.size:
		return final{fmt.Errorf("the file has changed since it was opened: it has %d bytes, it had %d", size, f.size)}
	case !f.isVersion(r):
		return final{errors.New("the file has changed since it was opened")}
	}
	return nil
}

func (f *file) remember(r *http.Response, size int64) {
	f.size, f.etag, f.modified = size, r.Header.Get("ETag"), r.Header.Get("Last-Modified")
	if f.fs.o.Checksums {
		f.told = r
	}
}

// isVersion reports whether a response has the file's ETag, or without one the time of its last change.
func (f *file) isVersion(r *http.Response) bool {
	if f.etag != "" {
		return r.Header.Get("ETag") == f.etag
	}
	return r.Header.Get("Last-Modified") == f.modified
}

// parseContentRange parses "bytes 0-99/1000".
func parseContentRange(s string) (from, to, size int64, ok bool) {
	unit, rest, _ := strings.Cut(strings.TrimSpace(s), " ")
	span, total, _ := strings.Cut(strings.TrimSpace(rest), "/")
	first, last, _ := strings.Cut(span, "-")
	var list [3]int64
	for i, text := range []string{first, last, total} {
		n, err := strconv.ParseUint(text, 10, 63)
		if err != nil {
			return 0, 0, 0, false
		}
		list[i] = int64(n)
	}
	return list[0], list[1], list[2], strings.EqualFold(unit, "bytes")
}

// maxRetryAfter is the longest pause that a server may ask for.
const maxRetryAfter = time.Minute

// retryAfter returns the pause that a server asks for, in seconds or until a time.
func retryAfter(s string) time.Duration {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return min(time.Duration(n)*time.Second, maxRetryAfter)
	}
	if at, err := http.ParseTime(s); err == nil {
		return min(max(time.Until(at), 0), maxRetryAfter)
	}
	return 0
}
