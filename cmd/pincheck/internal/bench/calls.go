// The experiment calls times what one CUDA call through package cudart costs its caller, on each device.
//
//   - Clock: the host's, around a row of calls. Work that they queued is waited for after the clock stops.
//   - call_time: seconds of a row by its number of calls.
//   - call_allocations: allocations on the Go heap by the number of calls, measured apart from the time.

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/units"
)

// The series of Calls.
const (
	seriesCallTime        = "call_time"
	seriesCallAllocations = "call_allocations" // of the Go heap
)

// callLabel is the label of the call, or of the pair of calls.
const callLabel = "call"

// copyCall is a copy's value of callLabel.
const copyCall = "cudaMemcpyAsync to device, 64 B"

// Calls measures what calls of CUDA through package cudart cost the caller.
func Calls() measure.Experiment {
	return measure.Experiment{
		Name:     "calls",
		Group:    "Copies:",
		Question: "What does each CUDA call cost its caller?",
		Long: `Measures the time and the allocations of each CUDA call that this library uses,
made through package cudart.`,
		Related: "pincheck bench latency",
		Views: []result.View{
			{Title: "Time of a call", Series: seriesCallTime, X: callLabel, Lines: []string{result.Device}, Main: true},
			{Title: "Allocations of a call", Series: seriesCallAllocations, X: callLabel, Lines: []string{result.Device}},
		},
		Plan:    onDevices(planCalls),
		Explain: explainCalls,
	}
}

// A callFixture has the memory and the stream of the calls.
type callFixture struct {
	resources
	stream      *cudart.Stream
	event, then *cudart.Event // both recorded
	device      cudart.DevPtr
	host        unsafe.Pointer // pinned
	page        unsafe.Pointer // to register
}

const (
	callBytes = 64   // of copies
	pageBytes = 4096 // of allocations
)

func (r *callFixture) open(ctx context.Context) error {
	record := func() error { return errors.Join(r.stream.Record(r.event), r.stream.Record(r.then)) }
	err := inTurn(made(r.resources.stream, &r.stream), made(r.resources.event, &r.event, &r.then), record, r.allocated(pageBytes, &r.device))
	if err != nil {
		return err
	}
	buffer, err := r.pinned(ctx, pageBytes)
	if err != nil {
		return err
	}
	r.host = buffer.Pointer()
	page, err := r.pageable(pageBytes)
	if err != nil {
		return err
	}
	clear(page) // resident
	r.page = unsafe.Pointer(unsafe.SliceData(page))
	return r.stream.Synchronize(ctx)
}

func (r *callFixture) close() error {
	err := r.resources.close()
	*r = callFixture{resources: resources{dev: r.dev}}
	return err
}

// A call is a call of CUDA, or a pair that makes and releases something.
type call struct {
	name string
	do   func() error
	slow bool // some microseconds or more
	// writes is where the call writes callBytes: a direction of a copy, onDevice for a
	// memset, or empty for none.
	writes string
}

// pair returns a function that makes something and releases it.
func pair[T any](create func() (T, error), release func(T) error) func() error {
	return func() error {
		v, err := create()
		if err != nil {
			return err
		}
		return release(v)
	}
}

// calls returns what is measured. Of cudaSetDevice and cudaGetDevice every call has its
// part: package cudart makes the device current where it is not.
func (r *callFixture) calls() []call {
	return []call{
		{name: "cudaStreamQuery", do: func() error { _, err := r.stream.Query(); return err }},
		{name: "cudaStreamSynchronize", do: func() error { return r.stream.SynchronizeBlocking() }},
		{name: "cudaStreamWaitEvent", do: func() error { return raw.WaitEvent(r.stream, r.event) }},
		{name: "cudaStreamCreate + Destroy", slow: true, do: pair(func() (*cudart.Stream, error) { return r.dev.NewStream(cudart.StreamOptions{}) }, (*cudart.Stream).Close)},
		{name: "cudaEventQuery", do: func() error { _, err := raw.QueryEvent(r.event); return err }},
		{name: "cudaEventRecord", do: func() error { return r.stream.Record(r.then) }},
		{name: "cudaEventElapsedTime", do: func() error { _, err := r.event.Since(r.event); return err }},
		{name: "cudaEventCreate + Destroy", do: pair(r.dev.NewEvent, (*cudart.Event).Close)},
		{name: copyCall, writes: result.HostToDevice, do: func() error { return r.stream.CopyToDevice(r.device, r.host, callBytes) }},
		{name: "cudaMemcpyAsync to host, 64 B", writes: result.DeviceToHost, do: func() error { return r.stream.CopyToHost(r.host, r.device, callBytes) }},
		{name: "cudaMemcpy to device, 64 B", slow: true, writes: result.HostToDevice, do: func() error { return r.dev.CopyToDevice(r.device, r.host, callBytes) }},
		{name: "cudaMemcpy to host, 64 B", slow: true, writes: result.DeviceToHost, do: func() error { return r.dev.CopyToHost(r.host, r.device, callBytes) }},
		{name: "cudaMemsetAsync, 64 B", writes: onDevice, do: func() error { return r.stream.Memset(r.device, 0, callBytes) }},
		{name: "cudaMalloc + cudaFree, 4 KiB", slow: true, do: pair(func() (cudart.DevPtr, error) { return r.dev.Malloc(pageBytes) }, r.dev.Free)},
		{name: "cudaMallocAsync + cudaFreeAsync", do: pair(
			func() (cudart.DevPtr, error) { return r.stream.Malloc(pageBytes) }, func(p cudart.DevPtr) error { return r.stream.Free(p) },
		)},
		{name: "cudaHostAlloc + FreeHost, 4 KiB", slow: true, do: pair(func() (unsafe.Pointer, error) { return r.dev.HostAlloc(pageBytes, 0) }, r.dev.FreeHost)},
		{name: "cudaHostRegister + Unregister", slow: true, do: func() error {
			if err := r.dev.HostRegister(r.page, pageBytes, 0); err != nil {
				return err
			}
			return r.dev.HostUnregister(r.page)
		}},
		{name: "cudaHostGetDevicePointer", do: func() error { _, err := r.dev.HostDevicePointer(r.host); return err }},
		{name: "cudaPointerGetAttributes", do: func() error { _, err := r.dev.PointerAttributes(uintptr(r.host)); return err }},
		{name: "cudaMemGetInfo", slow: true, do: func() error { _, _, err := r.dev.MemInfo(); return err }},
		{name: "cudaDeviceGetAttribute", do: func() error { _, err := r.dev.Attribute(cudart.AttrPCIBus); return err }},
	}
}

const (
	// A stream holds about a thousand entries: so many calls never wait for room.
	callsASample  = 200
	slowCalls     = 10
	callBudget    = 40 * time.Millisecond
	quickCalls    = 15 * time.Millisecond
	allocationRun = 5 // samples of allocations
)

func planCalls(env measure.Env) ([]measure.Group, error) {
	var groups []measure.Group
	for _, dev := range env.Devices {
		r := &callFixture{resources: resources{dev: dev}}
		g := measure.Group{Name: fmt.Sprintf("GPU %d", dev.Ordinal()), Footprint: measure.Footprint{Pinned: pageBytes, Pageable: pageBytes, Device: 2 * pageBytes},
			Open: r.open, Close: r.close}
		for _, c := range r.calls() {
			times := callsASample
			if c.slow {
				times = slowCalls
			}
			labels := append(labelled(callLabel, c.name), labelsOf(dev)...)
			timed := measure.Case{
				Series: result.Series{Name: seriesCallTime, Labels: labels, Unit: result.Seconds, Better: result.Lower},
				WarmUp: 2, Budget: callBudget, Samples: 50,
				Sample: func(ctx context.Context) (float64, error) { return r.timeOf(ctx, c, times) },
			}
			if c.writes != "" {
				timed.Sample = after(func(ctx context.Context) error { return r.prepare(ctx, c) }, timed.Sample)
				timed.Verify = func(ctx context.Context) error { return r.verify(ctx, c) }
			}
			if env.Quick {
				timed.Budget = quickCalls
			}
			allocations := measure.Case{
				Series: result.Series{Name: seriesCallAllocations, Labels: labels, Unit: result.Count, Better: result.Lower},
				WarmUp: 1, Budget: time.Millisecond, Samples: allocationRun, MinSamples: allocationRun,
				Sample: func(ctx context.Context) (float64, error) { return r.allocationsOf(ctx, c, times) },
			}
			g.Cases = append(g.Cases, timed, allocations)
		}
		groups = append(groups, g)
	}
	return groups, nil
}

// onHost returns the pinned memory that calls copy.
func (r *callFixture) onHost() []byte { return unsafe.Slice((*byte)(r.host), callBytes) }

// prepare writes the pattern to where a call copies from, and other bytes to where it writes.
func (r *callFixture) prepare(ctx context.Context, c call) error {
	write := func() error { return r.stream.Memset(r.device, poison, callBytes) }
	if c.writes == result.DeviceToHost {
		write = func() error { return r.stream.CopyToDevice(r.device, r.host, callBytes) }
		defer func() { clear(r.onHost()) }()
	}
	return inTurn(func() error { return uploaded.fill(ctx, r.onHost()) }, write, func() error { return r.stream.Synchronize(ctx) })
}

// verify compares what a call wrote last.
func (r *callFixture) verify(ctx context.Context, c call) error {
	if c.writes == result.DeviceToHost {
		return uploaded.compare(ctx, r.onHost(), 0)
	}
	got := make([]byte, callBytes)
	if err := r.dev.CopyToHost(unsafe.Pointer(&got[0]), r.device, callBytes); err != nil {
		return err
	}
	if c.writes == onDevice {
		return firstDifference(got, make([]byte, callBytes), 0)
	}
	return uploaded.compare(ctx, got, 0)
}

// timeOf returns the seconds that a call takes. What it queued is waited for afterwards.
func (r *callFixture) timeOf(ctx context.Context, c call, times int) (float64, error) {
	began := time.Now()
	if err := repeat(ctx, c, times); err != nil {
		return 0, err
	}
	took := time.Since(began)
	return took.Seconds() / float64(times), r.stream.Synchronize(ctx)
}

// allocationsOf returns how often a call allocates of the Go heap. What other goroutines
// allocate meanwhile counts too, so that a series may have samples that are too high.
func (r *callFixture) allocationsOf(ctx context.Context, c call, times int) (float64, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := repeat(ctx, c, times); err != nil {
		return 0, err
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(times), r.stream.Synchronize(ctx)
}

func repeat(ctx context.Context, c call, times int) error {
	if err := bounded.Ended(ctx); err != nil {
		return err
	}
	for range times {
		if err := c.do(); err != nil {
			return err
		}
	}
	return nil
}

func explainCalls(env measure.Env, b *result.Bench) ([]string, []result.Table) {
	queueing := func(a *answers) *result.Series { return a.largest(seriesCallTime, callLabel, copyCall) }
	return explained(b, queueing, func(a *answers) {
		all := a.all(seriesCallTime)
		slices.SortStableFunc(all, func(x, y *result.Series) int { return cmp.Compare(x.Median, y.Median) })
		if len(all) > 1 {
			fastest, slowest := all[0], all[len(all)-1]
			a.say("A call takes from %s (%s) to %s (%s).", units.Seconds(fastest.Median), fastest.Labels.Get(callLabel), units.Seconds(slowest.Median), slowest.Labels.Get(callLabel))
		}
	}, func(a *answers) {
		if s := queueing(a); s != nil && s.Median > 0 {
			t := result.Table{Title: "queueing a copy", Columns: []string{"time", "on one thread"}}
			t.Add("", "", s.Quantity(), &result.Quantity{Value: 1 / s.Median, Unit: result.PerSecond})
			a.table(t)
		}
		if !isSimulated(env) { // whose allocations are its own
			a.allocations()
		}
	})
}

// allocations says which calls allocate Go memory.
func (a *answers) allocations() {
	all := a.all(seriesCallAllocations)
	var allocate []string
	for _, s := range all {
		if s.Min >= 0.5 { // the sample that others disturbed least
			allocate = append(allocate, fmt.Sprintf("%s (%.0f)", s.Labels.Get(callLabel), s.Min))
		}
	}
	switch {
	case len(allocate) > 0:
		a.say("These calls allocate Go memory, so many times each: %s.", strings.Join(allocate, "; "))
	case len(all) > 0:
		a.say("No call allocates Go memory.")
	}
}
