// Package httpfs reads files of HTTP and HTTPS servers by ranges: models, without a copy on disk.
//
//	fsys, name, err := httpfs.New(ctx, "https://models.example.org/llama/model.safetensors.index.json", httpfs.Options{})
//	m, err := weights.OpenModelFS(fsys, name)
//	... // plan and load
//	err = errors.Join(m.Close(), fsys.Close())
//
// The server must support ranges (RFC 9110), as object stores, CDNs and common web servers do. Opening a file is one
// request, which reads its first 128 KiB too. A load then reads long ranges, several at once, each over a connection of
// its own.
//
// What a server returns is compared with the request: the range, the size of the file, its ETag or the time of its last
// change, and the encoding. So a file that changes, a page of HTML instead of a file, and a server that ignores ranges
// are errors. A connection that is cut, does not go on, or ends early, and an answer that says that the server is busy
// (408, 425, 429, 500, 502, 503, 504), are tried again from the byte on that is missing.
//
// # Checksums
//
// With Options.Checksums a file has the first of these checksums that its server tells of:
//
//	CRC-32C, CRC-64/NVME or CRC-32 of the file  x-amz-checksum-*, x-goog-hash
//	the same, or SHA-256, of an object's parts  x-amz-checksum-*
//	MD5 of an object's parts                    ETag of S3-compatible storage
//	SHA-256 of the file                         x-amz-checksum-sha256, X-Linked-ETag of a model hub, Repr-Digest
//	MD5 of the file                             x-goog-hash, ETag of S3-compatible storage
//
// Bytes are added to it as they come, in any order, whoever reads them. The read that completes it returns [ErrChecksum] if
// it differs, and so does the load whose read that is. CRCs are computed of ranges and then combined. SHA-256 and MD5 need
// the bytes in order: of each file, or part, those that come early are copied, up to 128 MiB of them. Beyond this, and if
// some bytes are not read at all, the checksum stays incomplete, which is no error: [FS.Verify] reads the rest.
//
// A checksum costs CPU time for each GB: about 0.05 s for CRC-32C and CRC-32, 0.6 s for CRC-64/NVME and SHA-256, 1.5 s for
// MD5. Opening a file of S3-compatible storage takes one or two requests more.
package httpfs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"
)

// Options shape an FS. The zero value suits public files.
type Options struct {
	// Header is sent with each request, for instance an Authorization. net/http does not send that to another host that
	// a server redirects to.
	Header http.Header
	// Client makes the requests, for instance with certificates, or a Transport that signs requests. Its Timeout would
	// include the whole time of reading a range. A Transport of net/http keeps two idle connections to a server unless
	// its MaxIdleConnsPerHost says more, and has one for all ranges if it may use HTTP/2. nil is a client that
	// uses HTTP/1.1, the proxy of the environment (HTTPS_PROXY), and no redirect from HTTPS to HTTP.
	Client *http.Client
	// Connections is the largest number of requests at a time. 0 is 16. One load uses up to eight for each set of
	// devices that get the same tensors.
	Connections int
	// Timeout is the time that a server may take to answer, or to go on. 0 is 30 seconds. Later it counts as an attempt.
	Timeout time.Duration
	// Attempts is the number of requests in a row that may fail without a byte before the error is returned. 0 is 8.
	// Between them are pauses, which grow from 0.1 to 10 seconds, half of it at random, or those that the server asks
	// for (Retry-After), up to a minute.
	Attempts int
	// Checksums compares the bytes with a checksum that the server has, as they come: see "Checksums" in the documentation
	// of the package.
	Checksums bool
}

// An FS is the file system of a directory of a server. It opens files by their names, and lists none. It keeps the first
// 128 KiB of each file that was opened, and has each file as it was then: a file that changed is an error. Its methods
// may be called from any goroutine.
type FS struct {
	ctx   context.Context
	base  *url.URL
	o     Options
	own   *http.Transport // nil with Options.Client
	slots chan struct{}   // as many as there may be requests
	pause func(context.Context, time.Duration) error

	files sync.Map // of *entry, by name
}

// An entry is a file, which one goroutine opens while others wait.
type entry struct {
	lock chan struct{}
	file *file
}

// New returns the file system of the directory that a URL is in, and the name of the URL's file there: "." if the URL
// ends in a slash. A query of the URL, such as a token, is sent with each request. ctx ends all requests. New makes none.
// The error is that of a URL that is not of HTTP or HTTPS, or of options that are negative.
func New(ctx context.Context, rawURL string, o Options) (fsys *FS, name string, err error) {
	u, err := url.Parse(rawURL)
	switch {
	case ctx == nil:
		return nil, "", errors.New("httpfs: the context is nil")
	case err != nil:
		return nil, "", errors.New("httpfs: not a URL") // which may contain a password
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, "", fmt.Errorf("httpfs: open %s: want a URL of http or https, with a host", shown(u))
	case o.Connections < 0 || o.Timeout < 0 || o.Attempts < 0:
		return nil, "", fmt.Errorf("httpfs: open %s: %d connections, a timeout of %v, %d attempts: must not be negative", shown(u), o.Connections, o.Timeout, o.Attempts)
	}
	o.Connections = cmp.Or(o.Connections, 16)
	o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	o.Attempts = cmp.Or(o.Attempts, 8)
	fsys = &FS{ctx: ctx, base: u, slots: make(chan struct{}, o.Connections), pause: pause}
	if o.Client == nil {
		fsys.own = newTransport(o)
		o.Client = &http.Client{Transport: fsys.own, CheckRedirect: checkRedirect}
	}
	fsys.o = o
	dir, name := path.Split(u.Path)
	u.Path, u.RawPath = dir, rawDir(u)
	return fsys, cmp.Or(name, "."), nil
}

// rawDir returns the directory of a URL's file as the URL spells it: in the API of a server %2F may be a character of
// a name.
func rawDir(u *url.URL) string {
	dir, name := path.Split(u.EscapedPath())
	if i := strings.LastIndex(strings.ToUpper(name), "%2F"); i >= 0 {
		dir += name[:i+len("%2F")]
	}
	return dir
}

func newTransport(o Options) *http.Transport {
	var http1 http.Protocols
	http1.SetHTTP1(true) // HTTP/2 would have one connection for all ranges
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		Protocols:           &http1,
		MaxIdleConnsPerHost: o.Connections,
		IdleConnTimeout:     time.Minute,
		TLSHandshakeTimeout: o.Timeout,
		ReadBufferSize:      64 << 10,
		DisableCompression:  true,
	}
}

var errDowngrade = errors.New("a redirect from HTTPS to HTTP")

func checkRedirect(to *http.Request, via []*http.Request) error {
	switch {
	case len(via) >= 10:
		return errRedirects
	case to.URL.Scheme != "https" && via[len(via)-1].URL.Scheme == "https":
		return errDowngrade
	}
	return nil
}

var errRedirects = errors.New("more than 10 redirects")

// Close closes connections that are idle. Files that are open can be read nevertheless. It returns no error.
func (f *FS) Close() error {
	if f != nil && f.own != nil {
		f.own.CloseIdleConnections()
	}
	return nil
}

// Open opens a file, whose type has the methods of [io.ReaderAt] and transfer.RangeOpener. The error is a *[fs.PathError].
// It wraps [fs.ErrNotExist] if the server has no such file (404, 410), [fs.ErrPermission] if it refuses the request (401,
// 403), and the context's if that ends.
func (f *FS) Open(name string) (fs.File, error) {
	opened, err := f.open(name)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return &handle{file: opened}, nil
}

// Verify compares a file with the checksum that its server has: it reads what has not been read yet, parts at once, and in
// order. It needs Options.Checksums. The error wraps [ErrChecksum] if they differ, [errors.ErrUnsupported] if the server
// has no checksum, and is that of Open or of reading otherwise. When ctx ends, Verify returns its error.
func (f *FS) Verify(ctx context.Context, name string) error {
	if ctx == nil {
		return errors.New("httpfs: the context is nil")
	}
	opened, err := f.open(name)
	if err == nil {
		err = opened.verify(ctx)
	}
	if err != nil {
		return &fs.PathError{Op: "verify", Path: name, Err: err}
	}
	return nil
}

// open returns a file, which is opened once.
func (f *FS) open(name string) (*file, error) {
	switch {
	case f == nil || f.base == nil:
		return nil, errors.New("httpfs: not made by New")
	case !fs.ValidPath(name):
		return nil, fs.ErrInvalid
	case name == ".":
		return nil, fmt.Errorf("the server lists no files: %w", errors.ErrUnsupported)
	}
	found, _ := f.files.LoadOrStore(name, &entry{lock: make(chan struct{}, 1)})
	e := found.(*entry)
	select {
	case e.lock <- struct{}{}:
		defer func() { <-e.lock }()
	case <-f.ctx.Done():
		return nil, context.Cause(f.ctx)
	}
	if e.file != nil {
		return e.file, nil
	}
	opened := &file{fs: f, name: path.Base(name), url: f.urlOf(name), size: -1}
	if err := opened.open(); err != nil {
		return nil, err
	}
	e.file = opened
	return opened, nil
}

func (f *FS) urlOf(name string) *url.URL {
	u := *f.base
	u.Path += name
	u.RawPath += (&url.URL{Path: name}).EscapedPath()
	return &u
}

// shown returns a URL without its password and query, which may be secret.
func shown(u *url.URL) string {
	v := *u
	v.User, v.RawQuery, v.Fragment = nil, "", ""
	return v.String()
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// isPage reports whether an answer is a page for people, of a login or a proxy.
func isPage(h http.Header) bool {
	kind, _, _ := strings.Cut(strings.ToLower(h.Get("Content-Type")), ";")
	kind = strings.TrimSpace(kind)
	return kind == "text/html" || kind == "application/xhtml+xml"
}
