//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/loader"
)

// A client is a consumer of the protocol's bytes, written from their description alone.
type client struct {
	t    testing.TB
	conn *net.UnixConn
	w    welcome
	fd   int
	mem  []byte
	rest []byte // of the last packet
}

// A received is a batch in the client's ring.
type received struct {
	Epoch    int             `json:"epoch"`
	Number   int             `json:"number"`
	Position loader.Position `json:"position"`
	Indices  []int           `json:"indices"`

	serial  uint64
	offsets []int
}

func dial(t testing.TB, address string) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: address, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func connect(t testing.TB, address string, h hello) *client {
	t.Helper()
	c := &client{t: t, conn: dial(t, address)}
	h.Protocol = protocolVersion
	require.NoError(t, sendJSON(c.conn, h, -1))
	buf, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := c.conn.ReadMsgUnix(buf, rights)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(buf[:n], &c.w))
	require.Empty(t, c.w.Error)
	messages, err := unix.ParseSocketControlMessage(rights[:oobn])
	require.NoError(t, err)
	require.Len(t, messages, 1)
	fds, err := unix.ParseUnixRights(&messages[0])
	require.NoError(t, err)
	require.Len(t, fds, 1)
	c.fd = fds[0]
	c.mem, err = unix.Mmap(c.fd, 0, c.w.Ring, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(c.unmap)
	return c
}

func (c *client) unmap() {
	if c.mem != nil {
		require.NoError(c.t, unix.Munmap(c.mem))
		require.NoError(c.t, unix.Close(c.fd))
		c.mem = nil
	}
}

// die ends the connection without a word.
func (c *client) die() {
	c.unmap()
	require.NoError(c.t, c.conn.Close())
}

func (c *client) bye() {
	c.write(binary.LittleEndian.AppendUint32(nil, kindBye))
	c.die()
}

func (c *client) write(message []byte) {
	_, err := c.conn.Write(message)
	require.NoError(c.t, err)
}

func (c *client) release(b received) {
	c.write(releaseOf(b.serial))
}

func releaseOf(serial uint64) []byte {
	message := binary.LittleEndian.AppendUint32(nil, kindRelease)
	return binary.LittleEndian.AppendUint64(append(message, 1, 0, 0, 0), serial)
}

var errFromFeeder = errors.New("from the feeder")

// next returns the next batch, whose bytes are right, or the error that the feeder sent.
func (c *client) next() (b received, err error) {
	if len(c.rest) == 0 {
		if c.rest, err = receive(c.conn, make([]byte, maxMessage)); err != nil {
			return b, err
		}
	}
	message, order := c.rest, binary.LittleEndian
	switch kind := order.Uint32(message); kind {
	case kindError:
		return b, fmt.Errorf("%w: %s", errFromFeeder, message[4:])
	case kindBatch:
	default:
		return b, fmt.Errorf("kind %d", kind)
	}
	n := order.Uint32(message[4:])
	message, c.rest = message[:n], message[n:]
	b.serial = order.Uint64(message[8:])
	b.Epoch, b.Number = int(order.Uint64(message[16:])), int(order.Uint64(message[24:]))
	samples, fields, last := int(order.Uint32(message[32:])), int(order.Uint16(message[36:])), order.Uint16(message[38:])
	for f := range fields {
		b.offsets = append(b.offsets, int(order.Uint64(message[40+8*f:])))
	}
	if err := json.Unmarshal(message[40+8*fields:], &b.Position); err != nil {
		return b, err
	}
	require.Equal(c.t, b.Position.Epoch > b.Epoch, last == 1)
	for at := range samples {
		b.Indices = append(b.Indices, int(order.Uint64(c.mem[b.offsets[index]+8*at:])))
	}
	return b, c.check(b)
}

// check returns an error if the bytes of a batch are not those of its samples.
func (c *client) check(b received) error {
	width := c.w.Fields[vector].Shape[0]
	for at, i := range b.Indices {
		x := floats(c.mem[b.offsets[vector]+4*width*at:][:4*width])
		for j, y := range x {
			if y != float32((i+j)%period) {
				return fmt.Errorf("batch %d of epoch %d: sample %d has %v at %d", b.Number, b.Epoch, i, y, j)
			}
		}
		if got := binary.LittleEndian.Uint64(c.mem[b.offsets[index]+8*at:]); int(got) != i {
			return fmt.Errorf("batch %d of epoch %d: sample %d became %d", b.Number, b.Epoch, i, got)
		}
	}
	return nil
}

// all reads all batches of all epochs and says bye.
func (c *client) all() (list []received) {
	for {
		b, err := c.next()
		require.NoError(c.t, err)
		list = append(list, b)
		c.release(b)
		if b.Position.Epoch == c.w.Epochs {
			c.bye()
			return list
		}
	}
}
