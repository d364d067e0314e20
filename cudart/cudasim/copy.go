package cudasim

import (
	"github.com/gopinned/pinned/cudart"
)

// Directions of cudaMemcpyKind.
const (
	hostToHost = iota
	hostToDevice
	deviceToHost
	deviceToDevice
	anyDirection
)

// A rect is height rows of width bytes, pitch bytes apart.
type rect struct {
	addr                 uintptr
	width, height, pitch int
}

// size is the number of bytes from the first to the end of the last row, -1 if it
// overflows.
func (r rect) size() int {
	rows := r.height - 1
	if rows > 0 && r.pitch > (int(^uint(0)>>1)-r.width)/rows {
		return -1
	}
	return rows*r.pitch + r.width
}

// A span is a rect that lies in one block, or in memory that CUDA has neither
// allocated nor registered.
type span struct {
	rect
	block *block // nil for pageable memory
}

// span looks up the block of a rect. A range of which only a part lies in a block
// is an error, as in CUDA.
func (c *call) span(r rect) (span, cudart.Code) {
	n := r.size()
	if r.addr == 0 || n < 0 || r.addr+uintptr(n) < r.addr {
		return span{}, cudart.ErrInvalidValue
	}
	b := c.blocks.find(r.addr)
	switch {
	case b == nil && (r.addr >= deviceAddresses || c.blocks.overlap(r.addr, n) != nil),
		b != nil && r.addr+uintptr(n) > b.end():
		return span{}, cudart.ErrInvalidValue
	case b != nil && b.freeing:
		c.misuse(FreedMemory, -1, "memory %#x was freed by cudaFreeAsync", r.addr)
		return span{}, cudart.ErrInvalidValue
	}
	return span{rect: r, block: b}, cudart.Success
}

// device is the device that holds the bytes, nil for the host.
func (s span) device() *device {
	switch {
	case s.block == nil:
		return nil
	case s.block.kind == deviceBlock:
		return s.block.dev
	case s.block.kind == managedBlock:
		return s.block.managed.resident
	}
	return nil
}

// row returns the bytes of one row.
func (s span) row(i int) []byte {
	addr := s.addr + uintptr(i*s.pitch)
	if s.block == nil {
		return bytesAt(addr, s.width)
	}
	return s.block.bytes(addr, s.width)
}

// fits reports whether the memory can be what the direction says it is.
func (s span) fits(onDevice bool) bool {
	if onDevice {
		return s.block != nil // device, managed and pinned memory
	}
	return s.block == nil || s.block.kind != deviceBlock
}

// A copying is one copy to make.
type copying struct{ dst, src span }

// copying checks the arguments of a copy. It is nil for a copy of no bytes.
func (c *call) copying(dst, src rect, kind int) (*copying, cudart.Code) {
	switch {
	case kind < hostToHost || kind > anyDirection:
		return nil, cudart.ErrInvalidMemcpyDirection
	case dst.width == 0 || dst.height == 0:
		return nil, cudart.Success
	case dst.width < 0 || dst.height < 0:
		return nil, cudart.ErrInvalidValue
	case dst.pitch < dst.width || src.pitch < src.width:
		return nil, cudart.ErrInvalidPitchValue
	}
	var m copying
	var code cudart.Code
	if m.dst, code = c.span(dst); code != cudart.Success {
		return nil, code
	}
	if m.src, code = c.span(src); code != cudart.Success {
		return nil, code
	}
	if kind != anyDirection {
		toDevice := kind == hostToDevice || kind == deviceToDevice
		fromDevice := kind == deviceToHost || kind == deviceToDevice
		if !m.dst.fits(toDevice) || !m.src.fits(fromDevice) {
			return nil, cudart.ErrInvalidValue
		}
	}
	return &m, cudart.Success
}

// pageable reports whether CUDA would stage the copy through memory of its own.
func (m *copying) pageable() bool { return m.dst.block == nil || m.src.block == nil }

// operation is the copy as work for a stream.
func (c *call) operation(m *copying) *operation {
	o := &operation{move: func() cudart.Code { return c.Sim.move(m) }}
	for _, b := range []*block{m.dst.block, m.src.block} {
		if b != nil {
			o.uses = append(o.uses, b)
		}
	}
	n := m.dst.width * m.dst.height
	to, from := m.dst.device(), m.src.device()
	o.between = [...]*device{to, from}
	switch {
	case to != nil && from == to:
		o.engine, o.took = &to.onDevice, to.cfg.Link.OnDevice.time(n)
	case to != nil && from != nil && to.peersWith(from):
		o.engine, o.took = &to.onDevice, to.cfg.Link.Peer.time(n)
	case to != nil && from != nil: // staged through the host
		o.engine = &to.toDevice
		o.took = max(from.cfg.Link.DeviceToHost.time(n), to.cfg.Link.HostToDevice.time(n))
	case to != nil && m.src.block == nil:
		o.engine, o.took = &to.toDevice, to.cfg.Link.PageableHostToDevice.time(n)
	case to != nil:
		o.engine, o.took = &to.toDevice, to.cfg.Link.HostToDevice.time(n)
	case from != nil && m.dst.block == nil:
		o.engine, o.took = &from.toHost, from.cfg.Link.PageableDeviceToHost.time(n)
	case from != nil:
		o.engine, o.took = &from.toHost, from.cfg.Link.DeviceToHost.time(n)
	}
	return o
}

// move copies the bytes. A copy of pinned memory that the process has unmapped
// succeeds and moves nothing: a real GPU still has its pages.
func (s *Sim) move(m *copying) cudart.Code {
	dst, src := m.dst, m.src
	if dst.pitch == dst.width && src.pitch == src.width {
		n := dst.size()
		dst.rect, src.rect = line(dst.addr, n), line(src.addr, n)
	}
	if guarded(func() {
		for i := range dst.height {
			copy(dst.row(i), src.row(i))
		}
	}) {
		return cudart.Success
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record(Misuse{Kind: UnmappedMemory, Call: "copy", Current: -1, Want: -1,
		Detail: "host memory was unmapped, or protected, before the copy ran"})
	if m.pageable() {
		return cudart.ErrInvalidValue
	}
	return cudart.Success
}

// elsewhere records a misuse if a call on a default stream is about memory of
// other devices only: it makes a context on the current one.
func (c *call) elsewhere(spans ...span) {
	var other *device
	for _, s := range spans {
		switch {
		case s.block == nil || s.block.kind != deviceBlock:
		case s.block.dev == c.dev:
			return
		default:
			other = s.block.dev
		}
	}
	if other != nil {
		c.on(other, "memory", spans[0].addr)
	}
}

// copy enqueues a copy, and waits for it if the call is synchronous or the memory
// pageable.
func (c *call) copy(dst, src rect, kind int, stream uintptr, async bool) cudart.Code {
	st, code := c.stream(stream)
	if code != cudart.Success {
		return code
	}
	m, code := c.copying(dst, src, kind)
	if m == nil {
		return code
	}
	if stream <= streamPerThread {
		c.elsewhere(m.dst, m.src)
	}
	o := c.operation(m)
	if async && !m.pageable() {
		return c.enqueue(st, o)
	}
	return c.do(st, o)
}

// line is n bytes in a row.
func line(addr uintptr, n int) rect { return rect{addr: addr, width: n, height: 1, pitch: n} }

func (c *call) memcpy() cudart.Code {
	return c.copy(line(c.ptr(0), c.num(2)), line(c.ptr(1), c.num(2)), c.i32(3), 0, false)
}

func (c *call) memcpyAsync() cudart.Code {
	return c.copy(line(c.ptr(0), c.num(2)), line(c.ptr(1), c.num(2)), c.i32(3), c.ptr(4), true)
}

func (c *call) copy2D(stream uintptr, async bool) cudart.Code {
	width, height := c.num(4), c.num(5)
	return c.copy(rect{c.ptr(0), width, height, c.num(1)}, rect{c.ptr(2), width, height, c.num(3)},
		c.i32(6), stream, async)
}

func (c *call) memcpy2D() cudart.Code      { return c.copy2D(0, false) }
func (c *call) memcpy2DAsync() cudart.Code { return c.copy2D(c.ptr(7), true) }

// fill is memset in all its forms.
func (c *call) fill(dst rect, value byte, stream uintptr, async bool) cudart.Code {
	st, code := c.stream(stream)
	switch {
	case code != cudart.Success:
		return code
	case dst.width == 0 || dst.height == 0:
		return cudart.Success
	case dst.width < 0 || dst.height < 0:
		return cudart.ErrInvalidValue
	case dst.pitch < dst.width:
		return cudart.ErrInvalidPitchValue
	}
	d, code := c.span(dst)
	switch {
	case code != cudart.Success:
		return code
	case d.block == nil:
		return cudart.ErrInvalidValue
	}
	if stream <= streamPerThread {
		c.elsewhere(d)
	}
	o := &operation{
		engine: &st.dev.onDevice,
		took:   st.dev.cfg.Link.OnDevice.time(dst.width * dst.height),
		uses:   []*block{d.block},
		move: func() cudart.Code {
			for i := range dst.height {
				set(d.row(i), value)
			}
			return cudart.Success
		},
	}
	if async {
		return c.enqueue(st, o)
	}
	return c.do(st, o)
}

// set fills b at the speed of copies.
func set(b []byte, value byte) {
	b[0] = value
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

func (c *call) memset() cudart.Code {
	return c.fill(line(c.ptr(0), c.num(2)), byte(c.ptr(1)), 0, false)
}

func (c *call) memsetAsync() cudart.Code {
	return c.fill(line(c.ptr(0), c.num(2)), byte(c.ptr(1)), c.ptr(3), true)
}

func (c *call) memset2D() cudart.Code {
	return c.fill(rect{c.ptr(0), c.num(3), c.num(4), c.num(1)}, byte(c.ptr(2)), 0, false)
}

func (c *call) memset2DAsync() cudart.Code {
	return c.fill(rect{c.ptr(0), c.num(3), c.num(4), c.num(1)}, byte(c.ptr(2)), c.ptr(5), true)
}

// noIndex is the failIdx of an error that is not of one copy.
const noIndex = ^uintptr(0)

// memcpyBatchFailIndex is the form of 12.8, which returns which copy was wrong.
func (c *call) memcpyBatchFailIndex() cudart.Code {
	index, code := c.batch(c.ptr(8))
	if code != cudart.Success && c.ptr(7) != 0 {
		put(c, 7, index)
	}
	return code
}

func (c *call) memcpyBatch() cudart.Code {
	_, code := c.batch(c.ptr(7))
	return code
}

// copyAttributes is cudaMemcpyAttributes.
type copyAttributes struct {
	order int32    // 1 stream, 2 during the call, 3 any
	_     [4]int32 // hints for source and destination
	_     uint32   // flags
}

// batch checks all copies before it makes any.
func (c *call) batch(stream uintptr) (uintptr, cudart.Code) {
	count, numAttrs := c.num(3), c.num(6)
	st, code := c.stream(stream)
	switch {
	case code != cudart.Success:
		return noIndex, code
	case stream <= streamLegacy, count <= 0, numAttrs <= 0 || numAttrs > count,
		c.ptr(0) == 0 || c.ptr(1) == 0 || c.ptr(2) == 0 || c.ptr(4) == 0 || c.ptr(5) == 0:
		return noIndex, cudart.ErrInvalidValue
	}
	for i, a := range array[copyAttributes](c.ptr(4), numAttrs) {
		if a.order < 1 || a.order > 3 || i == 0 && *pointer[uintptr](c.ptr(5)) != 0 {
			return noIndex, cudart.ErrInvalidValue
		}
	}
	dsts, srcs, sizes := array[uintptr](c.ptr(0), count), array[uintptr](c.ptr(1), count), array[int](c.ptr(2), count)
	copies := make([]*copying, count)
	for i := range copies {
		m, code := c.copying(line(dsts[i], sizes[i]), line(srcs[i], sizes[i]), anyDirection)
		switch {
		case code != cudart.Success:
			return uintptr(i), code
		case m == nil:
			return uintptr(i), cudart.ErrInvalidValue
		}
		copies[i] = m
	}
	for i, m := range copies {
		o := c.operation(m)
		run := c.enqueue
		if m.pageable() {
			run = c.do
		}
		if code := run(st, o); code != cudart.Success {
			return uintptr(i), code
		}
	}
	return noIndex, cudart.Success
}
