// Package hostmemtest is for the tests of hostmem and its pool: devices and streams to
// test with, this host's system calls with counts and faults, and a sweep that makes
// every call of an operation fail.
package hostmemtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A Fixture is a device and a stream to test with.
type Fixture struct {
	testing.TB
	Sim    *cudasim.Sim // nil for a real GPU
	Dev    *cudart.Device
	Stream *cudart.Stream
}

// New has the GPU that PINNED_TEST_GPU requests, NewSim always a simulated one.
func New(tb testing.TB) *Fixture {
	tb.Helper()
	if !testgpu.Real() {
		return NewSim(tb, cudasim.Config{})
	}
	return (&Fixture{TB: tb}).On(testgpu.Device(tb))
}

// NewSim has a simulated GPU.
func NewSim(tb testing.TB, cfg cudasim.Config) *Fixture {
	tb.Helper()
	sim, rt := testgpu.Sim(tb, cfg)
	dev, err := rt.Device(0)
	require.NoError(tb, err)
	return (&Fixture{TB: tb, Sim: sim}).On(dev)
}

// Loose has a simulated GPU without checks at the end: for tests after which memory stays
// registered, such as tests that lose the device.
func Loose(tb testing.TB, cfg cudasim.Config) *Fixture {
	tb.Helper()
	sim, err := cudasim.New(testgpu.Config(cfg))
	require.NoError(tb, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(tb, err)
	dev, err := rt.Device(0)
	require.NoError(tb, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		_ = s.Close()
		_ = rt.Close()
		_ = sim.Close() // an error of what stays
	})
	return &Fixture{TB: tb, Sim: sim, Dev: dev, Stream: s}
}

// On is a fixture with another device and a stream of its own.
func (g *Fixture) On(dev *cudart.Device) *Fixture {
	g.Helper()
	other := &Fixture{TB: g.TB, Sim: g.Sim, Dev: dev}
	other.Stream = other.NewStream()
	return other
}

// NewStream makes a stream that is closed at the end.
func (g *Fixture) NewStream() *cudart.Stream {
	g.Helper()
	s, err := g.Dev.NewStream(cudart.StreamOptions{})
	require.NoError(g, err)
	g.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_ = s.Synchronize(ctx) // else its end is recorded, and pending
		assert.NoError(g, s.Close())
	})
	return s
}

// Device makes device memory that is freed at the end.
func (g *Fixture) Device(n int) cudart.DevPtr {
	g.Helper()
	p, err := g.Dev.Malloc(n)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, g.Dev.Free(p)) })
	return p
}

// Download reads device memory by other means than a buffer's.
func (g *Fixture) Download(p cudart.DevPtr, n int) []byte {
	g.Helper()
	mem := make([]byte, n)
	require.NoError(g, g.Dev.CopyToHost(unsafe.Pointer(unsafe.SliceData(mem)), p, n))
	return mem
}

// Upload writes device memory by other means than a buffer's.
func (g *Fixture) Upload(p cudart.DevPtr, mem []byte) {
	g.Helper()
	require.NoError(g, g.Dev.CopyToDevice(p, unsafe.Pointer(unsafe.SliceData(mem)), len(mem)))
	require.NoError(g, g.Dev.Synchronize(context.Background())) // it returns before they are there
}

// Synchronize waits for the fixture's stream.
func (g *Fixture) Synchronize() {
	g.Helper()
	require.NoError(g, g.Stream.Synchronize(context.Background()))
}

// Hold stops the simulated GPU, at the latest until the end of the test.
func (g *Fixture) Hold() {
	g.Sim.Hold()
	g.Cleanup(g.Sim.Release)
}

// Stall makes a stream wait until the returned function is called, at the latest
// until the end of the test.
func (g *Fixture) Stall(s *cudart.Stream) (open func()) {
	g.Helper()
	blocked := make(chan struct{})
	opened := false
	open = func() {
		if !opened {
			opened = true
			close(blocked)
		}
	}
	require.NoError(g, s.LaunchHostFunc(func() { <-blocked }))
	g.Cleanup(open)
	return open
}

// AwaitBlocked waits until n calls of a C function, "" for any, are blocked.
func (g *Fixture) AwaitBlocked(fn string, n int) {
	g.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(g, g.Sim.AwaitBlocked(ctx, fn, n))
}

// Registrations returns the number of registrations, on a simulated GPU.
func (g *Fixture) Registrations() int { return g.Sim.Outstanding().Registrations }

// Copies returns the number of copies that were queued, on a simulated GPU.
func (g *Fixture) Copies() int {
	if g.Sim == nil {
		return 0
	}
	return g.Sim.Calls("cudaMemcpyAsync")
}

// Fill writes bytes that no other seed and no other offset has.
func Fill(mem []byte, seed byte) {
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(mem) // it cannot fail
}

// Filled returns what Fill writes.
func Filled(n int, seed byte) []byte {
	mem := make([]byte, n)
	Fill(mem, seed)
	return mem
}

// Ended returns a context that has ended.
func Ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// Soak reports whether sweeps run in full, and tests for [SoakTime].
func Soak() bool { return os.Getenv("PINNED_SOAK") != "" }

// SoakTime returns the time for which a test runs that has no end.
func SoakTime(byDefault time.Duration) time.Duration {
	if d, err := time.ParseDuration(os.Getenv("PINNED_SOAK")); err == nil {
		return d
	}
	return byDefault
}

// OneOf returns the values of a dimension of a sweep for its i-th cell: one in turn, or
// all of them if Soak.
func OneOf[T any](all []T, i int) []T {
	if Soak() {
		return all
	}
	return all[i%len(all):][:1]
}

// ZeroArguments calls each method of a value with zero arguments. None may panic, and those
// that return an error return one, but for methods that are named.
func ZeroArguments(tb testing.TB, value any, succeed ...string) {
	tb.Helper()
	v := reflect.ValueOf(value)
	for i := range v.NumMethod() {
		name, method := v.Type().Method(i).Name, v.Method(i)
		var args []reflect.Value
		for j := range method.Type().NumIn() {
			if !method.Type().IsVariadic() || j < method.Type().NumIn()-1 {
				args = append(args, reflect.Zero(method.Type().In(j)))
			}
		}
		assert.NotPanics(tb, func() {
			for _, result := range method.Call(args) {
				if result.Type() == reflect.TypeFor[error]() {
					assert.Equal(tb, slices.Contains(succeed, name), result.IsNil(), "%T.%s: %v", value, name, result)
				}
			}
		}, "%T.%s", value, name)
	}
}

// Eventually polls until a condition holds that another goroutine brings about.
func Eventually(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			require.FailNow(tb, "did not happen", what)
		}
	}
}

// ResidentBytes returns VmRSS, which includes pinned pages.
func ResidentBytes(tb testing.TB) int {
	tb.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(tb, err)
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	var kib int
	_, err = fmt.Sscan(rest, &kib)
	require.NoError(tb, err)
	return kib << 10
}
