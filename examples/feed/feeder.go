//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/loader"
)

// handshakeTimeout is how long a consumer may take for its hello.
const handshakeTimeout = 10 * time.Second

// acceptPause is the time between two tries to accept a connection after one that failed.
const acceptPause = 100 * time.Millisecond

// errNoConsumer is the end of a connection that never became a consumer, such as that of another feeder which looks
// whether one listens.
var errNoConsumer = errors.New("it ended before its hello")

// A feeder serves consumers. Each has a loader and a ring of its own, so that none waits for another,
// and the end of one leaves nothing to the others.
type feeder struct {
	data   dataset
	o      loader.Options
	epochs int
	log    *log.Logger
}

// listen returns the listener of an address: a path, or "@name" in the abstract namespace, where the
// kernel removes it with the process. The file of a feeder that was killed is replaced, by one of those
// that begin together.
func listen(address string) (*net.UnixListener, error) {
	var config net.ListenConfig
	if !strings.HasPrefix(address, "@") {
		unlock, err := lock(filepath.Dir(address))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", address, err)
		}
		defer unlock() // until the new socket listens: another feeder would take it for one that was left behind
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: address, Net: "unixpacket"})
		switch {
		case err == nil:
			conn.Close()
			return nil, fmt.Errorf("%s: a feeder listens there already", address)
		case errors.Is(err, syscall.ECONNREFUSED): // nobody listens
			if info, err := os.Lstat(address); err == nil && info.Mode()&os.ModeSocket != 0 {
				_ = os.Remove(address) // if it stays, Listen names the reason
			}
		case !errors.Is(err, fs.ErrNotExist): // a socket of another kind, or one that is busy
			return nil, fmt.Errorf("%s: in use by another program: %w", address, err)
		}
		// bind gives the file the mode of the socket, so that it is never open to others.
		config.Control = func(_, _ string, c syscall.RawConn) error {
			var failed error
			err := c.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) })
			return errors.Join(err, failed)
		}
	}
	l, err := config.Listen(context.Background(), "unixpacket", address)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// lock locks a directory (flock), which leaves no file behind. Feeders keep it for moments, other programs for any
// time.
func lock(directory string) (unlock func(), err error) {
	dir, err := os.Open(directory)
	if err != nil {
		return nil, err
	}
	err = unix.EWOULDBLOCK
	for tries := 0; errors.Is(err, unix.EWOULDBLOCK) && tries < 300; tries++ {
		if err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return func() { _ = dir.Close() }, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = dir.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another program has locked it: %w", err)
	}
	return nil, fmt.Errorf("lock %s: %w", directory, err)
}

// run serves until consumers of them have ended well, or ctx ends; 0 consumers is no limit. The error
// names each consumer that did not end well.
func (f *feeder) run(ctx context.Context, listener *net.UnixListener, consumers int) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	defer listener.Close()
	var (
		mu     sync.Mutex
		errs   []error
		done   int
		served sync.WaitGroup
	)
	for {
		conn, err := listener.AcceptUnix()
		if err != nil && ctx.Err() == nil && !errors.Is(err, net.ErrClosed) { // no descriptor or memory is free now
			f.log.Printf("accept: %v: tried again", err)
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		if err != nil {
			served.Wait()
			if ctx.Err() == nil {
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}
		served.Go(func() {
			err := f.serve(ctx, conn)
			mu.Lock()
			defer mu.Unlock()
			if errors.Is(err, errNoConsumer) {
				f.log.Print(err)
				return
			}
			if err != nil {
				f.log.Print(err)
				errs = append(errs, err)
				return
			}
			if done++; done == consumers {
				end()
			}
		})
	}
}

// serve feeds a consumer until it has all batches, or says that it needs no other.
func (f *feeder) serve(ctx context.Context, conn *net.UnixConn) (err error) {
	defer conn.Close()
	name := "a consumer"
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", name, err)
		}
	}()
	buf := make([]byte, maxMessage)
	h, err := f.greet(ctx, conn, buf)
	if err != nil {
		return f.refuse(conn, err)
	}
	name = fmt.Sprintf("rank %d of %d", h.Rank, h.World)
	var mem *ring
	o := f.o
	o.Start = h.Start
	l, err := loader.NewHost(shardOf(f.data, h.Rank, h.World), o, func(n int) (_ []byte, err error) {
		if mem, err = newRing(n); err != nil {
			return nil, err
		}
		return mem.mem, nil
	})
	if err != nil {
		if mem != nil {
			err = errors.Join(err, mem.close())
		}
		return f.refuse(conn, err)
	}
	defer func() {
		if closing := l.Close(); closing != nil {
			err = errors.Join(err, closing) // the ring stays: something writes it
			return
		}
		err = errors.Join(err, mem.close())
	}()
	if !hasEpoch(l, f.epochs) {
		return f.refuse(conn, fmt.Errorf("the start is at the end: there are %d epochs", f.epochs))
	}
	err = sendJSON(conn, welcome{
		Protocol: protocolVersion, Ring: len(mem.mem), BatchSize: f.o.BatchSize, Samples: f.data.Len() / h.World,
		Epochs: f.epochs, Fields: f.data.describe(),
	}, mem.fd)
	if err = errors.Join(err, mem.closeFile()); err != nil {
		return err
	}
	f.log.Printf("%s: begins, with a ring of %d bytes", name, len(mem.mem))
	return f.feed(ctx, conn, l, buf)
}

// greet reads the hello.
func (f *feeder) greet(ctx context.Context, conn *net.UnixConn, buf []byte) (h hello, err error) {
	if strings.HasPrefix(conn.LocalAddr().String(), "@") {
		if err := samePerson(conn); err != nil {
			return h, err
		}
	}
	if err := conn.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return h, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	message, err := receive(conn, buf)
	if ended := !stop(); ended || errors.Is(err, errDied) {
		return h, errNoConsumer
	}
	if err != nil {
		return h, fmt.Errorf("no hello: %w", err)
	}
	if h, err = parseHello(message); err != nil {
		return h, err
	}
	if n := f.data.Len() / h.World; n == 0 || f.o.DropLast && n < f.o.BatchSize {
		return h, fmt.Errorf("%d samples for %d ranks: none has a batch", f.data.Len(), h.World)
	}
	return h, conn.SetReadDeadline(time.Time{})
}

// refuse tells a consumer why it gets no batches, and returns the reason.
func (f *feeder) refuse(conn *net.UnixConn, reason error) error {
	_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = sendJSON(conn, welcome{Protocol: protocolVersion, Error: cut(reason.Error())}, -1) // it may be gone
	return reason
}

// hasEpoch reports whether a loader begins with an epoch below epochs.
func hasEpoch(l *loader.Loader, epochs int) bool {
	for range l.Epochs(epochs) {
		return true
	}
	return false
}

// cut shortens a text to what fits into a message in any encoding.
func cut(text string) string { return text[:min(len(text), maxMessage/8)] }

// A session is what a consumer has of its loader.
type session struct {
	held sync.Map // *loader.Batch by their serial numbers: that are sent and not released
}

func (s *session) release(serial uint64) error {
	b, ok := s.held.LoadAndDelete(serial)
	if !ok {
		return fmt.Errorf("%w: the release of batch %d, which the consumer does not have", errProtocol, serial)
	}
	return b.(*loader.Batch).Release()
}

var (
	errBye   = errors.New("the consumer needs no other batch")
	errEnded = errors.New("the feeder was ended")
)

// feed sends batches, and takes them back when they are released: a consumer that releases none stops
// its own loader, when the ring is full.
func (f *feeder) feed(ctx context.Context, conn *net.UnixConn, l *loader.Loader, buf []byte) error {
	parent := ctx
	ctx, end := context.WithCancelCause(ctx)
	s := &session{}
	var reading sync.WaitGroup
	reading.Go(func() { end(s.read(conn, buf)) })
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = conn.SetDeadline(time.Unix(1, 0)) // ends a write that waits for the consumer
		close(interrupted)
	})
	err := s.send(ctx, conn, l, f.epochs, len(f.data.Fields()))
	if err == nil || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		<-ctx.Done() // the consumer has all, or is gone: its last message, or its end, says how
	}
	end(err)
	if !stop() {
		<-interrupted
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errBye):
		err = nil
	case parent.Err() != nil:
		err = errEnded
	default:
		err = cause
	}
	if err != nil {
		text := append(binary.LittleEndian.AppendUint32(nil, kindError), cut(err.Error())...)
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = conn.Write(text) // it may be gone
	}
	_ = conn.SetReadDeadline(time.Unix(1, 0))
	reading.Wait()
	s.held.Range(func(serial, _ any) bool {
		err = errors.Join(err, s.release(serial.(uint64)))
		return true
	})
	return err
}

// send sends the batches of all epochs. Another goroutine writes them, so that the loop goes on meanwhile.
func (s *session) send(ctx context.Context, conn *net.UnixConn, l *loader.Loader, epochs, fields int) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	messages, written := make(chan []byte, maxTogether), make(chan error, 1)
	go func() {
		defer stop()
		written <- writePackets(conn, messages)
	}()
	err := s.encodeAll(ctx, messages, l, epochs, fields)
	close(messages)
	if failed := <-written; failed != nil {
		return failed
	}
	return err
}

// encodeAll encodes the batches of all epochs.
func (s *session) encodeAll(ctx context.Context, messages chan<- []byte, l *loader.Loader, epochs, fields int) error {
	serial := uint64(0)
	for range l.Epochs(epochs) {
		for b, err := range l.Batches(ctx) {
			if err != nil {
				return err
			}
			b.Retain()
			s.held.Store(serial, b)
			message, err := delivery{serial, b, fields}.encode()
			if err != nil {
				return err
			}
			select {
			case messages <- message:
			case <-ctx.Done():
				return ctx.Err()
			}
			serial++
		}
	}
	return nil
}

// read takes the consumer's messages until it ends. It returns why.
func (s *session) read(conn *net.UnixConn, buf []byte) error {
	for {
		message, err := receive(conn, buf)
		if err != nil {
			return err
		}
		bye, err := parseRelease(message, s.release)
		switch {
		case bye:
			return errBye
		case err != nil:
			return err
		}
	}
}
