//go:build linux

package benchmarks

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Environment variables, which scripts/bench.sh sets.
const (
	rowsEnv   = "PINNED_BENCH_ROWS"   // "two-cores" or "busy": only the rows for that condition
	verifyEnv = "PINNED_BENCH_VERIFY" // "0": bytes are not compared, because an earlier process did that
	dirEnv    = "PINNED_BENCH_DIR"    // a directory for files that several processes read
	plantEnv  = "PINNED_BENCH_PLANT"  // a percentage by which every operation is made longer
)

// A row is one benchmark.
type row struct {
	name  string // below that of the group: "upload/2GiB"
	quick bool   // runs with -short too
	cpu   bool   // CPU time is reported as well
	gpus  int    // that it needs, one if it is 0
	// twoCores and busy rows are measured on two cores, and beside a process that copies memory, too.
	twoCores, busy bool
	// prepare allocates what the row needs until the end of the benchmark.
	prepare func(*fixture) task
}

// A task is a row that is ready to be measured.
type task struct {
	op func() error // what is timed
	// count is the number of operations in one call of op; 0 is 1.
	count int
	bytes int // that op moves
	// before and after are called around each op, untimed.
	before, after func() error
	// verify calls op, and returns an error if it does not do what it should.
	verify func(op func() error) error
	// loop measures instead of a loop over op.
	loop func(*meter) error
	// report adds metrics.
	report func(*testing.B)
}

// groups has the rows of each benchmark function. Files add theirs when the program starts, so that those that
// build with an earlier commit are a program.
var groups = map[string][]row{}

func add(group string, rows ...row) bool {
	groups[group] = append(groups[group], rows...)
	return true
}

// bench runs the rows of a group.
func bench(b *testing.B, group string) {
	none := true
	for _, r := range groups[group] {
		only := os.Getenv(rowsEnv)
		if testing.Short() && !r.quick || only == "two-cores" && !r.twoCores || only == "busy" && !r.busy {
			continue
		}
		none = false
		b.Run(r.name, r.run)
	}
	if none {
		b.SkipNow() // or it would be a benchmark itself
	}
}

func (r row) run(b *testing.B) {
	b.ReportAllocs()
	f := &fixture{b, process}
	if r.gpus > 0 {
		f.device(r.gpus - 1)
	}
	t := r.prepare(f)
	if verifying() && t.verify != nil {
		f.check(t.verify(t.op))
	}
	m := &meter{b: b}
	if t.loop == nil {
		f.check(t.once()) // to warm up
		t.loop = t.opLoop
	}
	f.check(t.loop(m))
	if m.ops > 0 { // a child process reports by itself
		m.report(t, r.cpu)
	}
	if t.report != nil {
		t.report(b)
	}
}

func verifying() bool { return os.Getenv(verifyEnv) != "0" }

// once calls op, with what is before and after it.
func (t *task) once() error {
	for _, do := range []func() error{t.before, t.op, t.after} {
		if do == nil {
			continue
		}
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

func (t *task) opLoop(m *meter) error {
	for m.next() {
		if t.before != nil {
			m.pause()
			if err := t.before(); err != nil {
				return err
			}
			m.resume()
		}
		if err := t.op(); err != nil {
			return err
		}
		if t.after != nil {
			m.pause()
			if err := t.after(); err != nil {
				return err
			}
		}
	}
	return nil
}

// A meter times the loop of a benchmark, from each next or resume to the following pause or next. Unlike those of
// testing.B, pause and resume do not stop the other goroutines.
type meter struct {
	b              *testing.B
	ops            int // that began
	began          time.Time
	took, used     time.Duration
	mallocs, bytes uint64
}

func (m *meter) next() bool {
	m.pause()
	if m.ops == 0 {
		m.count(-1)
	}
	if !m.b.Loop() {
		time.Sleep(time.Millisecond) // workers spin for a next copy for a while, and the kernel counts that by ticks
		m.count(1)
		return false
	}
	m.ops++
	m.resume()
	return true
}

func (m *meter) pause() {
	if !m.began.IsZero() {
		m.took += since(m.began)
		m.began = time.Time{}
	}
}

func (m *meter) resume() { m.began = time.Now() }

// count adds what the process has used so far, or with -1 takes it away.
func (m *meter) count(sign int) {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	m.mallocs += uint64(sign) * s.Mallocs
	m.bytes += uint64(sign) * s.TotalAlloc
	m.used += time.Duration(sign) * cpuTime()
}

func (m *meter) report(t task, cpu bool) {
	ops := float64(m.ops * max(t.count, 1))
	m.b.ReportMetric(float64(m.took)/ops, "ns/op")
	m.b.ReportMetric(float64(m.bytes)/ops, "B/op")
	m.b.ReportMetric(float64(m.mallocs)/ops, "allocs/op")
	moved := float64(m.ops*t.bytes) / 1e9
	if t.bytes > 0 {
		m.b.ReportMetric(moved/m.took.Seconds(), "GB/s")
	}
	if cpu {
		m.b.ReportMetric(m.used.Seconds()/moved, "cpu-s/GB")
	}
}

// planted is the percentage by which all measured sections are made longer.
var planted, _ = strconv.Atoi(os.Getenv(plantEnv))

// since ends a measured section and returns its time.
func since(began time.Time) time.Duration { return stretched(began, planted) }

func stretched(began time.Time, percent int) time.Duration {
	took := time.Since(began)
	for end := took + took*time.Duration(percent)/100; took < end; {
		took = time.Since(began)
	}
	return took
}

// timed returns the time of f.
func timed(f func() error) (time.Duration, error) {
	began := time.Now()
	err := f()
	return since(began), err
}

// cpuTime returns the CPU time of the process in user and kernel mode (getrusage).
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// sizeName returns a size as rows write it.
func sizeName(n int) string {
	switch {
	case n > gib && n%gib == 1:
		return fmt.Sprintf("%dGiB+1", n/gib)
	case n >= gib && n%gib == 0:
		return fmt.Sprintf("%dGiB", n/gib)
	case n >= mib:
		return fmt.Sprintf("%dMiB", n/mib)
	case n >= kib:
		return fmt.Sprintf("%dKiB", n/kib)
	}
	return fmt.Sprintf("%dB", n)
}

func TestMain(m *testing.M) {
	if os.Getenv(serverEnv) != "" {
		fmt.Fprintln(os.Stderr, "benchmarks: serve a file:", serveFile())
		os.Exit(1)
	}
	code := m.Run()
	if err := process.close(); err != nil {
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		code = 1
	}
	os.Exit(code)
}

// callsAlone measure calls that move no bytes of their own: their verification makes other calls.
var callsAlone = []string{"Calls/event-query", "Calls/event-record", "Calls/idle-wait", "Calls/stream-query",
	"Kernel/check/1GiB", "Kernel/launch", "Pool/get-release/16-goroutines", "Pool/get-release/1MiB",
	"Pool/release-after-copy/1MiB", "Pool/release-on-idle-stream/1MiB"}

// A benchmark whose operation does nothing fails: the bytes that it would have moved are missing.
func TestVerificationFindsMissingBytes(t *testing.T) {
	var unproven []string
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		for _, r := range groups[group] {
			if r.gpus > 2 || group == "First" {
				continue
			}
			t.Run(group+"/"+r.name, func(t *testing.T) {
				f := &fixture{t, process}
				if r.gpus > 0 {
					f.device(r.gpus - 1)
				}
				task := r.prepare(f)
				if task.op == nil {
					return
				}
				f.check(task.verify(task.op))
				if task.verify(func() error { return nil }) == nil {
					unproven = append(unproven, group+"/"+r.name)
				}
			})
		}
	}
	if slices.Sort(unproven); !slices.Equal(unproven, callsAlone) {
		t.Errorf("with an operation that does nothing, these did not fail: %v\nwant these alone: %v", unproven, callsAlone)
	}
}

// A wrong byte of a pattern is found wherever it is, and what is planted makes a section longer.
func TestPatternsAndPlantedTime(t *testing.T) {
	for _, n := range []int{1, 7, 8, 4097, mib + 1} {
		mem := make([]byte, n)
		pattern(3).fill(mem)
		if err := pattern(3).check(mem); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		if n > 8 && pattern(4).check(mem) == nil {
			t.Errorf("%d bytes of one pattern are those of another", n)
		}
		for _, at := range []int{0, n / 2, n - 1} {
			other := slices.Clone(mem)
			other[at] ^= 1
			if pattern(3).check(other) == nil || equal(other, mem) == nil {
				t.Errorf("byte %d of %d is wrong, and was not found", at, n)
			}
		}
	}
	began := time.Now().Add(-20 * time.Millisecond)
	if took := stretched(began, 50); took < 30*time.Millisecond {
		t.Errorf("20 ms and half as much again are %v", took)
	}
}
