package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A Path is a kind of host memory, with the calls that copy from and to it. [Paths] returns all:
//
//	pinned         hostmem buffers, with asynchronous copies
//	registered     ordinary mapped memory under cudaHostRegister, with asynchronous copies
//	host_alloc     memory of cudaHostAlloc, with asynchronous copies
//	pageable       Go heap memory, with synchronous copies
//	mapped         memory of cudaHostAlloc that the device maps (cudaHostAllocMapped): copies on the device, to and
//	               from its address of that memory
//	managed        memory of cudaMallocManaged, which the CPU writes and reads
//	managed_moved  managed memory that CPU and device write in turn: the device copies the CPU's bytes from device
//	               memory, where they were prefetched, and writes bytes that the CPU reads on the host, where they
//	               are prefetched back
//	device_hop     pinned, with a copy to a second device buffer on the way
//	peer           pinned, with a copy to another device and back on the way (cudaMemcpyPeerAsync), over NVLink or
//	               PCI Express where the two have peer access, and else through the host. It needs Plan.Peer
//	copier         Go heap memory by a Copier's Upload and Download
//	copier_file    a file in memory by a Copier's UploadFrom and DownloadTo
//	copier_io      a reader and a writer by a Copier's UploadReader and DownloadWriter
//	copier_parts   many pieces of Go heap memory, of odd sizes, by a Copier's UploadAll and DownloadAll
//	fanout         Go heap memory by a transfer.Fanout onto two devices, copied back from each by a Copier's
//	               Download. It needs Plan.Peer
//	kernel         mapped pinned memory, with asynchronous copies to the device, where a kernel checks the bytes that
//	               arrived, without a copy back. Then the kernel reads the host memory itself. It needs a device
//	               that runs kernels
//	device_memory  memory of the device that kernels write and check, at its own speed. The pattern random has a
//	               cheaper function there. It needs a device that runs kernels
type Path string

const (
	pathPinned       Path = "pinned"
	pathRegistered   Path = "registered"
	pathHostAlloc    Path = "host_alloc"
	pathPageable     Path = "pageable"
	pathMapped       Path = "mapped"
	pathManaged      Path = "managed"
	pathManagedMoved Path = "managed_moved"
	pathHop          Path = "device_hop"
	pathPeer         Path = "peer"
	pathCopier       Path = "copier"
	pathCopierFile   Path = "copier_file"
	pathCopierIO     Path = "copier_io"
	pathCopierParts  Path = "copier_parts"
	pathFanout       Path = "fanout"
	pathKernel       Path = "kernel"
	pathDeviceMemory Path = "device_memory"
)

// A pathInfo has the requirements and properties of a path.
type pathInfo struct {
	path Path
	// open allocates an end, nil for none.
	open func(context.Context, *trip) (*end, error)
	// attr is an attribute that the path requires, 0 for none; lacks names its feature.
	attr  cudart.Attr
	lacks string

	copier  bool // through a transfer.Copier
	kernels bool
	managed bool // memory
	peer    bool // by Plan.Peer
	hop     bool // by a second buffer on the device
	// hostCopies is the number of times that the bytes are in host memory.
	hostCopies int
	streams    []int // of the cases, instead of Plan.Streams
}

var ownOrCallers = []int{0, 1} // streams

var pathInfos = []pathInfo{
	{path: pathPinned, open: newPinned, hostCopies: 2},
	{path: pathRegistered, open: newRegistered, attr: cudart.AttrHostRegisterSupported, lacks: "registering host memory", hostCopies: 2},
	{path: pathHostAlloc, open: hostAlloc(0), hostCopies: 2},
	{path: pathPageable, open: newPageable, hostCopies: 2, streams: []int{0}},
	{path: pathMapped, open: newMapped, attr: cudart.AttrCanMapHostMemory, lacks: "mapped host memory", hostCopies: 2},
	{path: pathManaged, open: newManaged, attr: cudart.AttrManagedMemory, lacks: "managed memory", managed: true, hostCopies: 2},
	{path: pathManagedMoved, open: newMoved, attr: cudart.AttrConcurrentManagedAccess, lacks: "moving managed memory", managed: true, hostCopies: 2},
	{path: pathHop, open: newPinned, hop: true, hostCopies: 2},
	{path: pathPeer, open: newPinned, peer: true, hop: true, hostCopies: 2},
	{path: pathCopier, open: newCopied, copier: true, hostCopies: 2, streams: ownOrCallers},
	{path: pathCopierFile, open: newCopiedFile, copier: true, hostCopies: 4, streams: ownOrCallers},
	{path: pathCopierIO, open: copied(uploadReader, downloadWriter), copier: true, hostCopies: 2, streams: ownOrCallers},
	{path: pathCopierParts, open: copied(uploadParts, downloadParts), copier: true, hostCopies: 2, streams: ownOrCallers},
	{path: pathFanout, open: newFanned, copier: true, peer: true, hostCopies: 2, streams: ownOrCallers},
	{path: pathKernel, open: newMapped, attr: cudart.AttrCanMapHostMemory, lacks: "mapped host memory", kernels: true, hostCopies: 2},
	{path: pathDeviceMemory, kernels: true, streams: []int{1}},
}

// info returns the path's pathInfo, a zero one for an unknown path.
func (p Path) info() pathInfo {
	for _, info := range pathInfos {
		if info.path == p {
			return info
		}
	}
	return pathInfo{}
}

// Paths returns all paths.
func Paths() (all []Path) {
	for _, info := range pathInfos {
		all = append(all, info.path)
	}
	return all
}

// Offset is the distance of the ends of a copy from a page boundary, in bytes.
type Offset struct {
	// Source is the offset of the host memory that is sent.
	Source int `json:"source_offset_bytes"`
	// Device is the offset of the memory on the device.
	Device int `json:"device_offset_bytes"`
	// Return is the offset of the host memory that receives.
	Return int `json:"return_offset_bytes"`
}

// Case is one round trip.
type Case struct {
	// Path has the memory and the calls.
	Path Path `json:"path"`
	// Pattern generates the bytes.
	Pattern Pattern `json:"pattern"`
	// SizeBytes is the number of bytes.
	SizeBytes int `json:"size_bytes"`
	// Offset has the distances from page boundaries.
	Offset
	// Streams is the number of streams that share the copies, and 0 if the path
	// uses none. Through a Copier it is 0 for the copier's own streams, and 1 for
	// a stream of the caller (transfer.Call).
	Streams int `json:"streams"`
}

// String names the case, such as "pinned counter 4097 B offsets 1/3/0 4 streams",
// or the path alone if there is no more.
func (c Case) String() string {
	if c.SizeBytes == 0 {
		return string(c.Path)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s", c.Path, c.Pattern, units.ExactBytes(c.SizeBytes))
	if c.Offset != (Offset{}) {
		fmt.Fprintf(&b, " offsets %d/%d/%d", c.Source, c.Device, c.Return)
	}
	switch {
	case c.Streams > 1:
		fmt.Fprintf(&b, " %d streams", c.Streams)
	case c.Streams == 1 && c.Path.info().copier:
		b.WriteString(" caller's stream")
	}
	return b.String()
}

// A Plan has the round trips of [Run]. The zero value is a quick plan that takes about a
// second. A field that is set replaces the preset's.
type Plan struct {
	// Full makes the plan thorough: up to 4 GiB a copy, and 64 MiB through a
	// Copier.
	Full bool
	// Paths are combined with all Sizes and Streams. The default is all paths, but those
	// by another device if Peer is nil.
	Paths []Path
	// Peer is the other device of the paths peer and fanout, of the same Runtime. Nil
	// leaves them out: no device is used but this one and the one that [Run] gets.
	Peer *cudart.Device
	// Sizes are the sizes of copies in bytes, each at least 1.
	Sizes []int
	// Streams are numbers of streams, from 1 to 64, that share a copy; a copy has
	// no more than bytes. The path pageable uses none, device_memory one; paths through a Copier are tried
	// on its own streams and on one of the caller.
	Streams []int
	// Patterns generate the bytes. They are combined with Offsets as far as Variants
	// allows.
	Patterns []Pattern
	// Offsets are distances from page boundaries, each from 0 to 1 MiB.
	Offsets []Offset
	// Variants is the maximum number of combinations of Patterns and Offsets for each size
	// on each path. The next size continues with the next combinations. 0 is the preset:
	// many for small sizes, few for large ones.
	Variants int
	// MaxBytes omits larger sizes. 0 is no limit.
	MaxBytes int
	// Seed makes the random pattern. The same seed gives the same bytes.
	Seed uint64
	// MaxDetails is the maximum number of mismatches, and of failures, that the report
	// lists. It counts all of them. 0 is 16.
	MaxDetails int
	// NoStale omits [StaleRead].
	NoStale bool
	// Progress is called before the first case and after each.
	Progress func(Progress)
}

// Progress has how far a run is.
type Progress struct {
	// CasesDone is the number of cases that were run.
	CasesDone int `json:"cases_done"`
	// CasesTotal is the number of cases of the plan, without those that were skipped so far.
	CasesTotal int `json:"cases_total"`
	// BytesDone is the number of bytes of the cases that were run.
	BytesDone int `json:"bytes_done"`
	// BytesTotal is the number of bytes of CasesTotal.
	BytesTotal int `json:"bytes_total"`
	// Case is the case that was run last, zero at the start.
	Case Case `json:"case"`
	// Report is the report so far. It does not change after the call.
	Report *Report `json:"-"`
}

const (
	mib = 1 << 20
	gib = 1 << 30

	largeBytes        = 16 * mib // from here on, only patterns that show a place
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
	// A Copier's sizes: of several chunks, with a part of one.
	fullCopierSizes = append(slices.Clone(smallSizes), mib-1, mib, mib+1, 2*mib-1, 2*mib, 2*mib+1, 16*mib-1, 16*mib+1, 64*mib+7)
	fullSizes       = append(slices.Clone(fullCopierSizes), 4*mib+4096, 16*mib, 256*mib-1, 256*mib)
	// Sizes around what 32 bits hold, for the paths whose memory is quickly allocated.
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
		p.Patterns = patterns()
	}
	if len(p.Offsets) == 0 {
		p.Offsets = allOffsets
	}
	p.MaxDetails = cmp.Or(p.MaxDetails, defaultMaxDetails)
	return p, p.check()
}

func (p Plan) check() error {
	var errs []error
	if min(p.Variants, p.MaxBytes, p.MaxDetails) < 0 {
		errs = append(errs, fmt.Errorf("Plan.Variants of %d, MaxBytes of %d, MaxDetails of %d: must not be negative", p.Variants, p.MaxBytes, p.MaxDetails))
	}
	for _, path := range p.Paths {
		errs = append(errs, oneOf("Plan.Paths", "path", path, Paths()))
	}
	for _, pattern := range p.Patterns {
		errs = append(errs, oneOf("Plan.Patterns", "pattern", pattern, patterns()))
	}
	for _, n := range p.Sizes {
		if n <= 0 {
			errs = append(errs, fmt.Errorf("Plan.Sizes has %d: must be positive", n))
		}
	}
	for _, n := range p.Streams {
		if n <= 0 || n > maxStreams {
			errs = append(errs, fmt.Errorf("Plan.Streams has %d: must be 1 to %d", n, maxStreams))
		}
	}
	for _, o := range p.Offsets {
		if min(o.Source, o.Device, o.Return) < 0 || max(o.Source, o.Device, o.Return) > maxOffsetBytes {
			errs = append(errs, fmt.Errorf("Plan.Offsets has %+v: must be 0 to %d bytes", o, maxOffsetBytes))
		}
	}
	return errors.Join(errs...)
}

// oneOf returns an error unless all has the value of a field of Plan.
func oneOf[T ~string](field, what string, v T, all []T) error {
	if slices.Contains(all, v) {
		return nil
	}
	return fmt.Errorf("%s has unknown %s %q; %ss are %v", field, what, string(v), what, all)
}

// sizes returns the path's sizes in rising order.
func (p Plan) sizes(path Path) []int {
	sizes := p.Sizes
	if len(sizes) == 0 {
		sizes = quickSizes
		switch {
		case p.Full && (path == pathPinned || path == pathRegistered || path == pathDeviceMemory):
			sizes = slices.Concat(fullSizes, fullLargeSizes)
		case p.Full && path.info().copier:
			sizes = fullCopierSizes
		case p.Full:
			sizes = fullSizes
		}
	}
	sizes = slices.Sorted(slices.Values(sizes))
	if p.MaxBytes > 0 {
		sizes = slices.DeleteFunc(sizes, func(n int) bool { return n > p.MaxBytes })
	}
	return slices.Compact(sizes)
}

func (p Plan) variants(path Path, size, all int) int {
	n := p.Variants
	switch {
	case n > 0:
	case path.info().copier && !p.Full:
		n = 1
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
	all := p.Patterns
	positional := slices.DeleteFunc(slices.Clone(all), func(q Pattern) bool { return !q.positional() })
	if len(positional) == 0 {
		positional = all
	}
	streams := path.info().streams
	if streams == nil {
		streams = p.Streams
	}
	var cases []Case
	next := 0
	for _, s := range streams {
		for _, size := range p.sizes(path) {
			if s > size {
				continue
			}
			patterns := all
			if size >= largeBytes {
				patterns = positional
			}
			for range p.variants(path, size, len(patterns)*len(p.Offsets)) {
				i := next % len(patterns)
				o := (next/len(patterns) + i) % len(p.Offsets)
				cases = append(cases, Case{Path: path, Pattern: patterns[i], SizeBytes: size, Offset: p.Offsets[o], Streams: s})
				next++
			}
		}
	}
	return cases
}
