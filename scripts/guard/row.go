package main

import (
	"fmt"
	"strings"
	"time"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// A row is one use of the library that is measured.
type row struct {
	name  string
	quick bool // part of compare -quick
	// unit of its own figure: "GB/s", "µs" and so on. Those that end in "/s" are rates, of which
	// more is better.
	unit string
	cpu  bool // CPU seconds per GB are a figure as well
	// variants under which it is measured too.
	twoCores, busy bool
	// c names, for the row's own figure and under the names of others, the program of testdata/baseline that
	// does the same, and the name of its line: "calls Calls/event_query". If that ends with a slash the name
	// goes on, and the fastest counts: "ring Upload/pageable/2GiB/".
	c map[string]string
	// of is the row that this one is a reference for: the same by CUDA alone.
	of string
	// gpus is the number of GPUs that it needs, one if it is 0.
	gpus int
	// tableOnly leaves the row out of compare: it says more about a host than about a change.
	tableOnly bool
	// goals are what guard table compares its figures with.
	goals []goal
	// target is the shortest time of a sample, 30 ms if it is 0.
	target time.Duration

	// prepare makes a task of the row, or once measures it in a process that has made no call of
	// CUDA before.
	prepare func(*fixture) (*task, error)
	once    func(*fixture) (sample, error)
}

// A goal is a limit for a figure of a row: at least so many times its reference for a rate, else at most.
type goal struct {
	Figure string `json:"figure,omitempty"` // empty for the row's own
	// Row is the row of the same run whose figure of that name is the reference; without one it is what the
	// row's program in C reached.
	Row   string  `json:"row,omitempty"`
	Ratio float64 `json:"ratio"` // 0: the figure itself has to be 0
}

// gpuCounts are the numbers of GPUs that rows of several GPUs are there for.
var gpuCounts = []int{2, 4, 8}

// A task is a row that is ready to be measured.
type task struct {
	op func() error // what is timed
	// count is the number of the row's operations in one call of op; 0 is 1.
	count int
	// bytes are moved by op.
	bytes int
	// before and after are called around each op, untimed.
	before, after func() error
	// verify shows that op does what it should.
	verify func() error
	// sample measures in place of a loop over op.
	sample func(target time.Duration) (sample, error)
	// close releases what the fixture does not.
	close func() error
}

// A figure is one result of a sample.
type figure struct {
	Name  string  `json:"name,omitempty"` // empty for the row's own
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// A sample is what one measurement of a row returned.
type sample struct {
	Figures []figure       `json:"figures"`
	Details map[string]any `json:"details,omitempty"`
}

// contextsUnit is the unit of a figure that is 0 where all is well.
const contextsUnit = "contexts"

// isRate reports whether more of a unit is better.
func isRate(unit string) bool { return strings.HasSuffix(unit, "/s") }

// cpuUnit is the unit of CPU time; their figure is named cpu.
const cpuUnit = "CPU s/GB"

// inC names what is beside a row's own figure, if anything.
func inC(lines string) map[string]string {
	if lines == "" {
		return nil
	}
	return map[string]string{"": lines}
}

// registered are the rows of all files, in the order in which they are measured.
var registered []row

// register adds rows. Each file of rows calls it when the program starts, so that the files
// that build with an earlier commit are a program.
func register(rows ...row) { registered = append(registered, rows...) }

// sizeName is how rows write a size.
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

// leftOut is why a row cannot be measured on a host, or is not there: one GPU, a file system that
// keeps its pages. It is no failure.
type leftOut string

func (l leftOut) Error() string { return string(l) }
