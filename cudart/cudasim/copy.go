package cudasim

import (
	"slices"
	"time"

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

// A span is n bytes that lie in one block, or in memory that CUDA has neither
// allocated nor registered.
type span struct {
	addr  uintptr
	n     int
	block *block  // nil for pageable memory
	by    *device // that accesses it as its own memory, if it is managed; nil if it is accessed where it lies
}

// span looks up the block of a range. If only a part of it lies in a block, that is an
// error, as in CUDA.
func (c *call) span(at uintptr, n int) (span, cudart.Code) {
	if at == 0 || n < 0 || at+uintptr(n) < at {
		return span{}, cudart.ErrInvalidValue
	}
	b := c.blocks.find(at)
	switch {
	case b == nil && (at >= deviceAddresses || c.blocks.overlap(at, n) != nil),
		b != nil && at+uintptr(n) > b.end():
		return span{}, cudart.ErrInvalidValue
	case b != nil && b.freeing:
		c.misuse(freedMemory, -1, "memory %#x was freed by cudaFreeAsync", at)
		return span{}, cudart.ErrInvalidValue
	}
	return span{addr: at, n: n, block: b}, success
}

// device is the device that holds the bytes, nil for the host.
func (s span) device() *device {
	switch {
	case s.block == nil:
		return nil
	case s.block.kind == deviceBlock:
		return s.block.dev
	case s.block.kind == managedBlock && s.by != nil:
		return s.by
	case s.block.kind == managedBlock:
		if at := locationsOf(s.pages()[0].resident); len(at) > 0 {
			return s.block.dev.sim.device(at[0])
		}
	}
	return nil
}

// byDevice makes a device the one that accesses managed memory.
func (s *span) byDevice(d *device) {
	if s.block != nil && s.block.kind == managedBlock {
		s.by = d
	}
}

// fault brings pages of managed memory to the device that accesses them, and returns how
// long that takes. It needs mu.
func (s span) fault(write bool) time.Duration {
	if s.by == nil || s.block.gone {
		return 0
	}
	n := s.block.dev.sim.touch(s.pages(), s.by.ordinal, write)
	if n == 0 {
		return 0
	}
	return s.by.cfg.Link.FaultToDevice.time(min(n*managedPage, s.n))
}

// bytes returns the memory.
func (s span) bytes() []byte {
	if s.block == nil {
		return bytesAt(s.addr, s.n)
	}
	return s.block.bytes(s.addr, s.n)
}

// fits reports whether the memory can be what the direction says it is.
func (s span) fits(onDevice bool) bool {
	if onDevice {
		return s.block != nil // device, managed and pinned memory
	}
	return s.block == nil || s.block.kind != deviceBlock
}

// A copying is one copy to make.
type copying struct {
	dst, src span
	staged   []byte // a copy of the source, see [Config.StagedUploads]; nil for none
}

// copying checks the arguments of a copy by a device. It is nil for a copy of no bytes.
func (c *call) copying(by *device, dst, src uintptr, n, kind int) (*copying, cudart.Code) {
	switch {
	case kind < hostToHost || kind > anyDirection:
		return nil, cudart.Code(21)
	case n == 0:
		return nil, success
	}
	var m copying
	var code cudart.Code
	if m.dst, code = c.span(dst, n); code != success {
		return nil, code
	}
	if m.src, code = c.span(src, n); code != success {
		return nil, code
	}
	if kind != anyDirection {
		toDevice := kind == hostToDevice || kind == deviceToDevice
		fromDevice := kind == deviceToHost || kind == deviceToDevice
		if !m.dst.fits(toDevice) || !m.src.fits(fromDevice) {
			return nil, cudart.ErrInvalidValue
		}
		if toDevice {
			m.dst.byDevice(by)
		}
		if fromDevice {
			m.src.byDevice(by)
		}
	}
	return &m, success
}

// usesHostTables reports whether the device accesses all host memory by the host's
// page tables, so that none is staged.
func (d *device) usesHostTables() bool {
	return d != nil && d.cfg.Attributes[cudart.AttrPageableMemoryAccessUsesHostPageTables] == 1
}

// pageable reports whether CUDA would stage the copy through memory of its own.
func (m *copying) pageable() bool {
	return m.dst.block == nil && !m.src.device().usesHostTables() ||
		m.src.block == nil && !m.dst.device().usesHostTables()
}

// operation is the copy as work for a stream.
func (c *call) operation(m *copying) *operation {
	o := &operation{move: func() cudart.Code { return c.Sim.move(m) }}
	for _, b := range []*block{m.dst.block, m.src.block} {
		if b != nil {
			o.uses = append(o.uses, b)
		}
	}
	to, from := m.dst.device(), m.src.device()
	o.between = [...]*device{to, from}
	switch {
	case to != nil && from != nil:
		o.engine, o.took = to.copyFrom(from, m.dst.n)
		if from != to && to.peersWith(from) && c.losesPeerCopies(from, to) {
			o.move = func() cudart.Code { return success }
		}
	case to != nil:
		speed := to.cfg.Link.HostToDevice
		if m.pageable() {
			speed = to.cfg.Link.PageableHostToDevice
		}
		o.engine, o.took = &to.toDevice, to.shared(speed.time(m.dst.n))
	case from != nil:
		speed := from.cfg.Link.DeviceToHost
		if m.pageable() {
			speed = from.cfg.Link.PageableDeviceToHost
		}
		o.engine, o.took = &from.toHost, from.shared(speed.time(m.dst.n))
	}
	if m.dst.by != nil || m.src.by != nil {
		o.measure = func() { o.took += m.src.fault(false) + m.dst.fault(true) }
	}
	return o
}

// copyFrom returns the engine that copies n bytes from another device, or from the same one, and the time.
func (d *device) copyFrom(from *device, n int) (*engine, time.Duration) {
	switch {
	case from == d:
		return &d.onDevice, d.cfg.Link.OnDevice.time(n)
	case d.peersWith(from):
		return &d.onDevice, d.cfg.Link.Peer.time(n)
	}
	// Staged through the host.
	return &d.toDevice, max(from.cfg.Link.DeviceToHost.time(n), d.cfg.Link.HostToDevice.time(n))
}

// shared returns the time of the next copy over the link, which takes this time if nothing else uses
// the link.
func (d *device) shared(alone time.Duration) time.Duration {
	if d.cfg.LinkShare == nil {
		return alone
	}
	d.linkCopies++
	if share := d.cfg.LinkShare(d.linkCopies); share > 0 && share < 1 {
		return time.Duration(float64(alone) / share)
	}
	return alone
}

// move copies the bytes. A copy of pinned memory that the process has unmapped
// succeeds and moves nothing: a real GPU still has its pages.
func (s *Sim) move(m *copying) cudart.Code {
	from := m.staged
	if guarded(func() {
		if from == nil {
			from = m.src.bytes()
		}
		copy(m.dst.bytes(), from)
	}) {
		return success
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record(Misuse{Kind: unmappedMemory, Call: "copy", Current: -1, Want: -1,
		Detail: "host memory was unmapped, or protected, before the copy ran"})
	if m.dst.block == nil || m.src.block == nil {
		return cudart.ErrInvalidValue
	}
	return success
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
func (c *call) copy(dst, src uintptr, n, kind int, stream uintptr, async bool) cudart.Code {
	st, code := c.stream(stream)
	if code != success {
		return code
	}
	m, code := c.copying(st.dev, dst, src, n, kind)
	if m == nil {
		return code
	}
	if stream <= streamPerThread {
		c.elsewhere(m.dst, m.src)
	}
	o := c.operation(m)
	if c.Sim.cfg.StagedUploads && m.pageable() && m.dst.device() != nil && c.Sim.stage(m) {
		return c.enqueue(st, o)
	}
	if async && !m.pageable() {
		return c.enqueue(st, o)
	}
	return c.do(st, o)
}

// stage reads the source of a copy before it is made, and reports whether it could.
func (s *Sim) stage(m *copying) bool {
	staged := make([]byte, m.src.n)
	if !guarded(func() { copy(staged, m.src.bytes()) }) {
		return false
	}
	m.staged = staged
	return true
}

func (c *call) memcpy() cudart.Code {
	return c.copy(c.ptr(0), c.ptr(1), c.num(2), c.i32(3), 0, false)
}

func (c *call) memcpyAsync() cudart.Code {
	return c.copy(c.ptr(0), c.ptr(1), c.num(2), c.i32(3), c.ptr(4), true)
}

// copies returns a function of libcuda that copies in a direction, which its name has; libcudart's takes it.
func copies(kind int) func(*call) cudart.Code {
	return func(c *call) cudart.Code { return c.copy(c.ptr(0), c.ptr(1), c.num(2), kind, 0, false) }
}

// copiesAsync is copies for a function that takes a stream.
func copiesAsync(kind int) func(*call) cudart.Code {
	return func(c *call) cudart.Code { return c.copy(c.ptr(0), c.ptr(1), c.num(2), kind, c.ptr(3), true) }
}

// fill is memset in both forms.
func (c *call) fill(at uintptr, value byte, n int, stream uintptr, async bool) cudart.Code {
	st, code := c.stream(stream)
	switch {
	case code != success:
		return code
	case n == 0:
		return success
	}
	d, code := c.span(at, n)
	switch {
	case code != success:
		return code
	case d.block == nil:
		return cudart.ErrInvalidValue
	}
	if stream <= streamPerThread {
		c.elsewhere(d)
	}
	d.byDevice(st.dev)
	o := &operation{
		engine: &st.dev.onDevice,
		took:   st.dev.cfg.Link.OnDevice.time(n),
		uses:   []*block{d.block},
		move: func() cudart.Code {
			set(d.bytes(), value)
			return success
		},
	}
	o.measure = func() { o.took += d.fault(true) }
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
	return c.fill(c.ptr(0), byte(c.ptr(1)), c.num(2), 0, false)
}

func (c *call) memsetAsync() cudart.Code {
	return c.fill(c.ptr(0), byte(c.ptr(1)), c.num(2), c.ptr(3), true)
}

// noIndex is the failIdx of an error that is not of one copy.
const noIndex = ^uintptr(0)

// memcpyBatchFailIndex is the form of 12.8, which returns which copy was wrong.
func (c *call) memcpyBatchFailIndex() cudart.Code {
	index, code := c.batch(c.ptr(8))
	if code != success && c.ptr(7) != 0 {
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

// copyings checks the copies of a batch. Of a failure it returns the index.
func (c *call) copyings(by *device, count int) (copies []*copying, index uintptr, code cudart.Code) {
	dsts, srcs, sizes := array[uintptr](c.ptr(0), count), array[uintptr](c.ptr(1), count), array[int](c.ptr(2), count)
	for i := range count {
		m, code := c.copying(by, dsts[i], srcs[i], sizes[i], anyDirection)
		if code == success && m == nil {
			code = cudart.ErrInvalidValue
		}
		if code != success {
			return nil, uintptr(i), code
		}
		copies = append(copies, m)
	}
	return copies, noIndex, success
}

// batch checks all copies before it makes any.
func (c *call) batch(stream uintptr) (uintptr, cudart.Code) {
	count, numAttrs := c.num(3), c.num(6)
	st, code := c.stream(stream)
	switch {
	case code != success:
		return noIndex, code
	case stream <= streamLegacy, count <= 0, numAttrs <= 0 || numAttrs > count,
		slices.Contains([]uintptr{c.ptr(0), c.ptr(1), c.ptr(2), c.ptr(4), c.ptr(5)}, 0):
		return noIndex, cudart.ErrInvalidValue
	}
	for i, a := range array[copyAttributes](c.ptr(4), numAttrs) {
		if a.order < 1 || a.order > 3 || i == 0 && *pointer[uintptr](c.ptr(5)) != 0 {
			return noIndex, cudart.ErrInvalidValue
		}
	}
	copies, index, code := c.copyings(st.dev, count)
	if code != success {
		return index, code
	}
	for i, m := range copies {
		o := c.operation(m)
		run := c.enqueue
		if m.pageable() {
			run = c.do
		}
		if code := run(st, o); code != success {
			return uintptr(i), code
		}
	}
	return noIndex, success
}
