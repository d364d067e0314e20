//go:build linux

package benchmarks

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/transfer/blocks"
)

// BenchmarkFirst is the first calls of a process: each operation is a child process that makes them. What the
// child reports is what counts, not how long it runs.
func BenchmarkFirst(b *testing.B) { bench(b, "First") }

var _ = add("First", firstRow(row{name: "calls", quick: true}, firstCalls), firstRow(row{name: "kernels", quick: true}, firstKernels))

// childEnv is set in child processes.
const childEnv = "PINNED_BENCH_CHILD"

// firstRow adds the setup of a row that is measured in child processes, by first.
func firstRow(r row, first func(*fixture, *testing.B)) row { return childRow("First", r, first) }

func childRow(group string, r row, first func(*fixture, *testing.B)) row {
	r.prepare = func(f *fixture) task {
		if os.Getenv(childEnv) != "" {
			return task{loop: func(m *meter) error { first(f, m.b); return nil }}
		}
		f.dir()
		sums := map[string]float64{}
		count := 0
		return task{
			loop: func(m *meter) error {
				for ; m.next(); count++ {
					if err := f.child("^Benchmark"+group+"$/^"+strings.ReplaceAll(r.name, "/", "$/^")+"$", sums); err != nil {
						return err
					}
				}
				return nil
			},
			report: func(b *testing.B) {
				for unit, sum := range sums {
					b.ReportMetric(sum/float64(count), unit)
				}
			}}
	}
	return r
}

// child runs a benchmark in a child process, and adds its figures.
func (f *fixture) child(name string, sums map[string]float64) error {
	cmd := exec.Command(os.Args[0], "-test.run=^$", "-test.bench="+name, "-test.benchtime=1x", "-test.timeout=2m")
	// A container starts without the driver's cache of compiled kernels.
	cmd.Env = append(os.Environ(), "CUDA_CACHE_DISABLE=1", childEnv+"=1", dirEnv+"="+f.dir())
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if strings.HasPrefix(line, "--- SKIP") {
			f.Skipf("%s", out)
		}
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") || err != nil {
			continue
		}
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return fmt.Errorf("the child process printed %q: %w", line, err)
			}
			sums[fields[i+1]] += v
		}
	}
	if err != nil || len(sums) == 0 {
		return errors.Join(fmt.Errorf("child process: %s", out), err)
	}
	return nil
}

// steps are the first calls of a process, one after another. Each is a metric.
type steps struct {
	b   *testing.B
	all time.Duration
}

func (s *steps) step(name string, do func()) {
	took, _ := timed(func() error { do(); return nil })
	s.all += took
	s.b.ReportMetric(float64(took), name+"-ns")
	s.b.ReportMetric(float64(s.all), "ns/op")
}

// firstKernels loads the module's kernels.
func firstKernels(f *fixture, b *testing.B) {
	s := steps{b: b}
	s.step("open", f.open)
	dev := f.device(0)
	s.step("context", func() { f.memory(0, 0) }) // the first call that needs a context makes it
	s.step("blocks", func() { f.later(must(blocks.New(ctx, dev, blocks.Options{}))(f).Close) })
	s.step("memory", func() { f.later(must(gpukernels.NewMemory(ctx, dev))(f).Close) })
	s.step("parts", func() { f.later(must(gpukernels.NewParts(ctx, dev))(f).Close) })
}

// firstCalls is the first calls of a process that copies.
func firstCalls(f *fixture, b *testing.B) {
	n := f.size(64 * mib)
	src := make([]byte, n)
	pattern(1).fill(src)
	s := steps{b: b}
	s.step("open", f.open)
	dev := f.device(0)
	s.step("context", func() { f.memory(0, 0) })
	_, dst := f.memory(0, 0)
	var buf *hostmem.Buffer
	s.step("alloc", func() { buf = must(hostmem.Alloc(ctx, dev, n, hostmem.Options{}))(f) })
	f.later(buf.Close)
	var c *transfer.Copier
	s.step("copier", func() { c = f.copier(0) })
	s.step("upload", func() { f.check(c.Upload(ctx, dst, src)) })
	f.check(onDevice(dev, dst, src))
}
