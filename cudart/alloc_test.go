//go:build linux && !android && (amd64 || arm64) && !race

package cudart

import (
	"context"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/dynlib"
)

// stubRuntime is bound, instead of libcudart or libcuda, to a C function that does next to
// nothing: abs, which returns success for a first argument of 0. The rest is our own cost.
func stubRuntime(tb testing.TB, api API) (*Stream, *Event) {
	tb.Helper()
	libc, err := dynlib.Open("libc.so.6")
	require.NoError(tb, err)
	abs := libc.Symbol("abs")
	require.NotZero(tb, abs)
	rt := &Runtime{binding: newBinding(), closing: make(chan struct{})}
	for i := range rt.entry {
		rt.entry[i] = abs
	}
	// The one that takes a pointer first: a function that returns 0 for any.
	rt.entry[fnMemcpyBatch] = libc.Symbol("pthread_condattr_destroy")
	require.NotZero(tb, rt.entry[fnMemcpyBatch])
	if rt.lib.API = api; api == DriverAPI {
		for _, s := range driverSymbols {
			if s.serves(13000) {
				rt.adapt[s.fn], rt.abi[s.fn] = s.adapt, s.abi
			}
		}
		rt.contexts = make([]atomic.Uintptr, 1)
	}
	d := &Device{rt: rt}
	d.waits.init(rt)
	return &Stream{dev: d, timeline: newTimeline(d, 0)}, newEvent(d.cEventOf(0))
}

func stubCalls(tb testing.TB, s *Stream, e *Event) map[string]func() error {
	ctx := context.Background()
	host := unsafe.Pointer(new([64]byte))
	var batch CopyBatch
	return map[string]func() error{
		"copy to device": func() error { return s.CopyToDevice(0, host, 64) },
		"batch": func() error {
			batch.Reset()
			for range 100 {
				batch.ToDevice(1, host, 64)
			}
			return s.CopyBatch(&batch)
		},
		"memset":                   func() error { return s.Memset(0, 1, 64) },
		"record":                   func() error { return s.Record(e) },
		"query":                    func() error { _, err := s.Query(); return err },
		"event query":              func() error { _, err := e.c.query(); return err },
		"synchronize":              func() error { return s.Synchronize(ctx) },
		"synchronize, ctx can end": func() error { return s.Synchronize(tb.Context()) },
	}
}

func TestCallsDoNotAllocate(t *testing.T) {
	for _, api := range []API{RuntimeAPI, DriverAPI} {
		s, e := stubRuntime(t, api)
		for what, call := range stubCalls(t, s, e) {
			require.NoError(t, call(), what)
			assert.Zero(t, testing.AllocsPerRun(1000, func() { _ = call() }), "%s, %v", what, api)
		}
	}
}

// What a call costs besides the C function itself.
func BenchmarkOverhead(b *testing.B) {
	for _, api := range []API{RuntimeAPI, DriverAPI} {
		s, e := stubRuntime(b, api)
		for what, call := range stubCalls(b, s, e) {
			b.Run(what+", "+api.String(), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					_ = call()
				}
			})
		}
	}
}
