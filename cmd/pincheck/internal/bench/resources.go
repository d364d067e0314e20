// The memory and streams of a group of cases, released in reverse order when their work has completed.

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/transfer"
)

// A clock returns the caller's time since some moment. Tests take one that follows the
// link model of the simulated GPU, so that no machine is too slow for them.
type clock func() time.Duration

// wall is the host's clock.
func wall() clock {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

// processClock is the host's clock since the start of the process.
var processClock = wall()

// resources are the memory and the streams of a group of cases. close releases them.
type resources struct {
	dev     *cudart.Device
	now     clock // nil is processClock
	streams []*cudart.Stream
	undo    lifetime.Stack
}

// time returns the time by the clock.
func (w *resources) time() time.Duration {
	if w.now == nil {
		return processClock()
	}
	return w.now()
}

// drainTime is the time that close waits for work in flight.
const drainTime = 10 * time.Second

// close waits for the streams, and releases everything, the last one first. If the
// streams' work does not end, all stays allocated, because the GPU may be using it.
func (w *resources) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	var errs []error
	for _, s := range w.streams {
		err := s.Synchronize(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("all memory stays allocated, the GPU may be using it: %w", err)
		}
		errs = append(errs, err)
	}
	w.streams = nil
	return errors.Join(append(errs, w.undo.Run(ctx))...)
}

// inTurn calls functions until one returns an error.
func inTurn(all ...func() error) error {
	for _, do := range all {
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// made returns a function that sets variables to what create returns.
func made[T any](create func() (T, error), to ...*T) func() error {
	return func() (err error) {
		for _, v := range to {
			if *v, err = create(); err != nil {
				return err
			}
		}
		return nil
	}
}

// allocated returns a function that allocates n bytes of device memory for each variable.
func (w *resources) allocated(n int, to ...*cudart.DevPtr) func() error {
	return made(func() (cudart.DevPtr, error) { return w.device(n) }, to...)
}

// pinnedAs returns a function that allocates n bytes of pinned memory for each variable.
func (w *resources) pinnedAs(ctx context.Context, n int, to ...**hostmem.Buffer) func() error {
	return made(func() (*hostmem.Buffer, error) { return w.pinned(ctx, n) }, to...)
}

// stream makes a stream that is in no order with others.
func (w *resources) stream() (*cudart.Stream, error) {
	s, err := w.dev.NewStream(cudart.StreamOptions{})
	if err == nil {
		w.streams = append(w.streams, s)
		w.undo.PushClose(s.Close)
	}
	return s, err
}

func (w *resources) span() (*measure.Span, error) {
	s, err := measure.NewSpan(w.dev)
	if err == nil {
		w.undo.PushClose(s.Close)
	}
	return s, err
}

func (w *resources) event() (*cudart.Event, error) {
	e, err := w.dev.NewEvent()
	if err == nil {
		w.undo.PushClose(e.Close)
	}
	return e, err
}

// device allocates device memory.
func (w *resources) device(n int) (cudart.DevPtr, error) {
	p, err := w.dev.Malloc(n)
	if err == nil {
		w.undo.PushClose(func() error { return w.dev.Free(p) })
	}
	return p, err
}

// pinned allocates pinned memory.
func (w *resources) pinned(ctx context.Context, n int) (*hostmem.Buffer, error) {
	b, err := hostmem.Alloc(ctx, w.dev, n, hostmem.Options{Label: "bench"})
	if err == nil {
		w.undo.Push(b.CloseContext)
	}
	return b, err
}

// pageable allocates memory that is not pinned.
func (w *resources) pageable(n int) (hostkind.Direct, error) {
	b, release, err := hostos.MapHuge(n)
	if err != nil {
		return nil, err
	}
	w.undo.PushClose(release)
	return b, nil
}

// copier makes a copier of pageable memory and files.
func (w *resources) copier(ctx context.Context) (*transfer.Copier, error) {
	c, err := transfer.NewCopier(ctx, w.dev, transfer.Options{})
	if err == nil {
		w.undo.Push(c.CloseContext)
	}
	return c, err
}

// Values of result.Memory in experiments that compare pinned memory with memory that is not.
const (
	inPinned   = "pinned"
	inPageable = "pageable"
)

// piece is the number of bytes that are copied, filled or compared between two checks of the context.
const piece = 32 << 20

// pieces calls f for the pieces of n bytes, until ctx ends.
func pieces(ctx context.Context, n int, f func(off, n int) error) error {
	for off := 0; off < n; off += piece {
		if err := bounded.Ended(ctx); err != nil {
			return err
		}
		if err := f(off, min(piece, n-off)); err != nil {
			return err
		}
	}
	return nil
}

// fetched calls do with n bytes of device memory, piece by piece in a buffer to which it copies them.
func fetched(ctx context.Context, to *hostmem.Buffer, s *cudart.Stream, p cudart.DevPtr, n int, do func(got []byte, off int) error) error {
	for off := 0; off < n; off += to.Len() {
		got := to.Bytes()[:min(to.Len(), n-off)]
		err := inTurn(
			func() error { return to.CopyFromDevice(s, p+cudart.DevPtr(off), 0, len(got)) },
			func() error { return s.Synchronize(ctx) },
			func() error { return do(got, off) },
		)
		if err != nil {
			return err
		}
	}
	return nil
}

// poison fills device memory before something is copied there.
const poison = 0xee

// prove copies n bytes of pinned memory to the device and back, and compares them.
func prove(ctx context.Context, dev *cudart.Device, m hostkind.Memory, n int) (err error) {
	w := resources{dev: dev}
	defer func() { err = errors.Join(err, w.close()) }()
	var s *cudart.Stream
	var p cudart.DevPtr
	err = inTurn(made(w.stream, &s), w.allocated(min(n, piece), &p), func() error { return uploaded.fill(ctx, m.Bytes()[:n]) })
	if err != nil {
		return err
	}
	return pieces(ctx, n, func(off, n int) error {
		returned := m.Bytes()[off : off+n]
		return inTurn(
			func() error { return m.CopyToDevice(ctx, s, p, off, n) },
			func() error { return s.Synchronize(ctx) },
			func() error { clear(returned); return m.CopyFromDevice(ctx, s, p, off, n) },
			func() error { return s.Synchronize(ctx) },
			func() error { return uploaded.compare(ctx, returned, off) },
		)
	})
}

// A load is work for the GPU: a kernel that does nothing for a time.
type load struct {
	*gpukernels.Memory
	time time.Duration
}

// newLoad loads the kernel.
func (w *resources) newLoad(ctx context.Context) (load, error) {
	m, err := gpukernels.NewMemory(ctx, w.dev)
	if err == nil {
		w.undo.Push(m.CloseContext)
	}
	return load{Memory: m}, err
}

func (l *load) queue(s *cudart.Stream) error { return l.Busy(s, l.time) }

// fit makes the load take as long as is wanted.
func (l *load) fit(ctx context.Context, span *measure.Span, s *cudart.Stream, want time.Duration) error {
	l.time = min(max(want, time.Microsecond), gpukernels.MaxBusy)
	_, err := span.Time(ctx, s, func() error { return l.queue(s) }) // what a first run costs
	return err
}

// fitted reports whether fit was called.
func (l *load) fitted() bool { return l.time > 0 }

// labelsOf returns the labels of a device, and others, given as keys and their values in turn.
func labelsOf(dev *cudart.Device, pairs ...string) result.Labels {
	return append(labelled(result.Device, strconv.Itoa(dev.Ordinal())), labelled(pairs...)...)
}

// after returns a function that takes samples. Before the first one it prepares them.
func after(prepare func(context.Context) error, sample func(context.Context) (float64, error)) func(context.Context) (float64, error) {
	prepared := false
	return func(ctx context.Context) (float64, error) {
		if !prepared {
			if err := prepare(ctx); err != nil {
				return 0, err
			}
			prepared = true
		}
		return sample(ctx)
	}
}

// sizesOf returns the requested sizes, or those of a simulated device, of a quick run, or of any other.
func sizesOf(env measure.Env, simulated, quick, all []int) []int {
	switch {
	case len(env.Sizes) > 0:
		return env.Sizes
	case env.Devices[0].Runtime().Library().Simulated:
		return simulated
	case env.Quick:
		return quick
	}
	return all
}

// sizesOr returns the sizes that were asked for, in order, or else those of a quick run, or
// all. A simulated device, whose copies cost the host's time, copies less.
func sizesOr(env measure.Env, quick, all []int) []int {
	if len(env.Sizes) > 0 {
		return slices.Compact(slices.Sorted(slices.Values(env.Sizes)))
	}
	sizes := slices.Clone(all)
	if env.Quick {
		sizes = slices.Clone(quick)
	}
	if isSimulated(env) {
		for i, n := range sizes {
			sizes[i] = min(n, maxSimulated)
		}
	}
	return slices.Compact(sizes)
}

const maxSimulated = 4 << 20

// isSimulated reports whether a device is simulated.
func isSimulated(env measure.Env) bool {
	return slices.ContainsFunc(env.Devices, func(d *cudart.Device) bool { return d.Runtime().Library().Simulated })
}

// onDevices is a plan that needs a device.
func onDevices(plan func(measure.Env) ([]measure.Group, error)) func(measure.Env) ([]measure.Group, error) {
	return func(env measure.Env) ([]measure.Group, error) {
		if len(env.Devices) == 0 {
			return nil, errNoDevice
		}
		return plan(env)
	}
}

// An abandonable is part of a fixture whose samples may be in a call into CUDA that ctx does not end.
type abandonable struct {
	running   sync.WaitGroup // a sample
	abandoned bool           // it was not waited for when ctx ended, and uses all of the fixture
}

// once calls do, and returns when it has, or when ctx ends.
func once[T any](ctx context.Context, a *abandonable, do func() (T, error)) (none T, err error) {
	if err := bounded.Ended(ctx); err != nil {
		return none, err
	}
	a.running.Add(1)
	return bounded.Do(ctx, bounded.Call[T]{
		Run:     func() (T, error) { defer a.running.Done(); return do() },
		Abandon: func() bool { a.abandoned = true; return true },
		Grace:   -1,
	})
}

// release releases what samples use. It does not wait for one that was abandoned: all is
// released when that returns.
func (a *abandonable) release(release func() error) error {
	if !a.abandoned {
		return release()
	}
	go func() {
		a.running.Wait()
		_ = release() // an interrupted run reports no errors
	}()
	return nil
}
