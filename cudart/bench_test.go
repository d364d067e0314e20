package cudart_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A namedCall is a call to be measured.
type namedCall struct {
	name string
	call func() error
}

// measuredCalls returns calls on a stream of the device, and what ends the work of any of them.
// The kernel's is among them unless the device is a simulated one.
func measuredCalls(b *testing.B, dev *cudart.Device) (calls []namedCall, end func()) {
	s := stream(b, dev)
	e := event(b, dev)
	host, mem := pointer(pinned(b, dev, 4096)), device(b, dev, 4096)
	ctx := context.Background()
	end = func() { require.NoError(b, s.Synchronize(ctx)) }
	require.NoError(b, s.CopyToDevice(mem, host, 64))
	require.NoError(b, s.Record(e))
	end()
	calls = []namedCall{
		{"copy64_issue", func() error { return s.CopyToDevice(mem, host, 64) }},
		{"copy64_sync", func() error {
			if err := s.CopyToDevice(mem, host, 64); err != nil {
				return err
			}
			return s.Synchronize(ctx)
		}},
		{"event_record", func() error { return s.Record(e) }},
		{"event_query", func() error { _, err := raw.QueryEvent(e); return err }},
		{"event_record_query", func() error {
			if err := s.Record(e); err != nil {
				return err
			}
			_, err := raw.QueryEvent(e)
			return err
		}},
		{"copy64_record_query", func() error {
			if err := s.CopyToDevice(mem, host, 64); err != nil {
				return err
			}
			if err := s.Record(e); err != nil {
				return err
			}
			_, err := raw.QueryEvent(e)
			return err
		}},
		{"stream_query", func() error { _, err := s.Query(); return err }},
		{"stream_wait_event", func() error { return raw.WaitEvent(s, e) }},
	}
	if m, err := raw.Load(dev, []byte(emptyKernel)); err == nil {
		b.Cleanup(func() { require.NoError(b, m.Unload()) })
		fn, err := m.Function("empty")
		require.NoError(b, err)
		one := raw.Config{Grid: [3]int{1}, Block: [3]int{1}}
		calls = append(calls, namedCall{"launch", func() error { return fn.Launch(s, one, fn.Args()) }})
	} else {
		require.ErrorIs(b, err, errors.ErrUnsupported)
	}
	return calls, end
}

// emptyKernel is PTX that every GPU since 2014 can run.
const emptyKernel = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty() { ret; }\n"

func measure(b *testing.B, name string, call func() error, end func()) {
	b.Run(name, func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := call(); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		end()
	})
}

// testdata/baseline has the same loops in C, under the same names: these in
// calls.c, those below in transfer.c.
func BenchmarkCalls(b *testing.B) {
	calls, end := measuredCalls(b, testgpu.Device(b))
	for _, c := range calls {
		measure(b, c.name, c.call, end)
	}
}

// BenchmarkAPIs is BenchmarkCalls by libcudart and by libcuda, in turn, and Open, which makes no
// context and after the first time finds the driver initialized.
func BenchmarkAPIs(b *testing.B) {
	apis := []cudart.API{cudart.RuntimeAPI, cudart.DriverAPI}
	var calls [2][]namedCall
	var ends [2]func()
	for i, api := range apis {
		dev := testgpu.DeviceWith(b, cudasim.Config{API: api})
		calls[i], ends[i] = measuredCalls(b, dev)
		o := cudart.Options{API: api}
		if !testgpu.Real() {
			sim, err := cudasim.New(cudasim.Config{API: api})
			require.NoError(b, err)
			defer func() { require.NoError(b, sim.Close()) }()
			o.Source = sim
		}
		calls[i] = append(calls[i], namedCall{"open", func() error {
			rt, err := cudart.Open(context.Background(), o)
			if err != nil {
				return err
			}
			return rt.Close()
		}})
	}
	for k := range calls[0] {
		for i, api := range apis {
			name, _, _ := strings.Cut(api.String(), " ")
			measure(b, calls[i][k].name+"/"+name, calls[i][k].call, ends[i])
		}
	}
}

// BenchmarkScattered is many small copies from scattered places to scattered
// places, until the last is done.
func BenchmarkScattered(b *testing.B) {
	const copies, size = 10_000, 4096
	dev := testgpu.Device(b)
	ctx := context.Background()
	const room = 2 * copies * size // so that no two are neighbours for long
	host, mem := pinned(b, dev, room), device(b, dev, room)
	random := rand.New(rand.NewPCG(1, 2))
	from, to := random.Perm(2 * copies)[:copies], random.Perm(2 * copies)[:copies]
	src := func(i int) unsafe.Pointer { return unsafe.Pointer(&host[from[i]*size]) }
	dst := func(i int) cudart.DevPtr { return mem + cudart.DevPtr(to[i]*size) }

	// run shares the copies among as many goroutines as streams.
	run := func(kind string, streams int, queue func(s *cudart.Stream, batch *cudart.CopyBatch, first, end int) error) {
		b.Run(fmt.Sprintf("%s/streams=%d", kind, streams), func(b *testing.B) {
			all, batches := make([]*cudart.Stream, streams), make([]cudart.CopyBatch, streams)
			for i := range all {
				all[i] = stream(b, dev)
			}
			round := func() {
				var wg sync.WaitGroup
				for g, s := range all {
					wg.Go(func() {
						err := queue(s, &batches[g], g*copies/streams, (g+1)*copies/streams)
						if err == nil {
							err = s.Synchronize(ctx)
						}
						if err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
			}
			round()
			b.ReportAllocs()
			for b.Loop() {
				round()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/copies, "ns/copy")
		})
	}
	single := func(s *cudart.Stream, _ *cudart.CopyBatch, first, end int) error {
		for i := first; i < end; i++ {
			if err := s.CopyToDevice(dst(i), src(i), size); err != nil {
				return err
			}
		}
		return nil
	}
	batched := func(most int) func(*cudart.Stream, *cudart.CopyBatch, int, int) error {
		return func(s *cudart.Stream, batch *cudart.CopyBatch, first, end int) error {
			for first < end {
				batch.Reset()
				for ; first < end && batch.Len() < most; first++ {
					batch.ToDevice(dst(first), src(first), size)
				}
				if err := s.CopyBatch(batch); err != nil {
					return err
				}
			}
			return nil
		}
	}
	run("single", 1, single)
	run("single", 4, single)
	if !dev.Runtime().Library().CopyBatch {
		b.Logf("no batches: %v is older than 12.8", dev.Runtime().Library().Path)
		return
	}
	run("batch=10000", 1, batched(copies))
	run("batch=1000", 1, batched(1000))
	run("batch=5000", 2, batched(copies/2))
	run("batch=1000", 4, batched(1000))
	run("batch=2500", 4, batched(copies/4))
}
