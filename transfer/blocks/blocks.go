// Package blocks copies many small blocks at once between pinned memory and a device, gathered and scattered by
// lists of indices, as paged caches, tables of embeddings and shuffled samples need it. Copies are queued on the
// caller's stream.
//
// A kernel on a few multiprocessors accesses the pinned memory, or for few or large blocks the copy engines copy. Lists may be in the device's memory, written by work of the
// stream: the kernel reads them.
package blocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A Method is a method of copying blocks.
type Method int

const (
	// Quickest is ByEngine for few blocks (three to the device, six to the host and for those of 32 KiB and more), for
	// blocks of 512 KiB and more, and for blocks that are one block on both sides, and else ByKernel: that took less
	// time on an H200. 16 MiB and more of blocks that lie one after the other in host memory go to the device by both,
	// unless Options.Processors is set: an engine copies them to scratch memory on the device, while a kernel copies the
	// blocks before from there. A Copier allocates 32 MiB of it, or 64 MiB for several streams, and keeps it until Close. If
	// no scratch memory is free, the kernel alone copies.
	Quickest Method = iota
	// ByKernel is a kernel that accesses the host memory over the link. Copies to and from addresses that are not
	// known to be the device's are left to the engines, which refuse what the device cannot access: an access by the
	// kernel would end the context.
	ByKernel
	// ByEngine is the copy engines: a batch of copies (cudaMemcpyBatchAsync), or for one or two blocks, and where
	// library or driver are older than CUDA 12.8, a copy each.
	ByEngine
)

// String returns the name of the method: "kernel".
func (m Method) String() string {
	switch m {
	case Quickest:
		return "quickest"
	case ByKernel:
		return "kernel"
	case ByEngine:
		return "engine"
	}
	return fmt.Sprintf("method %d", int(m))
}

// Options shape a [Copier].
type Options struct {
	// Processors is the maximum number of multiprocessors that a copy occupies. 0 is 4, and 8 for blocks of less than
	// 4 KiB whose size, strides and addresses are not all multiples of 16. The kernel that copies
	// from scratch memory (see Quickest) occupies 32.
	Processors int
	// Method is the method of all copies.
	Method Method
}

// A Copier copies many blocks at once between pinned host memory and a device, gathered and
// scattered by lists of indices. Its methods may be called from any goroutine.
//
// With a context that can end, CUDA is called on another goroutine, so that a call returns although CUDA
// blocks. That adds 5 to 9 µs to each call (H100, 2026-11-27). [context.WithoutCancel] avoids it for a call
// that may block as long as CUDA does.
type Copier struct {
	dev        *cudart.Device
	kernel     *gpukernels.Blocks // nil where the device cannot access host memory by its address
	lists      *pool.Pool         // indices that the kernel reads
	method     Method
	processors int // Options.Processors
	life       lifetime.Lifetime
	batches    sync.Pool // of *cudart.CopyBatch
	seen       sync.Pool // of *bitSet

	scratches    chan scratch
	scratchBytes int // of one
}

// New loads the kernel, in less than a millisecond where the module has machine code for the device: compute capability
// 7.5, 8.x, 9.0, 10.x and 12.x. For others, and for drivers that do not take that code, the driver compiles PTX the first
// time on a machine, in 0.14 to 0.27 s (H200, 2026-11-29), and caches the result (~/.nv/ComputeCache). Close it. Errors
// are those of [gpukernels.NewBlocks], of invalid options, and of ctx.
func New(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	b, err := newCopier(ctx, dev, o)
	if err != nil {
		return nil, fmt.Errorf("blocks: new: %w", err)
	}
	return b, nil
}

func newCopier(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil || dev.Runtime() == nil:
		return nil, errNilDevice
	case o.Processors < 0 || o.Processors > math.MaxInt32:
		return nil, fmt.Errorf("Options.Processors of %d: must be from 0 to %d", o.Processors, math.MaxInt32)
	case o.Method < Quickest || o.Method > ByEngine:
		return nil, fmt.Errorf("Options.Method: invalid %v", o.Method)
	}
	lists, err := pool.New(dev, pool.Options{Buffer: hostmem.Options{Label: "block lists"}})
	if err != nil {
		return nil, err
	}
	b := &Copier{dev: dev, lists: lists, method: o.Method, processors: o.Processors, scratches: make(chan scratch, scratches), scratchBytes: scratchBytes}
	for range scratches {
		b.scratches <- scratch{}
	}
	b.batches.New, b.seen.New = func() any { return new(cudart.CopyBatch) }, func() any { return new(bitSet) }
	return bounded.Do(ctx, bounded.Call[*Copier]{
		Run: func() (*Copier, error) {
			if err := b.open(ctx); err != nil {
				return nil, errors.Join(err, lifetime.Undo(ctx, b.release))
			}
			return b, nil
		},
		Late: func(_ *Copier, err error) {
			if err == nil {
				_ = lifetime.Undo(ctx, b.release)
			}
		},
	})
}

// open loads the kernel where it can be used.
func (b *Copier) open(ctx context.Context) error {
	sameAddress, err := b.dev.Attribute(cudart.AttrCanUseHostPointerForRegisteredMem)
	if err != nil {
		return err
	}
	if sameAddress == 0 && b.method == ByKernel {
		return fmt.Errorf("%v cannot access host memory by its address: %w", b.dev, errors.ErrUnsupported)
	}
	if sameAddress == 0 {
		b.method = ByEngine
	}
	if b.method == ByEngine {
		return nil
	}
	b.kernel, err = gpukernels.NewBlocks(ctx, b.dev)
	return err
}

// Close waits for the kernels that were launched, and releases their code and the memory of lists.
// After the call of Close, copies return [cudart.ErrClosed]. After an error it may be called again;
// once it has returned nil it does nothing. Copies by engines may still run: the owner of the host
// memory waits for them.
func (b *Copier) Close() error { return b.CloseContext(context.Background()) }

// CloseContext is Close that returns ctx's error if ctx ends first.
func (b *Copier) CloseContext(ctx context.Context) error {
	switch {
	case !b.made():
		return fmt.Errorf("blocks: close: %w", errZero)
	case ctx == nil:
		return fmt.Errorf("blocks: close: %w", errNilContext)
	}
	if err := b.life.Close(ctx, b.release); err != nil {
		return fmt.Errorf("blocks: close the Copier of %v: %w", b.dev, err)
	}
	return nil
}

func (b *Copier) release(ctx context.Context) error {
	var err error
	if b.kernel != nil {
		err = b.kernel.CloseContext(ctx)
	}
	if err == nil {
		err = b.freeScratches()
	}
	return errors.Join(err, b.lists.CloseContext(ctx))
}

var (
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil")
	errZero       = errors.New("the Copier is nil or zero: make it with New")
)

func (b *Copier) made() bool { return b != nil && b.lists != nil }

// A Copy describes a batch of blocks to copy between host memory and memory of a device. On either side
// block i lies at i*Stride or, with a list of indices, at Index[i]*Stride.
type Copy struct {
	// Host is the host memory: bytes of a [hostmem.Buffer] or a lease.
	Host []byte
	// Hosts are several host memories instead of Host. Their blocks are numbered through: those
	// of Hosts[1] come after the last block that is within Hosts[0]. Lists of either side are
	// the host's then, and copies are queued for one memory after the other.
	Hosts [][]byte
	// Device is the device's memory, and DeviceLen its size in bytes, for the check of indices.
	Device    cudart.DevPtr
	DeviceLen int

	HostIndex, DeviceIndex []uint32
	// HostIndexOnDevice and DeviceIndexOnDevice are lists of Count uint32 in memory that the device
	// can access, instead of HostIndex and DeviceIndex. The kernel reads them when the stream has
	// reached the copies, so work queued before may write them. Engines do not read them: the
	// kernel makes such copies even if engines were faster, and without a kernel they are refused
	// ([errors.ErrUnsupported]).
	HostIndexOnDevice, DeviceIndexOnDevice cudart.DevPtr
	// CheckIndices makes the device check lists in its memory. The call waits for the check, and so
	// for all work that is queued on the stream before. Without it, an index outside the memory
	// lets the kernel access other memory. Overlapping blocks of the target are not detected in
	// such lists.
	CheckIndices bool

	HostStride, DeviceStride int // bytes, 0 is Size

	Size int // bytes of a block
	// Count is the number of blocks. 0 is the length of HostIndex or DeviceIndex, and without a list no block.
	// Any other Count must be the length of these lists, which must have the same length. Beside a list in the
	// device's memory alone it must be set.
	Count int
}

// CopyToDevice queues copies from host memory to the device on s, in their order, and returns the place after them. The
// priority of s is that of the copies. Neighbours that differ only in their lists and counts are joined: a hundred
// copies of the same memory, such as the sequences of a cache, cost one launch. No two blocks of the target of such
// neighbours may overlap.
//
// The lists may be changed when it returns. The host memory and lists in the device's memory may be
// changed, and a lease released, when the stream has passed the copies: give s to the lease's
// Release.
//
// Nothing is queued if the host memory is not pinned by package hostmem, if a block is not
// within its memory, or if two blocks of the target overlap: the error has the block.
// Other errors are those of ctx, [cudart.ErrClosed], and CUDA's; after one of these, copies may be queued. If ctx ends while
// a call into CUDA does not return, as on a stream whose queue is full, the error wraps
// [github.com/gopinned/pinned/transfer.ErrUnderWay]: copies may be queued later, and Close waits for the call.
func (b *Copier) CopyToDevice(ctx context.Context, s *cudart.Stream, copies ...Copy) (cudart.Point, error) {
	return b.queue(ctx, s, copies, false)
}

// CopyToHost queues copies from the device to host memory: see CopyToDevice. Host memory that is registered
// as read-only is refused ([hostmem.ErrReadOnly]).
func (b *Copier) CopyToHost(ctx context.Context, s *cudart.Stream, copies ...Copy) (cudart.Point, error) {
	return b.queue(ctx, s, copies, true)
}

func (b *Copier) queue(ctx context.Context, s *cudart.Stream, copies []Copy, down bool) (cudart.Point, error) {
	var one [1]Copy
	copies = append(one[:0], copies...) // they stay the caller's
	p, err := b.copy(ctx, s, copies, down)
	switch to := target(down); {
	case err == nil:
		return p, nil
	case len(copies) == 1:
		return p, fmt.Errorf("blocks: copy %d blocks of %d bytes to the %s: %w", copies[0].Count, copies[0].Size, to, err)
	default:
		return p, fmt.Errorf("blocks: copy to the %s (copies: %d): %w", to, len(copies), err)
	}
}

func target(down bool) string {
	if down {
		return "host"
	}
	return "device"
}

// begin begins a call, which the caller has to end unless there is an error.
func (b *Copier) begin(ctx context.Context, s *cudart.Stream) error {
	switch {
	case !b.made():
		return errZero
	case ctx == nil:
		return errNilContext
	case s == nil || s.Device() == nil:
		return errors.New("the stream is nil or zero")
	case s.Device() != b.dev:
		return fmt.Errorf("%v is not of %v", s, b.dev)
	case ctx.Err() != nil:
		return bounded.Ended(ctx)
	case !b.life.Begin():
		return cudart.ErrClosed
	}
	return nil
}

// copy queues copies, whose defaults it sets, if all of them may be queued.
func (b *Copier) copy(ctx context.Context, s *cudart.Stream, copies []Copy, down bool) (p cudart.Point, err error) {
	if err := b.begin(ctx, s); err != nil {
		return p, err
	}
	defer b.life.End()
	for i := range copies {
		c := &copies[i]
		c.HostStride, c.DeviceStride = cmp.Or(c.HostStride, c.Size), cmp.Or(c.DeviceStride, c.Size)
		err := c.count()
		if err == nil {
			err = b.check(c, down)
		}
		if err != nil {
			return p, ofCopy(err, i, 1, len(copies))
		}
	}
	all := &call{Copier: b, ctx: ctx, s: s, down: down}
	all.launches = all.one[:0]
	for i, n := 0, 0; i < len(copies); i += n {
		c := copies[i]
		for n = 1; i+n < len(copies) && copies[i+n].joins(&c); n++ {
		}
		if n > 1 {
			c = concatenate(copies[i : i+n])
			if err := b.check(&c, down); err != nil {
				return p, ofCopy(err, i, n, len(copies))
			}
		}
		switch {
		case c.Count == 0:
		case c.Hosts != nil:
			for _, part := range c.split() {
				all.launches = append(all.launches, launch{Copy: part})
			}
		default:
			all.launches = append(all.launches, launch{Copy: c})
		}
	}
	if err := all.queue(); err != nil {
		return p, err
	}
	return s.Point(), nil
}

// count sets Count to the length of the lists on the host, if there are any. It returns an error if the numbers
// contradict one another.
func (c *Copy) count() error {
	n, listed := c.Count, false
	for _, list := range [...][]uint32{c.HostIndex, c.DeviceIndex} {
		switch {
		case list == nil:
		case listed && len(list) != n:
			return fmt.Errorf("indices: %d in HostIndex, %d in DeviceIndex: the lists must have the same length", len(c.HostIndex), len(c.DeviceIndex))
		default:
			n, listed = len(list), true
		}
	}
	switch {
	case listed && c.Count != 0 && c.Count != n:
		return fmt.Errorf("a Count of %d beside a list of %d indices: it must be the length of the list, or 0", c.Count, n)
	case c.listsOnDevice() && n == 0 && !listed:
		return errors.New("a Count of 0 beside a list in device memory: set Count to the length of the list")
	}
	c.Count = n
	return nil
}

// ofCopy adds to an error which of several copies it is about: n of them, from i on.
func ofCopy(err error, i, n, of int) error {
	switch {
	case of == 1:
		return err
	case n == 1:
		return fmt.Errorf("copy %d: %w", i, err)
	}
	return fmt.Errorf("copies %d to %d joined: %w", i, i+n-1, err)
}

// joins reports whether the copies of c differ from others in their lists and count alone, which are on the host.
func (c *Copy) joins(other *Copy) bool {
	for _, one := range []*Copy{c, other} {
		if one.Hosts != nil || one.listsOnDevice() {
			return false
		}
	}
	return unsafe.SliceData(c.Host) == unsafe.SliceData(other.Host) && len(c.Host) == len(other.Host) &&
		c.Device == other.Device && c.DeviceLen == other.DeviceLen &&
		c.HostStride == other.HostStride && c.DeviceStride == other.DeviceStride && c.Size == other.Size
}

// concatenate returns copies that join, as one.
func concatenate(copies []Copy) Copy {
	all := copies[0]
	all.Count = 0
	for i := range copies {
		all.Count += copies[i].Count
	}
	all.HostIndex, all.DeviceIndex = make([]uint32, 0, all.Count), make([]uint32, 0, all.Count)
	for i := range copies {
		for block := range copies[i].Count {
			host, device := copies[i].numbers(block)
			all.HostIndex, all.DeviceIndex = append(all.HostIndex, uint32(host)), append(all.DeviceIndex, uint32(device))
		}
	}
	return all
}

// A call queues the copies of one call. The caller's goroutine copies the lists; the goroutine that
// calls CUDA may go on after the caller has returned.
type call struct {
	*Copier
	ctx      context.Context
	s        *cudart.Stream
	down     bool
	launches []launch
	one      [1]launch // memory for launches
}

// A launch has copies of blocks of one host memory.
type launch struct {
	Copy
	owner  hostmem.Pinned
	start  int // of Host in the owner's memory
	method Method
	lists  pool.Lease // pinned memory with the lists that the kernel reads; zero if there are none
}

// queue queues all copies, if all of their host memories may be used.
func (c *call) queue() (err error) {
	for i := range c.launches {
		l := &c.launches[i]
		if l.CheckIndices && l.listsOnDevice() {
			if err := c.checkOnDevice(&l.Copy); err != nil {
				return err
			}
		}
		if l.owner, l.start, err = pinnedMemory(l.Host); err != nil {
			return err
		}
		if len(c.launches) > 1 { // else its own use refuses it
			if err := l.owner.Use(c.s, c.down, func() error { return nil }); err != nil {
				return err
			}
		}
		l.method = c.choose(&l.Copy, c.down)
	}
	for i := range c.launches {
		if err == nil {
			err = c.copyLists(&c.launches[i])
		}
	}
	if err == nil && len(c.launches) > 0 {
		if err = queue.Calls.Of(c.s).Begin(c.ctx); err == nil {
			return c.do((*call).queueAll, nil)
		}
	}
	c.releaseLists()
	return err
}

// do calls f, whose calls into CUDA may block, with a place among those of the stream, and then after with
// the error. When the context ends do returns; Close waits for both functions.
func (c *call) do(f func(*call) error, after func(error) error) error {
	if c.ctx.Done() == nil { // without the allocations below
		return c.run(f, after)
	}
	c.life.Hold()
	_, err := bounded.Do(c.ctx, bounded.Call[struct{}]{
		Run: func() (none struct{}, err error) {
			defer c.life.End()
			return none, c.run(f, after)
		},
		Grace: bounded.CallbackGrace,
	})
	return stage.AddUnderWay(err)
}

func (c *call) run(f func(*call) error, after func(error) error) error {
	err := func() error {
		defer queue.Calls.Of(c.s).End()
		return f(c)
	}()
	if after != nil {
		err = after(err)
	}
	return err
}

// queueAll queues the copies of all launches, until one fails or the context ends.
func (c *call) queueAll() (err error) {
	defer c.releaseLists(c.s)
	for i := range c.launches {
		if err == nil && c.ctx.Err() != nil {
			err = bounded.Ended(c.ctx)
		}
		if err != nil {
			break
		}
		l := &c.launches[i]
		err = l.owner.Use(c.s, c.down, func() error {
			switch {
			case l.method == ByEngine || !l.listsOnDevice() && !l.known(c.s.Device()):
				return c.byEngine(l)
			case l.method == staged:
				return c.throughScratch(l)
			}
			return c.byKernel(l)
		})
	}
	return err
}

// copyLists copies the lists on the host: for the kernel to pinned memory, and else if CUDA may be called without the caller.
func (c *call) copyLists(l *launch) (err error) {
	lists := [...]*[]uint32{&l.HostIndex, &l.DeviceIndex}
	if l.method == ByEngine {
		for _, list := range lists {
			if c.ctx.Done() != nil {
				*list = slices.Clone(*list)
			}
		}
		return nil
	}
	n := len(l.HostIndex) + len(l.DeviceIndex)
	if n == 0 {
		return nil
	}
	if l.lists, err = c.lists.Get(c.ctx, 4*n); err != nil {
		return err
	}
	pinned := unsafe.Slice((*uint32)(l.lists.Pointer()), n)
	for _, list := range lists {
		if *list != nil {
			copied := copy(pinned, *list)
			*list, pinned = pinned[:copied:copied], pinned[copied:]
		}
	}
	return nil
}

// releaseLists returns the pinned lists to their pool, which reuses the memory when the streams of the launches have
// passed them.
func (c *call) releaseLists(streams ...*cudart.Stream) {
	for i := range c.launches {
		if l := &c.launches[i]; l.lists.Len() > 0 {
			_ = l.lists.Release(streams...) // fails only for a nil stream, and twice
		}
	}
}

// pinnedMemory returns the owner of host memory, and where in it the memory begins.
func pinnedMemory(host []byte) (owner hostmem.Pinned, start int, err error) {
	owner, start, ok := hostmem.Find(host)
	if !ok {
		err = fmt.Errorf("the %d bytes of host memory are not pinned, or not by package hostmem: hostmem.Register pins them", len(host))
	}
	return owner, start, err
}

// split returns the copies of each of Hosts that has some.
func (c *Copy) split() []Copy {
	ends := make([]int, len(c.Hosts)) // numbers of the first block that is not in the memory
	parts := make([]Copy, len(c.Hosts))
	for i, host := range c.Hosts {
		ends[i] = blocksWithin(len(host), c.HostStride, c.Size)
		if i > 0 {
			ends[i] += ends[i-1]
		}
		parts[i] = Copy{Host: host, Device: c.Device, DeviceLen: c.DeviceLen, HostStride: c.HostStride, DeviceStride: c.DeviceStride, Size: c.Size}
	}
	for i := range c.Count {
		host, device := c.numbers(i)
		at := sort.SearchInts(ends, host+1)
		if at > 0 {
			host -= ends[at-1]
		}
		p := &parts[at]
		p.HostIndex, p.DeviceIndex, p.Count = append(p.HostIndex, uint32(host)), append(p.DeviceIndex, uint32(device)), p.Count+1
	}
	return slices.DeleteFunc(parts, func(p Copy) bool { return p.Count == 0 })
}

// choose returns the method for a copy. The kernel numbers the bytes of a block with 32 bits.
func (b *Copier) choose(c *Copy, down bool) Method {
	m := b.method
	switch {
	case c.listsOnDevice():
		m = ByKernel
	case c.Size > math.MaxInt32:
		m = ByEngine
	case m == Quickest:
		m = c.quickest(down)
	}
	if m == ByKernel && b.canStage(c, down) {
		return staged
	}
	return m
}

// known reports whether both ends of the device's memory are in allocations. A kernel that accesses any other address
// ends the context, and an engine refuses it. Memory may be mapped in thousands of pieces, so the ends must do.
func (c *Copy) known(dev *cudart.Device) bool {
	memory := queue.Allocations{Device: dev}
	return memory.Hold(c.Device, 1) && memory.Hold(c.Device+cudart.DevPtr(c.DeviceLen-1), 1)
}

// byKernel launches the kernel, which reads the lists when it runs.
func (c *call) byKernel(l *launch) error {
	src, dst := l.ends()
	if c.down {
		dst, src = src, dst
	}
	return c.kernel.Copy(c.s, dst, src, l.Size, l.Count, c.processorsOf(&l.Copy), c.down)
}

// ends returns where the blocks are, for the kernel.
func (c *Copy) ends() (host, device gpukernels.BlockList) {
	address := func(list []uint32, onDevice cudart.DevPtr) cudart.DevPtr {
		return onDevice | cudart.DevPtr(uintptr(unsafe.Pointer(unsafe.SliceData(list)))) // one of them at most
	}
	host = gpukernels.BlockList{Base: cudart.DevPtr(uintptr(unsafe.Pointer(unsafe.SliceData(c.Host)))), Stride: c.HostStride, Index: address(c.HostIndex, c.HostIndexOnDevice)}
	device = gpukernels.BlockList{Base: c.Device, Stride: c.DeviceStride, Index: address(c.DeviceIndex, c.DeviceIndexOnDevice)}
	return host, device
}

// byEngine queues copies, batches of them where CUDA has these. No copy may cross the seam of two registrations of the
// host memory.
func (c *call) byEngine(l *launch) error {
	batch := c.batches.Get().(*cudart.CopyBatch)
	defer c.batches.Put(batch)
	copies := queue.NewBatcher(c.s, batch, c.down)
	copies.Batches = copies.Batches && l.Count > engineSingle
	if l.contiguous() && copies.Memory.Joins(l.Device, l.Size*l.Count) {
		l.Size, l.Count = l.Size*l.Count, 1
	}
	whole := len(slices.Collect(l.owner.Spans(0, l.owner.Len()))) == 1
	for i := range l.Count {
		if (i%64 == 0 || !copies.Batches) && c.ctx.Err() != nil {
			return bounded.Ended(c.ctx)
		}
		host, device := l.offsets(i)
		err := error(nil)
		if whole {
			err = copies.Add(unsafe.Pointer(&l.Host[host]), l.Device+cudart.DevPtr(device), l.Size)
		} else {
			for s := range l.owner.Spans(l.start+host, l.Size) {
				at := s.Off - l.start
				if err = copies.Add(unsafe.Pointer(&l.Host[at]), l.Device+cudart.DevPtr(device+at-host), s.Len); err != nil {
					break
				}
			}
		}
		if err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
	}
	return copies.Flush()
}

// numbers are those of block i on both sides.
func (c *Copy) numbers(i int) (host, device int) {
	host, device = i, i
	if c.HostIndex != nil {
		host = int(c.HostIndex[i])
	}
	if c.DeviceIndex != nil {
		device = int(c.DeviceIndex[i])
	}
	return host, device
}

// offsets are the places of block i on both sides.
func (c *Copy) offsets(i int) (host, device int) {
	host, device = c.numbers(i)
	return host * c.HostStride, device * c.DeviceStride
}

func (c *Copy) listsOnDevice() bool { return c.HostIndexOnDevice|c.DeviceIndexOnDevice != 0 }

// A side is one side of copies, for checks.
type side struct {
	name     string
	index    []uint32
	onDevice cudart.DevPtr // a list in the device's memory, or 0
	stride   int
	n        int // bytes of the memory
	blocks   int // within it
	target   bool
}

func (c *Copy) sides(down bool) [2]side {
	sides := [...]side{
		{"host", c.HostIndex, c.HostIndexOnDevice, c.HostStride, len(c.Host), blocksWithin(len(c.Host), c.HostStride, c.Size), down},
		{"device", c.DeviceIndex, c.DeviceIndexOnDevice, c.DeviceStride, c.DeviceLen, blocksWithin(c.DeviceLen, c.DeviceStride, c.Size), !down},
	}
	for _, host := range c.Hosts {
		sides[0].n, sides[0].blocks = sides[0].n+len(host), sides[0].blocks+blocksWithin(len(host), c.HostStride, c.Size)
	}
	return sides
}

// blocksWithin returns the number of blocks of a size that are within n bytes.
func blocksWithin(n, stride, size int) int {
	if size > n {
		return 0
	}
	return (n-size)/max(stride, 1) + 1
}

// outside is the error for an index that is not within the memory.
func (s *side) outside(i int, index uint32) error {
	return fmt.Errorf("block %d, with index %d, is not within the %s's %d bytes: they have %d blocks", i, index, s.name, s.n, s.blocks)
}

// check returns an error for blocks outside of the memory, and for blocks of the target that
// overlap. Of lists in the device's memory it does not see the indices.
func (b *Copier) check(c *Copy, down bool) error {
	switch {
	case c.Size <= 0 || min(c.Count, c.DeviceLen, c.HostStride, c.DeviceStride) < 0:
		return fmt.Errorf("the size must be positive, and the count, the strides of %d and %d and the device's %d bytes not negative", c.HostStride, c.DeviceStride, c.DeviceLen)
	case c.Count > math.MaxInt/max(c.Size, 4): // 4 bytes of a list
		return fmt.Errorf("they or their list have more than %d bytes", math.MaxInt)
	case uint64(c.Device) > ^uint64(0)-uint64(c.DeviceLen):
		return fmt.Errorf("%d bytes at %v: no memory has such addresses", c.DeviceLen, c.Device)
	case c.Hosts != nil && (c.Host != nil || c.listsOnDevice()):
		return errors.New("with Hosts there is neither a Host nor a list in the device's memory")
	case down && overlap(c.Hosts):
		return errors.New("two of Hosts overlap")
	}
	if err := b.checkListsOnDevice(c); err != nil {
		return err
	}
	sides := c.sides(down)
	for i := range sides {
		if err := b.checkSide(c, &sides[i]); err != nil {
			return err
		}
	}
	return nil
}

// checkListsOnDevice returns an error for lists in the device's memory that the kernel cannot read.
func (b *Copier) checkListsOnDevice(c *Copy) error {
	switch {
	case !c.listsOnDevice():
		return nil
	case b.kernel == nil:
		return fmt.Errorf("a list in the device's memory needs the kernel, and this Copier copies by engines alone: %w", errors.ErrUnsupported)
	case c.Size > math.MaxInt32:
		return fmt.Errorf("a list in the device's memory of blocks of %d bytes: at most %d", c.Size, math.MaxInt32)
	}
	return nil
}

func (b *Copier) checkSide(c *Copy, side *side) error {
	switch {
	case side.index != nil && side.onDevice != 0:
		return fmt.Errorf("the %s has two lists: one on the host, and one in the device's memory", side.name)
	case side.onDevice%4 != 0:
		return fmt.Errorf("the %s's list at %v is not at a multiple of 4 bytes", side.name, side.onDevice)
	case side.target && side.stride < c.Size && c.Count > 1:
		return fmt.Errorf("blocks overlap in the %s's memory, %d bytes apart", side.name, side.stride)
	case c.Count == 0:
		return nil
	case side.index != nil:
		return b.checkIndices(side)
	case side.onDevice == 0 && c.Count > side.blocks || side.blocks == 0:
		return fmt.Errorf("block %d is not within the %s's %d bytes: they have %d blocks", side.blocks, side.name, side.n, side.blocks)
	}
	return nil
}

// checkIndices checks the list on the host.
func (b *Copier) checkIndices(side *side) error {
	largest := largest(side.index)
	if int(largest) >= side.blocks {
		i := slices.IndexFunc(side.index, func(at uint32) bool { return int(at) >= side.blocks })
		return side.outside(i, side.index[i])
	}
	if !side.target {
		return nil
	}
	seen := b.seen.Get().(*bitSet)
	i := seen.firstTwice(side.index, int(largest))
	b.seen.Put(seen)
	if i >= 0 {
		return fmt.Errorf("block %d overlaps another one in the %s's memory: duplicate index %d", i, side.name, side.index[i])
	}
	return nil
}

// largest returns the largest number, which is 0 for none. Four at a time take half of the time.
func largest(list []uint32) uint32 {
	var a, b, c, d uint32
	for ; len(list) >= 4; list = list[4:] {
		a, b, c, d = max(a, list[0]), max(b, list[1]), max(c, list[2]), max(d, list[3])
	}
	for _, v := range list {
		a = max(a, v)
	}
	return max(a, b, c, d)
}

// overlap reports whether two of some memories share a byte.
func overlap(memories [][]byte) bool {
	begin := func(m []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(m))) }
	sorted := slices.SortedFunc(slices.Values(memories), func(a, b []byte) int { return cmp.Compare(begin(a), begin(b)) })
	end := uintptr(0)
	for _, m := range sorted {
		if len(m) > 0 && begin(m) < end {
			return true
		}
		end = max(end, begin(m)+uintptr(len(m)))
	}
	return false
}

// checkOnDevice returns an error for the first index that is not within the memory, of lists in the
// device's memory.
func (c *call) checkOnDevice(l *Copy) error {
	sides := l.sides(false)
	const words = 2 // of a result: see gpukernels.Blocks.FirstBeyond
	lease, err := c.lists.Get(c.ctx, 8*words*len(sides))
	if err != nil {
		return err
	}
	if err := queue.Calls.Of(c.s).Begin(c.ctx); err != nil {
		return errors.Join(err, lease.Release())
	}
	search := func(c *call) error {
		for i, side := range sides {
			at := cudart.DevPtr(uintptr(lease.Pointer())) + cudart.DevPtr(8*words*i)
			if side.onDevice == 0 {
				continue
			}
			if err := c.kernel.FirstBeyond(c.s, side.onDevice, l.Count, side.blocks, at); err != nil {
				return err
			}
		}
		return nil
	}
	return c.do(search, func(err error) error {
		defer func() { _ = lease.Release(c.s) }() // fails only for no stream, and twice
		if err == nil {
			err = c.s.Point().Wait(c.ctx)
		}
		if err != nil {
			return err
		}
		results := unsafe.Slice((*[words]uint64)(lease.Pointer()), len(sides))
		for i, side := range sides {
			if first := results[i]; side.onDevice != 0 && first[0] < uint64(l.Count) {
				return side.outside(int(first[0]), uint32(first[1]))
			}
		}
		return nil
	})
}

// A bitSet has a bit for each of some numbers; between uses no bit is set.
type bitSet struct{ words []uint64 }

// firstTwice returns the position of the first number that the list had before, or -1. No number is above
// largest. For a few numbers that are far apart it needs no bit for each number up to largest.
func (b *bitSet) firstTwice(list []uint32, largest int) int {
	n := largest/64 + 1
	if n > 64*len(list)+4096 {
		seen := make(map[uint32]bool, len(list))
		for i, v := range list {
			if seen[v] {
				return i
			}
			seen[v] = true
		}
		return -1
	}
	if len(b.words) < n {
		b.words = make([]uint64, n)
	}
	words, twice := b.words[:n], uint64(0)
	for _, v := range list { // without a branch: the positions are rarely wanted
		word, bit := &words[v/64], uint64(1)<<(v%64)
		twice |= *word & bit
		*word |= bit
	}
	reset := func() {
		if n <= 8*len(list) {
			clear(words)
			return
		}
		for _, v := range list {
			words[v/64] = 0
		}
	}
	if reset(); twice == 0 {
		return -1
	}
	defer reset()
	return slices.IndexFunc(list, func(v uint32) bool {
		word, bit := &words[v/64], uint64(1)<<(v%64)
		before := *word & bit
		*word |= bit
		return before != 0
	})
}
