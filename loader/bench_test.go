//go:build linux && !android && (amd64 || arm64)

package loader

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline/loader.c measures BenchmarkLoader/memory of internal/benchmarks in C, and loader.py the same with
// PyTorch's DataLoader.

const features = 1024 // float32 of a sample

// benchSamples is the size of the data set: on a real host more than caches
// hold.
func benchSamples() int {
	if testgpu.Real() {
		return 1 << 20
	}
	return 1 << 12
}

// consume runs epochs until b.N samples came, and reports the rate. The consumer's stream
// writes something over each batch if works is set.
func consume(b *testing.B, src Source, o Options, works bool) {
	dev := testgpu.Device(b)
	l := newLoaderFor(b, dev, src, o)
	s := stream(b, dev)
	epoch := func(most int) (n int) {
		for batch, err := range l.Batches(b.Context()) {
			if err == nil {
				err = batch.Use(s)
			}
			if err != nil { // require takes as long as the loader does
				b.Fatal(err)
			}
			if works {
				require.NoError(b, s.Memset(batch.Field(0), 0, 4))
			}
			if n += batch.Len(); n >= most {
				break
			}
		}
		return n
	}
	epoch(src.Len() / 4) // warm up
	before, copies := l.Stats(), l.driver.copies
	b.ReportAllocs()
	b.ResetTimer()
	cpu := hostos.CPUTime()
	for n := 0; n < b.N; {
		n += epoch(b.N - n)
	}
	require.NoError(b, s.Synchronize(b.Context()))
	b.StopTimer()
	st := l.Stats()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "samples/s")
	b.ReportMetric(float64(st.Batches-before.Batches)/float64(l.driver.copies-copies), "batches/copy")
	cpu = hostos.CPUTime() - cpu
	b.ReportMetric(cpu.Seconds()/float64(st.Bytes-before.Bytes)*1e9, "cpu-s/GB")
	b.ReportMetric(float64(cpu.Nanoseconds())/float64(st.Batches-before.Batches), "cpu-ns/batch")
	b.Logf("N %d: bottleneck %s; reading %v, transforming %v, turns %v, slots %v, copying %v after %v for the consumer, waits %v, consuming %v", b.N, st.Bottleneck(),
		st.Reading-before.Reading, st.Transforming-before.Transforming, st.TransformWaits-before.TransformWaits, st.SlotWaits-before.SlotWaits,
		st.Copying-before.Copying, st.CopyWaits-before.CopyWaits, st.BatchWaits-before.BatchWaits, st.Consuming-before.Consuming)
}

func floats(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// data is a data set in memory.
func data(n int) []float32 {
	all := make([]float32, n*features)
	for i := range all {
		all[i] = float32(i%1000) / 1000
	}
	return all
}

// BenchmarkLoader is samples in memory, in random order and in order: of a
// [BatchSource], and read one at a time; used is with work of the consumer's stream on each
// batch, which C has none of.
func BenchmarkLoader(b *testing.B) {
	n := benchSamples()
	all := data(n)
	together, err := InMemory([]int{4 * features}, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(all))), 4*len(all)))
	require.NoError(b, err)
	single := Func(n, together.Fields(), func(_ context.Context, i int, sample [][]byte) error {
		copy(floats(sample[0]), all[i*features:])
		return nil
	})
	for _, c := range []struct {
		name    string
		src     Source
		batch   int
		shuffle bool
		works   bool
	}{
		{"shuffled/batch=16", together, 16, true, false},
		{"shuffled/batch=256", together, 256, true, false},
		{"shuffled/batch=512", together, 512, true, false},
		{"shuffled/batch=1024", together, 1024, true, false},
		{"shuffled/batch=2048", together, 2048, true, false},
		{"shuffled/batch=4096", together, 4096, true, false},
		{"ordered/batch=16", together, 16, false, false},
		{"ordered/batch=256", together, 256, false, false},
		{"ordered/batch=4096", together, 4096, false, false},
		{"shuffled/batch=16/used", together, 16, true, true},
		{"shuffled/batch=256/one-at-a-time", single, 256, true, false},
	} {
		b.Run(c.name, func(b *testing.B) { consume(b, c.src, Options{BatchSize: c.batch, Shuffle: c.shuffle}, c.works) })
	}
}

// BenchmarkFirstBatch is a loader from New to its first batch on the GPU, of samples that the GPU gathers: µs.
func BenchmarkFirstBatch(b *testing.B) {
	dev := testgpu.Device(b)
	buf, err := hostmem.Alloc(b.Context(), dev, 4*features*benchSamples(), hostmem.Options{})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, buf.Close()) })
	src, err := InMemory([]int{4 * features}, buf.Bytes())
	require.NoError(b, err)
	for _, batch := range []int{16, 256, 4096} {
		b.Run(fmt.Sprint(batch), func(b *testing.B) {
			var opened, first time.Duration
			for range b.N {
				began := time.Now()
				l, err := New(b.Context(), dev, src, Options{BatchSize: batch, Shuffle: true})
				require.NoError(b, err)
				made := time.Now()
				for batch, err := range l.Batches(b.Context()) {
					require.NoError(b, err)
					require.NoError(b, batch.Wait(b.Context()))
					first += time.Since(made)
					break
				}
				opened += made.Sub(began)
				require.NoError(b, l.Close())
			}
			b.ReportMetric(float64(opened.Microseconds())/float64(b.N), "µs/New")
			b.ReportMetric(float64(first.Microseconds())/float64(b.N), "µs/first")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// slow is a data set behind something that takes 2 ms to answer, normalised.
type slow struct {
	all []float32
	n   int
}

func (s slow) Len() int      { return s.n }
func (s slow) Fields() []int { return []int{4 * features} }

func (s slow) Read(ctx context.Context, i int, sample [][]byte) error {
	time.Sleep(2 * time.Millisecond)
	copy(floats(sample[0]), s.all[i*features:(i+1)*features])
	return nil
}

func (s slow) compute(_ context.Context, _ int, sample [][]byte) error {
	x := floats(sample[0])
	var sum, squares float32
	for _, v := range x {
		sum += v
	}
	mean := sum / features
	for _, v := range x {
		squares += (v - mean) * (v - mean)
	}
	scale := 1.1 / (float32(math.Sqrt(float64(squares/(features-1)))) + 1e-6)
	for i, v := range x {
		x[i] = (v-mean)*scale + 0.1
	}
	return nil
}

// BenchmarkIO is samples that take 2 ms each, and some computing.
func BenchmarkIO(b *testing.B) {
	n := benchSamples()
	consume(b, slow{data(n), n}, Options{BatchSize: 256, Workers: 2048, Shuffle: true}, false)
}

// BenchmarkOverhead is what the loader itself takes: batches of samples that take no time, and small batches of
// samples in memory.
func BenchmarkOverhead(b *testing.B) {
	none := Func(1<<22, []int{4}, func(context.Context, int, [][]byte) error { return nil })
	small, err := InMemory([]int{64}, make([]byte, 64<<16))
	require.NoError(b, err)
	b.Run("none", func(b *testing.B) { consume(b, none, Options{BatchSize: 256, Shuffle: true}, false) })
	b.Run("small", func(b *testing.B) { consume(b, small, Options{BatchSize: 16}, false) })
	b.Run("small/12-workers", func(b *testing.B) { consume(b, small, Options{BatchSize: 16, Workers: 12}, false) })
}

// BenchmarkPermutation is the cost of a place in a shuffled order.
func BenchmarkPermutation(b *testing.B) {
	p := newPermutation(1_000_000, 1, 2)
	i := 0
	for b.Loop() {
		i = p.at(i)
	}
}
