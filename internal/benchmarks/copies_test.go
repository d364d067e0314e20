//go:build linux

package benchmarks

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// BenchmarkCopies is copies of memory of the Go heap, each with a wait for its end.
func BenchmarkCopies(b *testing.B) { bench(b, "Copies") }

// BenchmarkMemcpy is the copies of BenchmarkCopies of the same name, by cudaMemcpy. Its uploads may return before the
// device has the bytes: they have a wait for its stream, as Upload waits too.
func BenchmarkMemcpy(b *testing.B) { bench(b, "Memcpy") }

var _ = func() bool {
	for _, n := range []int{1, 64, 4 * kib, 16 * kib, 32 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, mib, 4 * mib, 16 * mib, 32 * mib, 64 * mib, 256 * mib, 2 * gib} {
		both := n == mib || n == 2*gib
		quick := both || slices.Contains([]int{4 * kib, 256 * kib, 16 * mib, 64 * mib}, n)
		addCopies(row{name: "/" + sizeName(n), quick: quick, cpu: n >= 64*mib, twoCores: both, busy: both}, n, warm)
	}
	for _, n := range []int{64 * kib, 128 * kib, 256 * kib, mib, 16 * mib} {
		addCopies(row{name: "-cold/" + sizeName(n), quick: n == 256*kib}, n, cold)
	}
	return true
}()

// addCopies adds the four rows of a size.
func addCopies(r row, n int, t temperature) {
	up, down := r, r
	up.name, up.prepare = "upload"+r.name, upload(n, t)
	down.name, down.prepare = "download"+r.name, download(n, t)
	add("Copies", up, down)
	add("Memcpy", row{name: up.name, quick: r.quick, prepare: memcpyUp(n, t)}, row{name: down.name, quick: r.quick, prepare: memcpyDown(n, t)})
}

var _ = add("Copies",
	row{name: "both-ways/2GiB", cpu: true, quick: true, twoCores: true, busy: true, prepare: bothWays(2 * gib)},
	row{name: "upload-queued/4KiB", prepare: uploadQueued(4 * kib)},
	row{name: "upload-queued/1MiB", prepare: uploadQueued(mib)},
	row{name: "untouched/1GiB", prepare: downloadUntouched(gib)},
	row{name: "scattered-upload/10000x4KiB", quick: true, prepare: scattered(true)},
	row{name: "scattered-download/10000x4KiB", prepare: scattered(false)},
	row{name: "16-goroutines/1MiB", cpu: true, quick: true, busy: true, prepare: parallelUploads(1)},
)

// A temperature says whether the CPU's caches have the memory that is copied.
type temperature bool

const (
	warm temperature = false // one of eight places in turn, so that they have small ones
	cold temperature = true  // the whole source in turn, so that they have none
)

// offsets returns a function that returns n bytes of mem, at another offset each time. All rows go on from the same
// cold offset.
func (f *fixture) offsets(mem []byte, n int, t temperature) func() []byte {
	at, step := &f.coldOffset, max(n, 4096)
	if t == warm {
		at, step = new(int), max((len(mem)-n)/8/4096*4096, 1)
	}
	return func() []byte {
		if *at += step; *at+n > len(mem) {
			*at = 0
		}
		return mem[*at : *at+n]
	}
}

func upload(n int, t temperature) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, dst, c := f.memoryAndCopier()
		next := f.offsets(f.source(), n, t)
		src := next()
		return task{bytes: n, op: func() error { src = next(); return c.Upload(ctx, dst, src) },
			verify: uploaded(dev, dst, n, func() []byte { return src })}
	}
}

func download(n int, t temperature) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, src, c := f.memoryAndCopier()
		next := f.offsets(f.target(), n, t)
		dst := next()
		return task{bytes: n, op: func() error { dst = next(); return c.Download(ctx, dst, src) },
			verify: f.downloaded(dev, src, n, func() ([]byte, error) { return dst, nil })}
	}
}

func memcpyUp(n int, t temperature) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, dst := f.memory(0, 0)
		legacy := must(dev.StreamFromHandle(0))(f) // cudaMemcpy's
		f.later(legacy.Close)
		next := f.offsets(f.source(), n, t)
		src := next()
		op := func() error {
			src = next()
			return errors.Join(dev.CopyToDevice(dst, pointer(src), n), legacy.SynchronizeBlocking())
		}
		return task{bytes: n, op: op, verify: uploaded(dev, dst, n, func() []byte { return src })}
	}
}

func memcpyDown(n int, t temperature) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, src := f.memory(0, 0)
		next := f.offsets(f.target(), n, t)
		dst := next()
		return task{bytes: n, op: func() error { dst = next(); return dev.CopyToHost(pointer(dst), src, n) },
			verify: f.downloaded(dev, src, n, func() ([]byte, error) { return dst, nil })}
	}
}

// bothWays is an upload and a download at once.
func bothWays(n int) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, there, c := f.memoryAndCopier()
		_, from := f.memory(0, 1)
		src, dst := f.source()[:n], f.target()[:n]
		op := func() error {
			return together(func() error { return c.Upload(ctx, there, src) }, func() error { return c.Download(ctx, dst, from) })
		}
		back := f.downloaded(dev, from, n, func() ([]byte, error) { return dst, nil })
		return task{bytes: 2 * n, op: op, verify: func(op func() error) error {
			return uploaded(dev, there, n, func() []byte { return src })(func() error { return back(op) })
		}}
	}
}

// uploadQueued is 64 uploads on a caller's stream, which return when their source may be changed, and a
// wait for the last.
func uploadQueued(n int) func(*fixture) task {
	return func(f *fixture) task {
		const count = 64
		n := min(n, f.size(gib)/count)
		dev, dst, c := f.memoryAndCopier()
		s := f.stream(dev)
		queued, src := c.With(transfer.Call{Stream: s}), f.source()[:count*n]
		op := func() error {
			for i := range count {
				if err := queued.Upload(ctx, dst+cudart.DevPtr(i*n), src[i*n:][:n]); err != nil {
					return err
				}
			}
			return s.Synchronize(ctx)
		}
		return task{bytes: count * n, count: count, op: op, verify: uploaded(dev, dst, count*n, func() []byte { return src })}
	}
}

// downloadUntouched is a download into memory that has no pages yet, as a large new Go slice has none.
func downloadUntouched(n int) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, src, c := f.memoryAndCopier()
		var mem []byte
		before := func() (err error) { mem, err = mapped(n); return err }
		after := func() error { return unmap(mem) }
		verify := f.downloaded(dev, src, n, func() ([]byte, error) { return mem, nil })
		return task{bytes: n, before: before, op: func() error { return c.Download(ctx, mem, src) }, after: after,
			verify: func(op func() error) error {
				if err := before(); err != nil {
					return err
				}
				return errors.Join(verify(op), after())
			}}
	}
}

// scattered is 10,000 parts of 4 KiB, scattered on both sides.
func scattered(up bool) func(*fixture) task {
	return func(f *fixture) task {
		const n = 4 * kib
		count := min(10_000, f.size(gib)/n/2)
		dev, mem, c := f.memoryAndCopier()
		host, all := f.source()[:2*count*n], c.UploadAll
		if !up {
			host, all = f.target()[:2*count*n], c.DownloadAll
		}
		// Each part is one of two neighbours, so that none follows on another one.
		hosts, devices := rand.New(rand.NewPCG(1, 2)).Perm(count), rand.New(rand.NewPCG(3, 4)).Perm(count)
		parts := make([]transfer.Part, count)
		for i := range parts {
			parts[i] = transfer.Part{Device: mem + cudart.DevPtr(2*devices[i]*n), Host: host[2*hosts[i]*n:][:n]}
		}
		return task{bytes: count * n, op: func() error { return all(ctx, parts) }, verify: func(op func() error) error {
			var err error
			if up {
				err = poison(dev, mem, 2*count*n)
			} else {
				_, err = f.putPattern(dev, mem, 2*count*n)
			}
			if err == nil {
				err = op()
			}
			for i := 0; i < len(parts) && err == nil; i++ {
				err = onDevice(dev, parts[i].Device, parts[i].Host)
			}
			return err
		}}
	}
}

// parallelUploads is 16 goroutines a GPU that upload 1 MiB each, again and again: the rate of all, and how long
// the slowest of a hundred uploads took.
func parallelUploads(gpus int) func(*fixture) task {
	return func(f *fixture) task {
		const each = 16
		goroutines, n, rounds := gpus*each, min(mib, f.size(gib)/each), times(128)
		devs, mems, copiers := make([]*cudart.Device, gpus), make([]cudart.DevPtr, gpus), make([]*transfer.Copier, gpus)
		for i := range devs {
			devs[i], mems[i] = f.memory(i, 0)
			copiers[i] = f.copier(i)
		}
		host, last := f.source(), make([][]byte, goroutines)
		latencies := make([][]time.Duration, goroutines)
		var at atomic.Int64
		op := func() error {
			return onEach(goroutines, func(g int) error {
				gpu, mem := g/each, mems[g/each]+cudart.DevPtr(g%each*n)
				for range rounds {
					src := host[int(at.Add(1))*n%(len(host)-n+1):][:n]
					began := time.Now()
					if err := copiers[gpu].Upload(ctx, mem, src); err != nil {
						return err
					}
					latencies[g], last[g] = append(latencies[g], since(began)), src
				}
				return nil
			})
		}
		return task{bytes: goroutines * rounds * n, count: goroutines * rounds, op: op,
			verify: func(op func() error) error {
				err := onEach(gpus, func(i int) error { return poison(devs[i], mems[i], each*n) })
				if err == nil {
					err = op()
				}
				if err != nil {
					return err
				}
				clear(latencies)
				return onEach(goroutines, func(g int) error {
					if last[g] == nil {
						return errors.New("no upload")
					}
					return onDevice(devs[g/each], mems[g/each]+cudart.DevPtr(g%each*n), last[g])
				})
			},
			report: func(b *testing.B) {
				all := slices.Concat(latencies...)
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)*99/100]), "p99-ns")
			}}
	}
}
