package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// A windowOrder is the order of the samples of one epoch, by windows. As of a permutation, programs
// store positions in it.
type windowOrder struct {
	*shards
	order  []int         // numbers of the shards, in the epoch's order
	places []int         // place of each shard in it
	starts []int         // position of the first sample of each place, and number of all samples
	within []permutation // of the samples of each window; nil for ascending ones
}

func newWindowOrder(s *shards, o Options, epoch int) *windowOrder {
	n := len(s.paths)
	w := &windowOrder{shards: s, order: make([]int, n), places: make([]int, n), starts: make([]int, n+1)}
	shuffle := o.Shuffle && w.windows() > 1 // the files of one window keep their places
	var random permutation
	if shuffle {
		random = newPermutation(n, o.Seed, epoch)
	}
	for place := range n {
		shard := place
		if shuffle {
			shard = random.at(place)
		}
		w.order[place], w.places[shard] = shard, place
		w.starts[place+1] = w.starts[place] + s.samples(shard)
	}
	for k := 0; o.Shuffle && k < w.windows(); k++ {
		w.within = append(w.within, newPermutation(w.start(k+1)-w.start(k), mix(o.Seed)+uint64(k)+1, epoch))
	}
	return w
}

// windows returns the number of windows.
func (w *windowOrder) windows() int { return (len(w.order) + w.window - 1) / w.window }

// start returns the first position in a window. For the number of windows it returns the number of
// all samples.
func (w *windowOrder) start(k int) int { return w.starts[min(k*w.window, len(w.order))] }

// members returns the shards of a window.
func (w *windowOrder) members(k int) []int {
	return w.order[k*w.window : min((k+1)*w.window, len(w.order))]
}

// windowOf returns the window of a position.
func (w *windowOrder) windowOf(i int) int { return segment(w.starts, i) / w.window }

// at returns the sample at position i.
func (w *windowOrder) at(i int) int {
	if w.within == nil {
		return i
	}
	k := w.windowOf(i)
	i = w.start(k) + w.within[k].at(i-w.start(k))
	place := segment(w.starts, i)
	return w.first[w.order[place]] + i - w.starts[place]
}

// windows are the windows of shards that a loader has registered: at most two, which follow each
// other in the order of an epoch. The goroutine that drives decides what to register. Another
// goroutine makes the change, one at a time, because it waits for the GPU and for disks.
//
//	fields              | used by                                          | under
//	changing            | any goroutine                                    | atomic
//	fields of change    | its goroutine, while changing is true; else the  | –
//	                    | goroutine that drives, or Close                  |
//	the others          | the goroutine that drives, or Close              | –
type windows struct {
	l      *Loader
	ctx    context.Context // of changes: Close ends it
	cancel context.CancelCauseFunc

	changing atomic.Bool
	change   *change // whose outcome was not taken yet

	epoch  *epoch
	count  int                 // windows that the epoch's batches have samples of
	queued batchSet            // batches whose kernels are queued, or that were done before
	first  int                 // number of the first registered window
	files  [][]*hostmem.Buffer // registered shards of the windows from first on, in the epoch's order
	stale  []*hostmem.Buffer   // files that no batch needs any more, to be closed
	after  cudart.Point        // the GPU may use stale before it
	err    error               // of the last change: the epoch ends before window first+len(files)

	sampleLists
}

// The sampleLists are memory of queue: the place of each sample's shard in the windows, its number in the shard, and the
// end of each shard in the lists.
type sampleLists struct{ places, numbers, ends []int }

// A change closes files, and then registers the shards of a window.
type change struct {
	stale  []*hostmem.Buffer // remaining after an error
	after  cudart.Point      // the GPU may use stale before it
	shards []int
	opened []*hostmem.Buffer // all of shards, or none
	err    error
}

func newWindows(ctx context.Context, l *Loader) *windows {
	m := &windows{l: l}
	m.ctx, m.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return m
}

// run makes a change. After an error none of its shards stays registered, unless it is in stale.
func (m *windows) run(c *change) {
	if len(c.stale) > 0 {
		if err := c.after.Wait(m.ctx); err != nil {
			c.err = fmt.Errorf("the GPU may be using shards that were registered before: %w", err)
			return
		}
	}
	c.stale, c.err = closeFiles(m.ctx, c.stale)
	for i := 0; i < len(c.shards) && c.err == nil; i++ {
		var f *hostmem.Buffer
		if f, c.err = m.register(c.shards[i]); c.err == nil {
			c.opened = append(c.opened, f)
		}
	}
	if c.err != nil {
		var err error
		c.stale, err = closeFiles(m.ctx, append(c.stale, c.opened...))
		c.opened, c.err = nil, errors.Join(c.err, err)
	}
}

// register maps and registers a shard.
func (m *windows) register(shard int) (*hostmem.Buffer, error) {
	path, want := m.l.shards.paths[shard], m.l.shards.samples(shard)*m.l.shards.sample
	n, err := shardSize(path)
	if err == nil && n != want {
		err = fmt.Errorf("%s has %d bytes, and had %d when the source was made", path, n, want)
	}
	if err != nil {
		return nil, err
	}
	return hostmem.MapFile(m.ctx, m.l.dev, path, hostmem.FileOptions{Length: want})
}

// closeFiles closes files, and returns those that are still registered.
func closeFiles(ctx context.Context, files []*hostmem.Buffer) (remaining []*hostmem.Buffer, err error) {
	for _, f := range files {
		if e := f.CloseContext(ctx); e != nil {
			remaining, err = append(remaining, f), errors.Join(err, e)
		}
	}
	return remaining, err
}

// update takes the outcome of the last change, and begins the next one if a window is to be
// registered or closed. It does not wait for either.
func (m *windows) update(e *epoch) {
	if m == nil || m.changing.Load() {
		return
	}
	if c := m.change; c != nil {
		m.change = nil
		m.stale = append(m.stale, c.stale...)
		if m.err = c.err; c.opened != nil {
			m.files = append(m.files, c.opened)
		}
	}
	if m.epoch != e {
		m.begin(e)
	}
	next := m.first + len(m.files)
	if m.err != nil {
		if batch := e.windows.start(next) / m.l.o.BatchSize; next < m.count {
			e.fail(batch, fmt.Errorf("loader: batch %d of epoch %d: shards of a window: %w", batch, e.number, m.err))
		}
		return
	}
	c := &change{stale: m.stale, after: m.after}
	if next < m.count && len(m.files) < 2 {
		c.shards = e.windows.members(next)
	}
	if len(c.stale)+len(c.shards) == 0 || !m.l.life.Begin() {
		return
	}
	m.change, m.stale = c, nil
	m.l.driver.after(&m.changing, func() {
		defer m.l.life.End()
		m.run(c)
	})
}

// begin begins an epoch. No window of the epoch is registered yet, unless it has only one.
func (m *windows) begin(e *epoch) {
	m.epoch, m.err, m.queued = e, nil, slices.Clone(e.done)
	if e.windows.windows() > 1 {
		m.retire(len(m.files), m.l.stream.Point())
	}
	m.first, m.count = 0, 0
	if batches := m.l.batches(); batches > 0 {
		m.first = e.windows.windowOf(e.done.next(0) * m.l.o.BatchSize)
		m.count = m.last(batches-1) + 1
	}
}

// last returns the last window that a batch has samples of.
func (m *windows) last(batch int) int {
	return m.epoch.windows.windowOf(batch*m.l.o.BatchSize + m.l.sizeOf(batch) - 1)
}

// ready reports whether all samples of a slot's batch are registered. Those of the batches before it
// are, too, then.
func (m *windows) ready(e *epoch, s *slot) bool {
	return m == nil || m.epoch == e && m.last(s.number) < m.first+len(m.files)
}

// passed removes the windows that no other batch needs, because the kernels of slots are queued.
// after is the end of these kernels.
func (m *windows) passed(slots []*slot, after cudart.Point) {
	if m == nil {
		return
	}
	for _, s := range slots {
		m.queued = m.queued.with(s.number)
	}
	windows, n := m.epoch.windows.windows(), 0
	for n < len(m.files) && windows > 1 && m.queued.next(0)*m.l.o.BatchSize >= m.epoch.windows.start(m.first+n+1) {
		n++
	}
	m.retire(n, after)
}

// retire removes the first n registered windows. The GPU may use them before a point.
func (m *windows) retire(n int, after cudart.Point) {
	if n > 0 {
		m.stale, m.after = append(m.stale, slices.Concat(m.files[:n]...)...), after
		m.files, m.first = slices.Delete(m.files, 0, n), m.first+n
	}
}

// queue queues the kernels that copy batches to slots, which are neighbours in memory without
// padding between the samples: a kernel for each field and shard. Its lists have the places of the
// shard's samples in the batches, and their numbers in the shard.
func (m *windows) queue(blocks *gpukernels.Blocks, slots []*slot) error {
	l, order, first := m.l, m.epoch.windows, slots[0]
	m.places, m.numbers = m.places[:0], m.numbers[:0]
	m.ends = append(m.ends[:0], make([]int, len(m.files)*order.window)...)
	for _, s := range slots {
		for _, i := range s.indices {
			shard, number := order.locate(i)
			place := order.places[shard] - m.first*order.window
			m.places, m.numbers = append(m.places, place), append(m.numbers, number)
			m.ends[place]++
		}
	}
	n := 0
	for place, samples := range m.ends {
		m.ends[place] = n // until the lists are written
		n += samples
	}
	to, from := first.host[:indexBytes*n], first.host[indexBytes*n:2*indexBytes*n]
	for at, place := range m.places {
		entry := indexBytes * m.ends[place]
		m.ends[place]++
		binary.NativeEndian.PutUint32(to[entry:], uint32(at))
		binary.NativeEndian.PutUint32(from[entry:], uint32(m.numbers[at]))
	}
	return l.buf.Use(l.stream, false, func() error {
		begin := 0
		for place, end := range m.ends {
			n, entry := end-begin, indexBytes*begin
			if begin = end; n == 0 {
				continue
			}
			// A change waits for the kernels before it closes the file.
			base := address(m.files[place/order.window][place%order.window].Bytes())
			for f, size := range l.layout.sizes {
				dst := gpukernels.BlockList{Base: first.mem + cudart.DevPtr(l.layout.offsets[f]), Stride: size, Index: address(to[entry:])}
				src := gpukernels.BlockList{Base: base, Stride: order.sample, Index: address(from[entry:])}
				if err := blocks.Copy(l.stream, dst, src, size, n, gatherProcessors, false); err != nil {
					return err
				}
				base += cudart.DevPtr(size)
			}
		}
		return nil
	})
}

// shut ends the change that is being made.
func (m *windows) shut() {
	if m != nil {
		m.cancel(cudart.ErrClosed)
	}
}

// close closes all files. No change is being made, and the GPU uses none of the files. It may be
// called again.
func (m *windows) close(ctx context.Context) error {
	if m == nil {
		return nil
	}
	files := append(m.stale, slices.Concat(m.files...)...)
	if c := m.change; c != nil {
		files = slices.Concat(files, c.stale, c.opened)
	}
	m.change, m.files = nil, nil
	var err error
	m.stale, err = closeFiles(ctx, files)
	return err
}
