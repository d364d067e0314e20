//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/loader"
)

const (
	// protocolVersion is the version that both sides must have.
	protocolVersion = 2
	// maxMessage is the size of the longest message in bytes. A packet that is longer is cut off by
	// the kernel and refused.
	maxMessage = 64 << 10
	// maxWorld is the largest number of shards.
	maxWorld = 1 << 20
	// maxTogether is the maximum number of batches in a packet.
	maxTogether = 32
)

// Kinds of the messages that are not JSON. Each begins with its kind as a little-endian uint32; no
// kind is the beginning of a JSON object.
const (
	kindBatch   = 1 // to the consumer: a batch is in the ring; see delivery. A packet has one or several
	kindRelease = 2 // to the feeder: batches may be overwritten; see parseRelease
	kindBye     = 3 // to the feeder, byeBytes: the consumer ends, and needs no other batch
	kindError   = 4 // to the consumer: the text follows; nothing else comes after it
)

const (
	releaseBytes = 8 // kind, and the number of batches as a uint32; 8 more for each batch
	byeBytes     = 4
)

// A hello is the first message of a consumer, as JSON.
type hello struct {
	Protocol int             `json:"protocol"`
	Rank     int             `json:"rank"`  // the shard, from 0
	World    int             `json:"world"` // the number of shards
	Start    loader.Position `json:"start"` // where to begin: {} for the beginning
}

// A welcome is the answer, as JSON, with the descriptor of the ring. Error is set, and nothing else but
// the version, if there will be no batches.
type welcome struct {
	Protocol  int     `json:"protocol"`
	Error     string  `json:"error,omitempty"`
	Ring      int     `json:"ring"`       // size of the memfd in bytes
	BatchSize int     `json:"batch_size"` // maximum number of samples of a batch
	Samples   int     `json:"samples"`    // of an epoch of the shard
	Epochs    int     `json:"epochs"`
	Fields    []field `json:"fields"`
}

// A field is one tensor of a batch: samples of the given type and shape, back to back.
type field struct {
	Name  string `json:"name"`
	Dtype string `json:"dtype"` // a name of torch's: float32, int64, uint8 …
	Shape []int  `json:"shape"` // of a sample; [] for one number
	Bytes int    `json:"bytes"` // of a sample
}

// A delivery is a message of kind batch, all little-endian:
//
//	uint32 kind, uint32 bytes of the message, with kind,
//	uint64 serial, uint64 epoch, uint64 batch, uint32 samples,
//	uint16 number of fields, uint16 last (1 if no other batch of the epoch follows),
//	uint64 offset in the ring, for each field,
//	JSON of the loader.Position after the batch, up to the end of the message
//
// Messages follow each other in a packet without a gap.
type delivery struct {
	serial uint64 // from 0, one more for each batch of the connection
	batch  *loader.Batch
	fields int
}

// encode returns the message.
func (d delivery) encode() ([]byte, error) {
	b, next := d.batch, d.batch.Position()
	position, err := json.Marshal(next)
	if err != nil {
		return nil, err
	}
	last := uint16(0)
	if next.Epoch > b.Epoch() {
		last = 1
	}
	order := binary.LittleEndian
	n := 40 + 8*d.fields + len(position)
	if n > maxMessage || d.fields > math.MaxUint16 {
		return nil, fmt.Errorf("%w: a message of %d bytes, at most %d", errProtocol, n, maxMessage)
	}
	buf := make([]byte, 0, n)
	buf = order.AppendUint32(buf, kindBatch)
	buf = order.AppendUint32(buf, uint32(n))
	buf = order.AppendUint64(buf, d.serial)
	buf = order.AppendUint64(buf, uint64(b.Epoch()))
	buf = order.AppendUint64(buf, uint64(b.Number()))
	buf = order.AppendUint32(buf, uint32(b.Len()))
	buf = order.AppendUint16(buf, uint16(d.fields))
	buf = order.AppendUint16(buf, last)
	for f := range d.fields {
		buf = order.AppendUint64(buf, uint64(b.Offset(f)))
	}
	return append(buf, position...), nil
}

// writePackets writes messages until the channel is closed. Those that wait together share a packet: so a consumer
// that is busy gets several by one call.
func writePackets(conn *net.UnixConn, messages <-chan []byte) error {
	packet := make([]byte, 0, maxMessage)
	for message, open := <-messages; open; {
		packet = append(packet[:0], message...)
		message = nil
	together:
		for range maxTogether - 1 {
			select {
			case message, open = <-messages:
			default:
				break together
			}
			if !open || len(packet)+len(message) > maxMessage {
				break
			}
			packet = append(packet, message...)
			message = nil
		}
		if _, err := conn.Write(packet); err != nil {
			return err
		}
		if open && message == nil {
			message, open = <-messages
		}
	}
	return nil
}

// parseRelease calls release for each batch of a message of kind release, which is:
//
//	uint32 kind, uint32 number of batches, uint64 serial, for each batch
//
// It reports whether the message says bye instead.
func parseRelease(message []byte, release func(serial uint64) error) (bye bool, err error) {
	kind, order := uint32(0), binary.LittleEndian
	if len(message) >= 4 {
		kind = order.Uint32(message)
	}
	switch {
	case kind == kindBye && len(message) == byeBytes:
		return true, nil
	case kind != kindRelease || len(message) <= releaseBytes || uint64(len(message)) != releaseBytes+8*uint64(order.Uint32(message[4:])):
		return false, fmt.Errorf("%w: %d bytes, kind %d", errProtocol, len(message), kind)
	}
	for rest := message[releaseBytes:]; len(rest) > 0; rest = rest[8:] {
		if err := release(order.Uint64(rest)); err != nil {
			return false, err
		}
	}
	return false, nil
}

// parseHello returns the hello in a message.
func parseHello(message []byte) (h hello, err error) {
	if err := json.Unmarshal(message, &h); err != nil {
		return h, fmt.Errorf("%w: no hello: %w", errProtocol, err)
	}
	switch {
	case h.Protocol != protocolVersion:
		return h, fmt.Errorf("%w: the consumer has version %d, and this feeder %d: use files of one version of this module",
			errProtocol, h.Protocol, protocolVersion)
	case h.World < 1 || h.World > maxWorld || h.Rank < 0 || h.Rank >= h.World:
		return h, fmt.Errorf("%w: rank %d of %d", errProtocol, h.Rank, h.World)
	}
	return h, nil
}

var (
	errProtocol = errors.New("wrong protocol")
	errDied     = errors.New("the consumer ended without a word")
)

// receive reads a message into buf. It returns errDied at the end of the connection.
func receive(conn *net.UnixConn, buf []byte) ([]byte, error) {
	n, _, flags, _, err := conn.ReadMsgUnix(buf, nil)
	if errors.Is(err, syscall.ECONNRESET) { // the peer closed before it read all messages: its own come after this error
		n, _, flags, _, err = conn.ReadMsgUnix(buf, nil)
	}
	switch {
	case errors.Is(err, io.EOF), err == nil && n == 0:
		return nil, errDied
	case err != nil:
		return nil, err
	case flags&unix.MSG_TRUNC != 0:
		return nil, fmt.Errorf("%w: a message of more than %d bytes", errProtocol, len(buf))
	}
	return buf[:n], nil
}

// sendJSON sends v, with a descriptor if fd is not negative.
func sendJSON(conn *net.UnixConn, v any, fd int) error {
	message, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(message) > maxMessage {
		return fmt.Errorf("%w: a message of %d bytes, at most %d", errProtocol, len(message), maxMessage)
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_, _, err = conn.WriteMsgUnix(message, rights, nil)
	return err
}

// samePerson returns an error if the peer of an abstract socket, which has no permissions, is another
// user's process.
func samePerson(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed != nil {
		return failed
	}
	if uid := uint32(unix.Getuid()); peer.Uid != uid && peer.Uid != 0 {
		return fmt.Errorf("the consumer is a process of user %d, and this feeder of user %d: use a socket file", peer.Uid, uid)
	}
	return nil
}
