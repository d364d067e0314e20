// Package reference says what series of measurements can be expected to reach on known
// hardware, each with its source: public figures of the GPU or of the generation of its
// link, and for other generations the arithmetic of the link. Where nothing is known there
// is no expectation: of latencies and of the rate of pinning, for example, which depend on
// the processor, of copies that are not between pinned memory and one GPU, and of links
// that the host does not show.
package reference

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
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
	links := make([]hostinfo.PCIe, len(gpus))
	for i, g := range gpus {
		if pci, ok := host.GPU(g.PCIBusID); ok {
			links[i] = pci.Made()
		}
	}
	return func(s *result.Series) *result.Expected {
		i := slices.IndexFunc(gpus, func(g GPU) bool { return g.Label == s.Labels.Get(result.Device) })
		if i < 0 {
			return nil
		}
		return Expect(gpus[i].Name, links[i], s)
	}
}

// payloadRate returns what a link carries in one direction in GB/s, with payloads of this many
// bytes a packet: 128, 256 or 512 on most hosts. Going to the device the packets are
// completions of its reads, with a header of 12 bytes, and from the device writes, with
// one of 16. Up to generation 5 each packet also has 8 bytes of framing, sequence number
// and checksum. Acknowledgements and flow control take a few per cent more.
func payloadRate(l hostinfo.PCIe, direction string, payload int) float64 {
	overhead := 12
	if direction == result.DeviceToHost {
		overhead = 16
	}
	if l.Speed < 64 { // the flits of generation 6 need no framing a packet
		overhead += 8
	}
	return l.Rate() * float64(payload) / float64(payload+overhead)
}

// smallestPayload is the payload that every device supports, in bytes.
const smallestPayload = 128

// largeCopy is the size from which on a copy's latency does not matter much: 16 MiB
// reach 99 % of the rate of 1 GiB on PCIe 5.0.
const largeCopy = 16 << 20

// Values of [result.Memory] for memory that the GPU copies to and from by itself. Where
// it was measured the kind makes no difference to the copies, apart from Grace, where
// write-combined memory is half as fast.
const (
	registered    = "registered"
	hostAlloc     = "cuda_host_alloc"
	writeCombined = "write_combined"
)

// Expect returns the expected rate for a series of one GPU of this name and link, or nil.
// With direction [result.Both] the series is the sum of both directions.
func Expect(gpu string, link hostinfo.PCIe, s *result.Series) *result.Expected {
	if s.Name != "bandwidth" || s.Unit != result.GBPerSecond || !understood(s.Labels) {
		return nil
	}
	direction := s.Labels.Get(result.Direction)
	size, err := strconv.Atoi(s.Labels.Get(result.Size))
	memory := s.Labels.Get(result.Memory)
	if err != nil || !slices.Contains([]string{registered, hostAlloc, writeCombined}, memory) {
		return nil
	}
	own := slices.IndexFunc(figures, func(f figure) bool {
		return f.gpu != "" && f.applies(gpu, link, size) && !(f.coherent && memory == writeCombined)
	})
	if own >= 0 {
		if low, high := figures[own].of(direction); low > 0 {
			return &result.Expected{Value: low, Source: figures[own].source(low, high)}
		}
	}
	if size < largeCopy || link.Width == 0 || Coherent(gpu) {
		return nil
	}
	return byLink(link, direction)
}

// byLink returns the expected rate for large copies over a link, whatever the GPU.
func byLink(link hostinfo.PCIe, direction string) *result.Expected {
	if direction != result.HostToDevice && direction != result.DeviceToHost {
		return nil
	}
	for _, f := range figures {
		if f.gpu != "" || f.link.Speed != link.Speed {
			continue
		}
		low, high := f.of(direction)
		scale := float64(link.Width) / float64(f.link.Width)
		source := f.source(low, high)
		if scale != 1 {
			source = fmt.Sprintf("%v: %g times %s", link, scale, source)
		}
		return &result.Expected{Value: low * scale, Source: source}
	}
	if link.Generation() == 0 {
		return nil
	}
	return &result.Expected{
		Value:  payloadRate(link, direction, smallestPayload),
		Source: fmt.Sprintf("%v: computed from its rate, encoding and packets of %d bytes; no public figure", link, smallestPayload),
	}
}

// understood reports whether the conditions of a series are those that the figures are
// about: nothing else at the same time, no other method than queued copies.
func understood(labels result.Labels) bool {
	for _, l := range labels {
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
