package measure

import (
	"context"
	"errors"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
)

// An Experiment is a set of measurements and the answer to a question about them.
type Experiment struct {
	Name     string
	Group    string // of experiments, in the list
	Question string // that it answers
	Long     string // what it measures, in lines of at most 80 columns
	Related  string // commands to read about next; may be empty
	Views    []result.View
	// Plan returns the groups to measure. It neither measures nor allocates.
	Plan func(Env) ([]Group, error)
	// Derive returns series that follow from those that were measured, of which it may find any missing.
	// nil for none.
	Derive func(*result.Bench) []result.Series
	// Explain returns the answers and the key figures. The Bench may lack series, as some cases fail or are not
	// reached. nil for no answers.
	Explain func(Env, *result.Bench) (answers []string, figures []result.Table)
}

// Env has the devices, the host and the options of a run.
type Env struct {
	Options
	Devices []*cudart.Device
	Host    *hostinfo.Host
	// Expect returns the expected value of a series, or nil if none is known. Expect itself
	// may be nil.
	Expect func(*result.Series) *result.Expected
}

// Options shape experiments.
type Options struct {
	// Quick asks for fewer sizes and shorter samples.
	Quick bool
	// Duration is the approximate time of all cases of an experiment together. 0 keeps the
	// budgets of the plan.
	Duration time.Duration
	// Sizes replace the plan's sizes of copies, in bytes.
	Sizes []int
	// Frames shape batches of frames.
	Frames Frames
	// Python is a Python interpreter with PyTorch; "" for none.
	Python string
}

// Frames are batches of frames, and how often each is copied. Zeros keep those of the plan.
type Frames struct {
	Batch   int  // frames of a batch
	Bytes   int  // of a frame
	Repeats int  // samples
	WarmUp  *int // samples to discard first
}

// A Group is a list of cases that share memory. One group is open at a time.
type Group struct {
	Name      string
	Footprint Footprint
	Setup     time.Duration // estimated time of Open
	// Open allocates what the cases use. If its error wraps errors.ErrUnsupported, the group
	// is left out with a note. Close is called after an error, too.
	Open  func(context.Context) error
	Close func() error
	Cases []Case
	// Notes returns sentences for readers of the series. Run calls it after the cases, if
	// Open succeeded. nil for none.
	Notes func() []string
}

// A Footprint is the peak memory of a group in bytes.
type Footprint struct {
	Pinned   int // of host memory
	Pageable int
	Device   int // on each device
	Disk     int
}

// A Case is one series to measure.
type Case struct {
	// Series has the name, labels and units. The samples come later.
	result.Series
	WarmUp     int           // samples to discard first
	MinSamples int           // samples to take however long they last; 0 means 3
	Samples    int           // maximum number of samples; 0 means 25
	Budget     time.Duration // after it no more than MinSamples are taken; 0 means 300 ms
	// Sample takes one sample. It must return soon after ctx ends.
	Sample func(context.Context) (float64, error)
	// Also are other quantities that each sample measures.
	Also []Also
	// Bytes returns the bytes that a sample copied, if Sample chooses their number. nil
	// stands for BytesPerSample.
	Bytes func() int
	// CPU returns the CPU time of the timed parts of all samples so far: see [Stopwatch].
	// nil stands for the CPU time of this process, including what is not timed.
	CPU func() time.Duration
	// Verify compares the copied bytes after the samples. A mismatch is an error that wraps
	// ErrMismatch. nil for nothing to compare.
	Verify func(context.Context) error
	// Node returns the NUMA node of the group's host memory, while the group is open. nil
	// for none.
	Node func() (node int, ok bool)
}

// Also is a series of another quantity that the samples of a [Case] measure.
type Also struct {
	result.Series
	// Last returns the value of the last sample. ok is false if it has none.
	Last func() (value float64, ok bool)
}

// ErrMismatch is wrapped by the error of a Verify that found a mismatch.
var ErrMismatch = errors.New("wrong bytes")

const (
	minimum       = 3
	maxSamples    = 25
	caseBudget    = 300 * time.Millisecond
	quickSamples  = 9
	quickBudget   = 100 * time.Millisecond
	minimumBudget = time.Millisecond
)
