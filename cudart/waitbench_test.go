//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// BenchmarkWait compares the ways to wait for a copy: how long after the GPU was done the
// goroutine goes on (median and 90th percentile, including the cost of issuing the copy),
// and how many cores were used meanwhile. testdata/results/decisions-others.md has its figures.
func BenchmarkWait(b *testing.B) {
	dev := testgpu.Device(b)
	const maximum = 256 << 20
	s, notify := stream(b, dev), stream(b, dev)
	mem, host := device(b, dev, maximum), pointer(pinned(b, dev, maximum))
	start, end := event(b, dev), event(b, dev)
	plain := event(b, dev)
	blocking, err := dev.NewBlockingEvent()
	require.NoError(b, err)
	defer func() { require.NoError(b, blocking.Close()) }()
	ctx := context.Background()
	called := make(chan struct{}, 1)
	call := func() { called <- struct{}{} }

	for _, way := range []struct {
		name string
		wait func() error
	}{
		{"Synchronize", func() error { return s.Synchronize(ctx) }},
		{"cudaStreamSynchronize", s.SynchronizeBlocking},
		{"blocking_event", func() error {
			if err := s.Record(blocking); err != nil {
				return err
			}
			return blocking.WaitInC()
		}},
		{"host_function", func() error {
			if err := s.LaunchHostFunc(call); err != nil {
				return err
			}
			<-called
			return nil
		}},
		{"host_function_of_another_stream", func() error {
			if err := s.Record(plain); err != nil {
				return err
			}
			if err := raw.WaitEvent(notify, plain); err != nil {
				return err
			}
			if err := notify.LaunchHostFunc(call); err != nil {
				return err
			}
			<-called
			return nil
		}},
	} {
		for _, n := range []int{64, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, maximum} {
			b.Run(fmt.Sprintf("%s/%d", way.name, n), func(b *testing.B) {
				var late []float64
				cpu, begin := hostos.CPUTime(), time.Now()
				for b.Loop() {
					issued := time.Now()
					require.NoError(b, s.Record(start))
					require.NoError(b, s.CopyToDevice(mem, host, n))
					require.NoError(b, s.Record(end))
					require.NoError(b, way.wait())
					took := time.Since(issued)
					ran, err := end.Since(start)
					require.NoError(b, err)
					late = append(late, float64(took-ran)/1e3)
				}
				cores := (hostos.CPUTime() - cpu).Seconds() / time.Since(begin).Seconds()
				slices.Sort(late)
				b.ReportMetric(late[len(late)/2], "µs-late")
				b.ReportMetric(late[len(late)*9/10], "µs-late-p90")
				b.ReportMetric(cores, "cores")
			})
		}
	}
}
