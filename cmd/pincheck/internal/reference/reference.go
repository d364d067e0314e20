// Package reference says what copies can be expected to reach on a machine, by the table of the directory
// reference, and by which row of it: the row of the machine's own type, else of its GPU, else of its link.
//
// Where the table has nothing there is no expectation: of latencies, small copies and the rate of pinning, for
// example, which depend on the processor, of copies that are not between pinned memory and one GPU, and of links
// that the host does not show.
package reference

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A GPU is a device of the host.
type GPU struct {
	Label    string // value of the label [result.Device] in its series
	Name     string // of the product (cudaGetDeviceProperties): NVIDIA H200
	PCIBusID string
}

// New returns a function that returns the expected rate for series of these GPUs, for measure.Env.Expect. It returns
// nil for a series of which nothing is known.
func New(host *hostinfo.Host, gpus []GPU) func(*result.Series) *result.Expected {
	machines := make([]Machine, len(gpus))
	for i, g := range gpus {
		link := hostinfo.PCIe{}
		if pci, ok := host.GPU(g.PCIBusID); ok {
			link = pci.Made()
		}
		machines[i] = MachineOf(host, g.Name, link)
	}
	return func(s *result.Series) *result.Expected {
		i := slices.IndexFunc(gpus, func(g GPU) bool { return g.Label == s.Labels.Get(result.Device) })
		if i < 0 {
			return nil
		}
		return Builtin().Expect(machines[i], s)
	}
}

const (
	// bandwidth is the series that the table is about.
	bandwidth = "bandwidth"
	// smallestCopy is the smallest size of rows: on two hosts of one type, copies of 16 KiB differ by a quarter,
	// and those of 4 MiB by 1 % (testdata/results, 2026-11-22).
	smallestCopy = 4 << 20
	// largeCopy is the size from which on a copy's latency does not matter much: 16 MiB
	// reach 99 % of the rate of 1 GiB on PCIe 5.0.
	largeCopy = 16 << 20
)

// Values of [result.Memory] for memory that the GPU copies to and from by itself. Where
// it was measured the kind makes no difference to the copies, apart from Grace, where
// write-combined memory is half as fast.
const (
	registered    = "registered"
	hostAlloc     = "cuda_host_alloc"
	writeCombined = "write_combined"
)

// How near a row is to a machine: the nearest counts.
const (
	ownType = iota
	ownGPU
	citedGPU
	otherGPU // on such a link
	arithmetic
)

// A choice is a row for a machine. Scale is its link's share of the row's lanes.
type choice struct {
	file  *File
	row   *Row
	rank  int
	scale float64
}

// Expect returns the expected rate for a series of a machine, or nil. Of rows that are equally near to the machine
// the lowest counts. With direction [result.Both] the series is the sum of both directions.
func (t *Table) Expect(m Machine, s *result.Series) *result.Expected {
	size, err := strconv.Atoi(s.Labels.Get(result.Size))
	direction, memory := s.Labels.Get(result.Direction), s.Labels.Get(result.Memory)
	if err != nil || !isCopy(s) || memory == writeCombined && Coherent(m.GPU) {
		return nil
	}
	var best *choice
	link, _ := hostinfo.ParsePCIe(m.Link)
	words := wordsOf(m.GPU)
	for _, f := range t.files {
		c, ok := f.nearTo(m, link, words)
		if !ok || c.rank >= otherGPU && (size < largeCopy || direction == result.Both) {
			continue
		}
		if c.row = f.row(direction, size); c.row == nil {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(c.rank, best.rank), cmp.Compare(c.value(), best.value())) < 0 {
			best = &c
		}
	}
	if best == nil {
		return nil
	}
	return &result.Expected{Value: best.value(), Source: best.source(m), Of: best.of(), Brief: best.brief()}
}

// isCopy reports whether a series is of copies between pinned memory and one GPU, and its conditions are those that
// the table is about: nothing else at the same time, no other method than queued copies.
func isCopy(s *result.Series) bool {
	if s.Name != bandwidth || s.Unit != result.GBPerSecond || !slices.Contains([]string{registered, hostAlloc, writeCombined}, s.Labels.Get(result.Memory)) {
		return false
	}
	for _, l := range s.Labels {
		switch l.Key {
		case result.Device, result.Direction, result.Size, result.Memory:
		case result.Method:
			if !slices.Contains([]string{"async", "cudaMemcpyAsync", "copy_engine"}, l.Value) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// nearTo returns how near the file is to a machine with a link and the words of its GPU's name; not ok is that it says
// nothing of it. A link counts for those with fewer lanes, too.
func (f *File) nearTo(m Machine, link hostinfo.PCIe, words []string) (c choice, ok bool) {
	c = choice{file: f, scale: 1}
	if f.Machine.Link == m.Link && named(f.words, words) {
		switch {
		case f.Kind == Cited:
			c.rank = citedGPU
		case !f.Machine.sameHost(m):
			c.rank = ownGPU
		}
		return c, true
	}
	if link.Width == 0 || f.link.Speed != link.Speed || f.link.Width < link.Width {
		return c, false
	}
	if c.rank = otherGPU; f.Kind == Computed {
		c.rank = arithmetic
	}
	c.scale = float64(link.Width) / float64(f.link.Width)
	return c, true
}

// row returns the row of a direction for copies of a size: that of the size, or for large copies of the next larger
// or smaller one that is large, too. It is nil if there is none.
func (f *File) row(direction string, size int) *Row {
	var nearest *Row
	for i := range f.Rows {
		r := &f.Rows[i]
		switch {
		case r.Direction != direction:
		case r.Size == size:
			return r
		case size < largeCopy || r.Size > 0 && r.Size < largeCopy:
		case nearest == nil || distance(r.Size, size) < distance(nearest.Size, size):
			nearest = r
		}
	}
	return nearest
}

func distance(a, b int) int { return max(a-b, b-a) }

// value returns the expected rate: the median of a measurement, or the lowest rate that is known.
func (c *choice) value() float64 { return c.scale * cmp.Or(c.row.Median, c.row.Min) }

// of is result.Expected.Of.
func (c *choice) of() string {
	switch c.rank {
	case otherGPU:
		return "the rate of another GPU on this link"
	case arithmetic:
		return "the calculated rate of this link"
	}
	return "the reference for this GPU and link"
}

// brief is result.Expected.Brief.
func (c *choice) brief() string {
	switch c.file.Kind {
	case Measured:
		return fmt.Sprintf("%v, measured %s", c.file.Machine, c.row.Date)
	case Cited:
		return fmt.Sprintf("%v, cited", c.file.Machine)
	}
	return fmt.Sprintf("%v, computed", c.file.Machine)
}

// source names the file, its machine and the row.
func (c *choice) source(m Machine) string {
	r := c.row
	text := fmt.Sprintf("%s: %v, %s, ", c.file.Name, c.file.Machine, strings.ReplaceAll(r.Direction, "_", " "))
	switch c.file.Kind {
	case Measured:
		text += fmt.Sprintf("%s, measured %s: median of %d, %.1f to %.1f GB/s (%s)", units.Bytes(r.Size), r.Date, r.N, r.Min, r.Max, r.Source)
	case Cited:
		reported := fmt.Sprintf("%g", r.Min)
		if r.Max > r.Min {
			reported += fmt.Sprintf(" to %g", r.Max)
		}
		text += fmt.Sprintf("cited: %s GB/s (%s)", reported, r.Source)
	case Computed:
		text += fmt.Sprintf("computed: %s; no public figure", r.Formula)
	}
	if c.scale != 1 {
		text = fmt.Sprintf("%s: %g times %s", m.Link, c.scale, text)
	}
	return text
}
