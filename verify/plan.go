package verify

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Path is a way for bytes to travel to the device and back.
type Path string

// The paths.
const (
	PathPinned     Path = "pinned"     // hostmem buffers, asynchronous copies
	PathRegistered Path = "registered" // ordinary mapped memory under cudaHostRegister, asynchronous copies
	PathHostAlloc  Path = "host_alloc" // cudaHostAlloc, asynchronous copies
	PathPageable   Path = "pageable"   // Go heap memory, synchronous copies
	PathMapped     Path = "mapped"     // cudaHostAllocMapped: copies on the device to and from the device's view of host memory
	PathManaged    Path = "managed"    // cudaMallocManaged, written and read by the CPU
	PathHop        Path = "device_hop" // as pinned, with a copy to a second device buffer on the way
)

// Paths returns all paths.
func Paths() []Path {
	return []Path{PathPinned, PathRegistered, PathHostAlloc, PathPageable, PathMapped, PathManaged, PathHop}
}

func (p Path) check() error {
	if slices.Contains(Paths(), p) {
		return nil
	}
	return fmt.Errorf("unknown path %q; paths are %v", string(p), Paths())
}

// streams reports whether the path's copies are queued on streams.
func (p Path) streams() bool { return p != PathPageable }

// Offset is how far the ends of a copy lie behind a page boundary, in bytes.
type Offset struct {
	Source int `json:"source_offset_bytes"` // of the host memory that is sent
	Device int `json:"device_offset_bytes"`
	Return int `json:"return_offset_bytes"` // of the host memory that receives
}

// Case is one round trip.
type Case struct {
	Path      Path    `json:"path"`
	Pattern   Pattern `json:"pattern"`
	SizeBytes int     `json:"size_bytes"`
	Offset
	// Streams is the number of streams that share the copies, 0 where the path
	// uses none.
	Streams int `json:"streams"`
}

// String names the case, such as "pinned counter 4097 B offsets 1/3/0 4 streams",
// or the path alone where there is no more.
func (c Case) String() string {
	if c.SizeBytes == 0 {
		return string(c.Path)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s", c.Path, c.Pattern, bytesText(c.SizeBytes))
	if c.Offset != (Offset{}) {
		fmt.Fprintf(&b, " offsets %d/%d/%d", c.Source, c.Device, c.Return)
	}
	if c.Streams > 1 {
		fmt.Fprintf(&b, " %d streams", c.Streams)
	}
	return b.String()
}

// Plan says what [Run] does. The zero value is a quick plan that takes about a
// second; Full makes it thorough, up to 4 GiB a copy. A field that is set
// replaces the preset's.
type Plan struct {
	Full bool
	// Paths, Sizes and Streams are all combined. Sizes are in bytes. Streams are
	// numbers of streams that share a copy; a copy never has more than bytes.
	Paths   []Path
	Sizes   []int
	Streams []int
	// Patterns and Offsets are combined as far as Variants allows.
	Patterns []Pattern
	Offsets  []Offset
	// Variants is how many combinations of Patterns and Offsets each size gets on
	// each path. The next size goes on with the next ones. 0 is the preset: many
	// for small sizes, few for large ones; more than there are is all.
	Variants int
	// MaxBytes leaves out larger sizes. 0 is no limit.
	MaxBytes int
	// Seed makes the random pattern; the same seed gives the same bytes.
	Seed uint64
	// MaxDetails is how many mismatches and how many failures are kept in the
	// report, all being counted. 0 is 16.
	MaxDetails int
	// NoStale leaves [StaleRead] out.
	NoStale bool
	// Progress is called before the first case and after each.
	Progress func(Progress)
}

// Progress tells how far a run is.
type Progress struct {
	CasesDone  int  `json:"cases_done"` // run or skipped
	CasesTotal int  `json:"cases_total"`
	BytesDone  int  `json:"bytes_done"`
	BytesTotal int  `json:"bytes_total"`
	Case       Case `json:"case"` // the last one done, zero at the start
}

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30

	largeBytes        = 16 * mib // from here on, only patterns that tell a place
	defaultMaxDetails = 16
	maxOffsetBytes    = mib
	maxStreams        = 64
)

var (
	smallSizes = []int{
		1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1025,
		2047, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537,
	}
	quickSizes = append(slices.Clone(smallSizes), mib-1, mib+1, 2*mib-1, 2*mib, 2*mib+1, 6*mib+3)
	fullSizes  = append(slices.Clone(smallSizes), mib-1, mib, mib+1, 2*mib-1, 2*mib, 2*mib+1, 4*mib+4096,
		16*mib-1, 16*mib, 16*mib+1, 64*mib+7, 256*mib-1, 256*mib)
	// Sizes around what 32 bits hold, for the paths whose memory is quickly had.
	fullLargeSizes = []int{gib, gib + 1, 2*gib - 1, 2*gib + 1, 4*gib - 1, 4 * gib, 4*gib + 4097}
	allOffsets     = []Offset{{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {3, 5, 7}, {8, 16, 4}, {4095, 1, 513}, {64, 4096, 4097}}
)

// normal fills in the presets and checks what was given.
func (p Plan) normal() (Plan, error) {
	if len(p.Paths) == 0 {
		p.Paths = Paths()
	}
	if len(p.Streams) == 0 {
		p.Streams = []int{1, 4}
	}
	if len(p.Patterns) == 0 {
		p.Patterns = Patterns()
	}
	if len(p.Offsets) == 0 {
		p.Offsets = allOffsets
	}
	if p.MaxDetails <= 0 {
		p.MaxDetails = defaultMaxDetails
	}
	var errs []error
	for _, path := range p.Paths {
		errs = append(errs, path.check())
	}
	for _, pattern := range p.Patterns {
		errs = append(errs, pattern.check())
	}
	for _, n := range p.Sizes {
		if n <= 0 {
			errs = append(errs, fmt.Errorf("size %d: must be positive", n))
		}
	}
	for _, n := range p.Streams {
		if n <= 0 || n > maxStreams {
			errs = append(errs, fmt.Errorf("%d streams: must be 1 to %d", n, maxStreams))
		}
	}
	for _, o := range p.Offsets {
		if least, most := min(o.Source, o.Device, o.Return), max(o.Source, o.Device, o.Return); least < 0 || most > maxOffsetBytes {
			errs = append(errs, fmt.Errorf("offsets %+v: must be 0 to %d bytes", o, maxOffsetBytes))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return p, fmt.Errorf("verify: plan: %w", err)
	}
	return p, nil
}

// sizes returns the path's sizes in rising order.
func (p Plan) sizes(path Path) []int {
	sizes := p.Sizes
	if len(sizes) == 0 {
		sizes = quickSizes
		if p.Full {
			sizes = fullSizes
			if path == PathPinned || path == PathRegistered {
				sizes = slices.Concat(fullSizes, fullLargeSizes)
			}
		}
	}
	sizes = slices.Sorted(slices.Values(sizes))
	if p.MaxBytes > 0 {
		sizes = slices.DeleteFunc(sizes, func(n int) bool { return n > p.MaxBytes })
	}
	return slices.Compact(sizes)
}

func (p Plan) variants(size, all int) int {
	n := p.Variants
	switch {
	case n > 0:
	case p.Full && size <= 65537:
		n = all
	case p.Full && size <= largeBytes+1:
		n = 12
	case p.Full && size <= 256*mib:
		n = 4
	case p.Full && size <= gib+1:
		n = 2
	case size <= 65537:
		n = 3
	case size <= 2*mib+1:
		n = 2
	default:
		n = 1
	}
	return min(n, all)
}

// cases lists the plan's cases of one path. Every pair of a pattern and an
// offset comes round in turn, whatever the number of variants.
func (p Plan) cases(path Path) []Case {
	telling := slices.DeleteFunc(slices.Clone(p.Patterns), func(q Pattern) bool { return !q.tells() })
	if len(telling) == 0 {
		telling = p.Patterns
	}
	streams := p.Streams
	if !path.streams() {
		streams = []int{0}
	}
	var cases []Case
	turn := 0
	for _, s := range streams {
		for _, size := range p.sizes(path) {
			if s > size {
				continue
			}
			patterns := p.Patterns
			if size >= largeBytes {
				patterns = telling
			}
			for range p.variants(size, len(patterns)*len(p.Offsets)) {
				i := turn % len(patterns)
				o := (turn/len(patterns) + i) % len(p.Offsets)
				cases = append(cases, Case{Path: path, Pattern: patterns[i], SizeBytes: size, Offset: p.Offsets[o], Streams: s})
				turn++
			}
		}
	}
	return cases
}

// bytesText writes a size as people do: whole units where it is some.
func bytesText(n int) string {
	switch {
	case n >= gib && n%gib == 0:
		return fmt.Sprintf("%d GiB", n/gib)
	case n >= mib && n%mib == 0:
		return fmt.Sprintf("%d MiB", n/mib)
	case n >= kib && n%kib == 0:
		return fmt.Sprintf("%d KiB", n/kib)
	default:
		return fmt.Sprintf("%d B", n)
	}
}
