package cudart_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline/calls.c has the same loops in C, under the same names.
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
	run("stream_query", func() error { _, err := s.Query(); return err })
	run("stream_wait_event", func() error { return s.Wait(e) })
}
