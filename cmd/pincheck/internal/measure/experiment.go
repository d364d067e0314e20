package measure

import (
	"context"
	"errors"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
)

// An Experiment is a set of measurements that answers a question.
type Experiment struct {
	Name     string
	Short    string // one line for a list
	Question string
	Views    []result.View
	// Plan returns what is to be measured. It measures and allocates nothing.
	Plan func(Env) ([]Group, error)
	// Explain answers the question by what was measured, which may be a part of it,
	// or nothing. nil for none.
	Explain func(Env, *result.Bench) (answers []string)
}

// Env is what an experiment runs on, and with which options.
type Env struct {
	Options
	Devices []*cudart.Device
	Host    *hostinfo.Host
	// Expect returns the yardstick for a series, or nil where there is none. It may
	// be nil.
	Expect func(*result.Series) *result.Expected
}

// Options shape experiments.
type Options struct {
	// Quick is for fewer sizes and shorter samples.
	Quick bool
	// Duration is about how long all cases of an experiment take together. 0 means as
	// long as its plan says.
	Duration time.Duration
	// Sizes replace those of the plan, where it has sizes of copies.
	Sizes []int
}

// A Group is cases that share memory. One is open at a time.
type Group struct {
	Name  string
	Need  Need
	Setup time.Duration // about how long Open takes
	// Open makes what the cases use. An error that wraps errors.ErrUnsupported leaves
	// the group out, with a note. Close is called also after an error.
	Open  func(context.Context) error
	Close func() error
	Cases []Case
	// Notes returns what a reader of the series has to know. It is called after the
	// cases of a group that was opened. nil for nothing.
	Notes func() []string
}

// Need is what a group takes at its peak, in bytes.
type Need struct {
	Pinned   int // of host memory
	Pageable int
	Device   int // on each device
	Disk     int
}

// A Case is one series to measure.
type Case struct {
	// Series has the name, labels and units. The samples come later.
	result.Series
	WarmUp     int           // samples that do not count
	MinSamples int           // samples to take whatever they cost; 0 means 3
	Samples    int           // most to take; 0 means 25
	Budget     time.Duration // after which only Fewest are taken; 0 means 300 ms
	// Sample takes one sample. It must return soon after ctx ends.
	Sample func(context.Context) (float64, error)
	// Also are further quantities that each sample measures.
	Also []Also
	// Bytes returns how many bytes a sample copied, if Sample chooses that: nil for
	// BytesPerSample.
	Bytes func() int
	// CPU returns the CPU time of all samples so far, if a sample does more than it times:
	// see [Stopwatch]. nil for the CPU time of this process.
	CPU func() time.Duration
	// Verify compares what was copied after the samples. nil for nothing to compare. Bytes
	// that are wrong are an error that wraps ErrWrongBytes.
	Verify func(context.Context) error
	// Node returns the NUMA node of the host memory, when the group is open. nil for
	// none.
	Node func() (node int, ok bool)
}

// Also is a series of a quantity that the samples of a [Case] measure as well.
type Also struct {
	result.Series
	// Last returns the value of the last sample. ok is false if it has none.
	Last func() (value float64, ok bool)
}

// ErrWrongBytes is wrapped by the error of a Verify that compared, and found wrong bytes.
var ErrWrongBytes = errors.New("wrong bytes")

const (
	minimum       = 3
	maxSamples    = 25
	caseBudget    = 300 * time.Millisecond
	quickSamples  = 9
	quickBudget   = 100 * time.Millisecond
	minimumBudget = time.Millisecond
)
