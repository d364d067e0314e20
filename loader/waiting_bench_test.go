//go:build linux && !android && (amd64 || arm64)

package loader

import (
	"context"
	"flag"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

var waitingDelay = flag.Duration("delay", 2*time.Millisecond, "of each sample in BenchmarkWaiting")

// BenchmarkWaiting is samples of 4 KiB that each take 2 ms to arrive, read by up to
// thousands of workers. alone is the same goroutines with the source and nothing else,
// which is what a loader can reach at best. Compare figures of one run.
//
// It uses what every version of the package has.
func BenchmarkWaiting(b *testing.B) {
	for _, normalise := range []bool{false, true} {
		for _, workers := range []int{16, 64, 256, 1024, 4096} {
			name := fmt.Sprintf("workers=%d", workers)
			if normalise {
				name = "normalise/" + name
			}
			data := newWaitingData(*waitingDelay)
			var src Source = data
			if normalise {
				src = normalisedData{data}
			}
			b.Run(name+"/alone", func(b *testing.B) { benchAlone(b, src, workers) })
			for _, batch := range []int{16, 256, 4096} {
				b.Run(fmt.Sprintf("%s/batch=%d", name, batch), func(b *testing.B) { benchWaiting(b, src, workers, batch) })
			}
		}
	}
}

// benchWaiting consumes batches within one epoch.
func benchWaiting(b *testing.B, src Source, workers, batch int) {
	dev := testgpu.Device(b)
	l, err := New(b.Context(), dev, src, Options{BatchSize: batch, Workers: workers, Shuffle: true}.of(src))
	if err != nil {
		b.Fatal(err)
	}
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		b.Fatal(err)
	}
	n := -2*workers - 4*batch // to warm up
	var began usage
	for batch, err := range l.Batches(b.Context()) {
		if err == nil {
			err = batch.Use(s)
		}
		if err != nil {
			b.Fatal(err)
		}
		was := n
		n += batch.Len()
		if was < 0 && n >= 0 {
			n = 0
			b.ReportAllocs()
			b.ResetTimer()
			began = used()
		}
		if n >= b.N {
			break
		}
	}
	b.StopTimer()
	began.report(b, n)
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
}

// benchAlone calls the source from as many goroutines.
func benchAlone(b *testing.B, src Source, workers int) {
	transform := Options{}.of(src).Transform
	turns := make(chan struct{}, runtime.GOMAXPROCS(0))
	var claimed atomic.Int64
	var all sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	began := used()
	for range workers {
		all.Go(func() {
			sample := [][]byte{make([]byte, 4*features)}
			for {
				i := int(claimed.Add(1))
				if i > b.N {
					return
				}
				_ = src.Read(b.Context(), i*7919%src.Len(), sample)
				if transform != nil {
					turns <- struct{}{}
					_ = transform(b.Context(), i, sample)
					<-turns
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	began.report(b, b.N)
}

// A usage is what the process has used.
type usage struct {
	at       time.Time
	cpu      time.Duration
	switches int64 // of threads that had to wait
}

func used() usage {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return usage{time.Now(), time.Duration(u.Utime.Nano() + u.Stime.Nano()), u.Nvcsw}
}

// report reports what was used for each of n samples.
func (u usage) report(b *testing.B, n int) {
	now := used()
	b.ReportMetric(float64(n)/now.at.Sub(u.at).Seconds(), "samples/s")
	b.ReportMetric(float64((now.cpu-u.cpu).Nanoseconds())/float64(n), "cpu-ns/sample")
	b.ReportMetric(float64(now.switches-u.switches)/float64(n), "switches/sample")
	b.ReportMetric(0, "ns/op")
}

// waitingData is a data set behind something that takes a while to answer. It is as long
// as any epoch, and starts again after 4,096 samples, which caches hold in part.
type waitingData struct {
	all   []float32
	delay time.Duration
}

func newWaitingData(delay time.Duration) *waitingData {
	d := &waitingData{all: make([]float32, 4096*features), delay: delay}
	for i := range d.all {
		d.all[i] = float32(i%1000) / 1000
	}
	return d
}

func (*waitingData) Len() int      { return math.MaxInt32 }
func (*waitingData) Fields() []int { return []int{4 * features} }

func (d *waitingData) Read(_ context.Context, i int, sample [][]byte) error {
	time.Sleep(d.delay)
	at := i % (len(d.all) / features) * features
	copy(unsafe.Slice((*float32)(unsafe.Pointer(&sample[0][0])), features), d.all[at:])
	return nil
}

type normalisedData struct{ *waitingData }

func (normalisedData) compute(_ context.Context, _ int, sample [][]byte) error {
	x := unsafe.Slice((*float32)(unsafe.Pointer(&sample[0][0])), features)
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
