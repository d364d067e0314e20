package managed

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

func benchRig(b *testing.B) (*cudart.Device, *Allocator) {
	dev := testgpu.Device(b)
	a, err := New(b.Context(), dev, Options{AllowExclusive: true})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, a.Close()) })
	return dev, a
}

// Alloc and Close beside the two calls of CUDA that they make, one after the other: the
// difference is what counting takes.
func BenchmarkAlloc(b *testing.B) {
	dev, a := benchRig(b)
	b.Run("managed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			m, err := a.Alloc(b.Context(), 1<<20, AllocOptions{})
			if err == nil {
				err = m.Close()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cudaMallocManaged", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p, err := dev.MallocManaged(1 << 20)
			if err == nil {
				err = dev.Free(cudart.DevPtr(uintptr(p)))
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}

// benchBytes is how much memory the benchmarks move: 8 GiB on a real card with room for
// it, little on a simulated one.
func benchBytes(b *testing.B, dev *cudart.Device) int {
	if !testgpu.Real() {
		return 64 << 20
	}
	free, _, err := dev.MemInfo()
	require.NoError(b, err)
	return min(8<<30, free/4) &^ (1<<30 - 1)
}

func touch(m *Memory) {
	var wg sync.WaitGroup
	b := m.Bytes()
	part := (len(b) + 7) / 8
	for i := range 8 {
		wg.Go(func() {
			for at := i * part; at < min((i+1)*part, len(b)); at += 4096 {
				b[at] = 1
			}
		})
	}
	wg.Wait()
}

// Prefetches of memory that the CPU has touched, to the device and back: all at once on one
// stream, and in parts by several goroutines with a stream each.
func BenchmarkPrefetch(b *testing.B) {
	dev, a := benchRig(b)
	n := benchBytes(b, dev) / 2
	m, err := a.Alloc(b.Context(), n, AllocOptions{})
	require.NoError(b, err)
	touch(m)
	b.Run("Move", func(b *testing.B) {
		var in, out time.Duration
		for b.Loop() {
			began := time.Now()
			require.NoError(b, a.Move(context.Background(), dev.Location(), m.Whole()))
			in += time.Since(began)
			began = time.Now()
			require.NoError(b, a.Move(context.Background(), cudart.HostLocation(), m.Whole()))
			out += time.Since(began)
		}
		b.ReportMetric(float64(n)*float64(b.N)/in.Seconds()/1e9, "to-device-GB/s")
		b.ReportMetric(float64(n)*float64(b.N)/out.Seconds()/1e9, "to-host-GB/s")
	})
	for _, parallel := range []int{1, 2, 4, 8} {
		for _, part := range []int{n, 256 << 20, 32 << 20} {
			if part > n || parallel > 1 && part == n {
				continue
			}
			b.Run(fmt.Sprintf("goroutines=%d/MiB=%d", parallel, part>>20), func(b *testing.B) {
				var in, out time.Duration
				for b.Loop() {
					for _, way := range []struct {
						to   cudart.Location
						took *time.Duration
					}{{dev.Location(), &in}, {cudart.HostLocation(), &out}} {
						began := time.Now()
						var next atomic.Int64
						var wg sync.WaitGroup
						for range parallel {
							wg.Go(func() {
								s, err := dev.NewStream(cudart.StreamOptions{})
								if err != nil {
									b.Error(err)
									return
								}
								for at := int(next.Add(int64(part))) - part; at < n && err == nil; at = int(next.Add(int64(part))) - part {
									if err = m.Range(at, min(part, n-at)).Prefetch(b.Context(), s, way.to); err == nil {
										err = s.SynchronizeBlocking()
									}
								}
								if err = errors.Join(err, s.Close()); err != nil {
									b.Error(err)
								}
							})
						}
						wg.Wait()
						*way.took += time.Since(began)
					}
				}
				b.ReportMetric(float64(n)*float64(b.N)/in.Seconds()/1e9, "to-device-GB/s")
				b.ReportMetric(float64(n)*float64(b.N)/out.Seconds()/1e9, "to-host-GB/s")
			})
		}
	}
	require.NoError(b, m.Close())
}

// A sequential pass over eight times a budget. The work reads each chunk once, and writes
// it once where the name says so. "explicit" copies the same bytes from pinned memory to
// two buffers on the device in turn, and back where they are written: what a program does by
// hand. "faults" has no plan: the work itself brings each chunk, and a prefetch takes it away.
// "in-place" has none either: the memory stays on the host, and the work goes over the link;
// "plan/in-place" is the same as uses of a plan, with its advice, and "in-place,copy" writes by copies
// from the device.
func BenchmarkPlanSequential(b *testing.B) {
	dev, a := benchRig(b)
	ctx := context.Background()
	n := benchBytes(b, dev)
	budget := n / 8
	m, err := a.Alloc(b.Context(), n, AllocOptions{})
	require.NoError(b, err)
	touch(m)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(b, err)
	require.NoError(b, m.Whole().Prefetch(b.Context(), s, cudart.HostLocation()))
	require.NoError(b, s.Synchronize(ctx))
	const largest = 64 << 20
	sink, err := dev.Malloc(2 * largest)
	require.NoError(b, err)
	work := func(at cudart.DevPtr, n int, write bool) error {
		if write {
			return s.Memset(at, 1, n)
		}
		return s.CopyOnDevice(sink, at, n)
	}
	rate := func(b *testing.B) {
		b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
	}
	for _, write := range []bool{false, true} {
		name := map[bool]string{false: "read", true: "write"}[write]
		for _, c := range []PlanOptions{
			{Chunk: 8 << 20, In: 2, Out: 4}, {Chunk: 32 << 20, In: 1, Out: 1}, {Chunk: 32 << 20, In: 2, Out: 2}, {Chunk: 32 << 20, In: 2, Out: 4},
			{Chunk: 32 << 20, In: 4, Out: 8}, {Chunk: 64 << 20, In: 2, Out: 4}, {Chunk: 64 << 20, In: 4, Out: 4},
		} {
			c.Budget = budget
			if c.Chunk*4 > budget {
				c.Chunk = 2 << 20
			}
			b.Run(fmt.Sprintf("%s/plan/MiB=%d,in=%d,out=%d", name, c.Chunk>>20, c.In, c.Out), func(b *testing.B) {
				var steps []Step
				for off := 0; off < n; off += c.Chunk {
					r := m.Range(off, min(c.Chunk, n-off))
					if write {
						steps = append(steps, Step{r.As(ReadWrite)})
					} else {
						steps = append(steps, Step{r.As(ReadOnly)})
					}
				}
				p, err := a.NewPlan(steps, c)
				require.NoError(b, err)
				for b.Loop() {
					err := p.Run(ctx, s, func(i int) error {
						off := i * c.Chunk
						return work(m.ptr()+cudart.DevPtr(off), min(c.Chunk, n-off), write)
					})
					if err != nil {
						b.Fatal(err)
					}
				}
				rate(b)
			})
		}
		chunk := min(largest/2, budget/4)
		b.Run(name+"/plan/in-place", func(b *testing.B) {
			var steps []Step
			for off := 0; off < n; off += chunk {
				steps = append(steps, Step{m.Range(off, min(chunk, n-off)).As(InPlace)})
			}
			p, err := a.NewPlan(steps, PlanOptions{Budget: budget})
			require.NoError(b, err)
			run := func() {
				err := p.Run(ctx, s, func(i int) error {
					off := i * chunk
					return work(m.ptr()+cudart.DevPtr(off), min(chunk, n-off), write)
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			run() // the first one moves the memory to the host
			for b.Loop() {
				run()
			}
			rate(b)
			for _, a := range []advice{{cudart.AdviseUnsetPreferredLocation, cudart.HostLocation()}, {cudart.AdviseUnsetAccessedBy, dev.Location()}} {
				require.NoError(b, m.Whole().Advise(b.Context(), a.what, a.at))
			}
		})
		b.Run(name+"/faults", func(b *testing.B) {
			for b.Loop() {
				for off := 0; off < n; off += chunk {
					at, size := m.ptr()+cudart.DevPtr(off), min(chunk, n-off)
					err := work(at, size, write)
					if err == nil {
						err = s.Prefetch(at, size, cudart.HostLocation())
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				require.NoError(b, s.Synchronize(ctx))
			}
			rate(b)
		})
		methods := map[string]func(at cudart.DevPtr, n int) error{"in-place": func(at cudart.DevPtr, n int) error { return work(at, n, write) }}
		if write {
			methods["in-place,copy"] = func(at cudart.DevPtr, n int) error { return s.CopyOnDevice(at, sink, n) }
		}
		for method, do := range methods {
			b.Run(name+"/"+method, func(b *testing.B) {
				stay := []advice{{cudart.AdvisePreferredLocation, cudart.HostLocation()}, {cudart.AdviseAccessedBy, dev.Location()}}
				for _, a := range stay {
					require.NoError(b, m.Whole().Advise(b.Context(), a.what, a.at))
				}
				for b.Loop() {
					for off := 0; off < n; off += chunk {
						require.NoError(b, do(m.ptr()+cudart.DevPtr(off), min(chunk, n-off)))
					}
					require.NoError(b, s.Synchronize(ctx))
				}
				rate(b)
				for _, a := range stay {
					require.NoError(b, m.Whole().Advise(b.Context(), a.unset().what, a.at))
				}
			})
		}
	}
	require.NoError(b, m.Close())
	host, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{})
	require.NoError(b, err)
	var streams [2]*cudart.Stream
	for i := range streams {
		streams[i], err = dev.NewStream(cudart.StreamOptions{})
		require.NoError(b, err)
	}
	chunk := min(largest/2, budget/4)
	for _, write := range []bool{false, true} {
		b.Run(map[bool]string{false: "read", true: "write"}[write]+"/explicit", func(b *testing.B) {
			for b.Loop() {
				for i := 0; i*chunk < n; i++ {
					off, size, s := i*chunk, min(chunk, n-i*chunk), streams[i%2]
					at := sink + cudart.DevPtr(i%2*largest)
					err := host.CopyToDevice(s, at, off, size)
					if err == nil && write {
						if err = s.Memset(at, 1, size); err == nil {
							err = host.CopyFromDevice(s, at, off, size)
						}
					} else if err == nil {
						err = s.CopyOnDevice(at+cudart.DevPtr(chunk), at, size)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				for _, s := range streams {
					require.NoError(b, s.Synchronize(ctx))
				}
			}
			rate(b)
		})
	}
	for _, s := range streams {
		require.NoError(b, s.Close())
	}
	require.NoError(b, host.Close())
	require.NoError(b, s.Close())
	require.NoError(b, dev.Free(sink))
}

// What Alloc and Close do beside the two calls of CUDA.
func BenchmarkCounting(b *testing.B) {
	_, a := benchRig(b)
	m, err := a.Alloc(b.Context(), 1<<20, AllocOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		a.life.Begin()
		if _, err := a.mem.admit(b.Context(), 1<<20, 0, false); err != nil {
			b.Fatal(err)
		}
		one := &Memory{a: a, p: m.p, n: 1 << 20, label: m.label}
		a.add(one)
		a.remove(one)
	}
	b.StopTimer()
	if err := m.Close(); err != nil {
		b.Fatal(err)
	}
}
