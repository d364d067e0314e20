package cudart_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline has the same loops in C, under the same names: these in
// calls.c, those below in transfer.c.
func BenchmarkCalls(b *testing.B) {
	dev := testgpu.Device(b)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, s.Close()) }()
	e, err := dev.NewEvent(cudart.EventOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, e.Close()) }()
	host, err := dev.HostAlloc(4096, cudart.HostAllocDefault)
	require.NoError(b, err)
	defer func() { require.NoError(b, dev.FreeHost(host)) }()
	mem, err := dev.Malloc(4096)
	require.NoError(b, err)
	defer func() { require.NoError(b, dev.Free(mem)) }()
	ctx := context.Background()
	require.NoError(b, s.CopyToDevice(mem, host, 64))
	require.NoError(b, s.Record(e))
	require.NoError(b, s.Synchronize(ctx))

	run := func(name string, call func() error) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := call(); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			require.NoError(b, s.Synchronize(ctx))
		})
	}
	run("copy64_issue", func() error { return s.CopyToDevice(mem, host, 64) })
	run("copy64_sync", func() error {
		if err := s.CopyToDevice(mem, host, 64); err != nil {
			return err
		}
		return s.Synchronize(ctx)
	})
	run("event_record", func() error { return s.Record(e) })
	run("event_query", func() error { _, err := e.Query(); return err })
	run("event_record_query", func() error {
		if err := s.Record(e); err != nil {
			return err
		}
		_, err := e.Query()
		return err
	})
	run("copy64_record_query", func() error {
		if err := s.CopyToDevice(mem, host, 64); err != nil {
			return err
		}
		if err := s.Record(e); err != nil {
			return err
		}
		_, err := e.Query()
		return err
	})
	run("stream_query", func() error { _, err := s.Query(); return err })
	run("stream_wait_event", func() error { return s.WaitEvent(e) })
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
	if !dev.Runtime().CanCopyBatch() {
		b.Logf("no batches: %v is older than 12.8", dev.Runtime().Library().Path)
		return
	}
	run("batch=10000", 1, batched(copies))
	run("batch=1000", 1, batched(1000))
	run("batch=5000", 2, batched(copies/2))
	run("batch=1000", 4, batched(1000))
	run("batch=2500", 4, batched(copies/4))
}
