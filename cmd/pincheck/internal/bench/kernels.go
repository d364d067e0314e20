// Series of bandwidth and latency whose bytes are moved by kernels, and not by copy engines: pinned host memory
// that is mapped for the device, the device's own memory filled or checked, and loads that depend on one
// another. A simulated GPU runs Go functions instead of kernels, on less memory.
//
//   - Clock: two events around the kernels of a sample.
//   - A rate is the bytes of all passes by that time; load_latency is that time by the number of loads.

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// What kernels measure: copies over the link and work on device memory by the multiprocessors,
// not by copy engines, and the time of single loads.

const (
	seriesChecked = "device_memory_kernels" // filled or checked by a kernel
	seriesLoad    = "load_latency"          // of one load after the other, by one thread
)

// Values of labels of these series.
const (
	memoryMapped = "mapped" // pinned host memory that a kernel accesses
	memoryDevice = "device"

	byFill  = "fill"
	byCheck = "check"
)

// kernels has the memory of a group whose cases run kernels.
type kernels struct {
	resources
	n      int // bytes on either side
	host   bool
	memory *gpukernels.Memory
	span   *measure.Span
	s      *cudart.Stream
	bytes  []byte        // pinned
	mapped cudart.DevPtr // its address for kernels
	p      cudart.DevPtr
	result cudart.DevPtr
}

func (k *kernels) open(ctx context.Context) (err error) {
	if k.memory, err = gpukernels.NewMemory(ctx, k.dev); err != nil {
		return err
	}
	k.undo.Push(k.memory.CloseContext)
	if err = inTurn(made(k.resources.span, &k.span), k.allocated(k.n, &k.p), k.allocated(gpukernels.ResultBytes, &k.result)); err != nil {
		return err
	}
	if k.host {
		p, err := k.dev.HostAlloc(k.n, cudart.HostAllocMapped)
		if err != nil {
			return err
		}
		k.undo.PushClose(func() error { return k.dev.FreeHost(p) })
		k.bytes = unsafe.Slice((*byte)(p), k.n)
		if k.mapped, err = k.dev.HostDevicePointer(p); err != nil {
			return err
		}
	}
	k.s, err = k.resources.stream()
	return err
}

func (k *kernels) group(name string, cases []measure.Case) measure.Group {
	footprint := measure.Footprint{Device: k.n}
	if k.host {
		footprint.Pinned = k.n
	}
	return measure.Group{Name: fmt.Sprintf("GPU %d, %s", k.dev.Ordinal(), name), Footprint: footprint, Setup: setupTime(k.n), Open: k.open, Close: k.close, Cases: cases}
}

// compare has a kernel compare device memory with a content.
func (k *kernels) compare(ctx context.Context, n int, c gpukernels.Content) error {
	found, err := k.memory.Compare(ctx, k.s, k.p, n, c, 0)
	if err == nil && found.Mismatches > 0 {
		err = fmt.Errorf("%w: %d of %d, the first at offset %d", measure.ErrMismatch, found.Mismatches, n, found.First)
	}
	return err
}

// mappedMemory measures copies by a kernel that reads or writes host memory over the link.
func mappedMemory(dev *cudart.Device, z sizing) measure.Group {
	sizes := z.upTo(largestOther)
	k := &kernels{resources: resources{dev: dev}, n: slices.Max(sizes), host: true}
	var cases []measure.Case
	for _, n := range sizes {
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
			cases = append(cases, k.copies(direction, n, z.count(n)))
		}
	}
	return k.group("mapped memory", cases)
}

func (k *kernels) copies(direction string, n, count int) measure.Case {
	content := gpukernels.Content{Seed: uint64(n)}
	prepare := func(context.Context) error {
		if direction == result.HostToDevice {
			content.Fill(k.bytes[:n], 0)
			return k.s.Memset(k.p, poison, n)
		}
		for i := range k.bytes[:n] {
			k.bytes[i] = poison
		}
		return k.memory.Fill(k.s, k.p, n, content, 0)
	}
	labels := labelsOf(k.dev, result.Memory, memoryMapped, result.Direction, direction, result.Size, strconv.Itoa(n))
	return measure.Case{
		Series: result.Series{Name: seriesBandwidth, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: n * count, Labels: labels},
		WarmUp: 1,
		Sample: after(prepare, func(ctx context.Context) (float64, error) {
			dst, src := k.p, k.mapped
			if direction == result.DeviceToHost {
				dst, src = src, dst
			}
			took, err := k.span.Time(ctx, k.s, func() error {
				for range count {
					if err := k.memory.Copy(k.s, dst, src, n, 0); err != nil {
						return err
					}
				}
				return nil
			})
			return float64(n*count) / 1e9 / took.Seconds(), err
		}),
		Verify: func(ctx context.Context) error {
			if direction == result.HostToDevice {
				return k.compare(ctx, n, content)
			}
			want := make([]byte, piece)
			return pieces(ctx, n, func(off, n int) error {
				content.Fill(want[:n], uint64(off))
				if !bytes.Equal(want[:n], k.bytes[off:off+n]) {
					return fmt.Errorf("%w in %d bytes at offset %d", measure.ErrMismatch, n, off)
				}
				return nil
			})
		},
	}
}

// checkedBytes is more than the caches of any GPU hold.
const checkedBytes = 2 << 30

// checkedMemory measures how fast kernels fill device memory and check it.
func checkedMemory(dev *cudart.Device) measure.Group {
	n := checkedBytes
	if free, _, err := dev.MemInfo(); err == nil {
		n = min(n, free/4)
	}
	if dev.Runtime().Library().Simulated {
		n = maxSimulated
	}
	k := &kernels{resources: resources{dev: dev}, n: n}
	const count = 4
	var cases []measure.Case
	for _, method := range []string{byFill, byCheck} {
		labels := labelsOf(dev, result.Method, method, result.Size, strconv.Itoa(n))
		var content gpukernels.Content
		var watch measure.Stopwatch
		cases = append(cases, measure.Case{
			Series: result.Series{Name: seriesChecked, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: n * count, Labels: labels},
			WarmUp: 1, CPU: watch.CPU,
			Sample: func(ctx context.Context) (float64, error) {
				if err := errors.Join(k.memory.ResetResult(k.s, k.result), k.memory.Fill(k.s, k.p, n, content, 0), k.s.Synchronize(ctx)); err != nil {
					return 0, err
				}
				watch.Start()
				defer watch.Stop()
				took, err := k.span.Time(ctx, k.s, func() error {
					for range count {
						var err error
						if method == byFill {
							err = k.memory.Fill(k.s, k.p, n, content, 0)
						} else {
							err = k.memory.Check(k.s, k.p, n, content, 0, k.result)
						}
						if err != nil {
							return err
						}
					}
					return nil
				})
				return float64(n*count) / 1e9 / took.Seconds(), err
			},
			Verify: func(ctx context.Context) error { return k.compare(ctx, n, content) },
		})
	}
	return k.group("its own memory, by kernels", cases)
}

const (
	chainLine  = 128       // bytes from one entry to another: no two share a cache line
	chainBytes = 256 << 20 // more than caches hold
	chainSteps = 10_000
)

// loads measures how long one load takes, of device memory and of host memory over the link:
// each load gives the address of the next.
func loads(dev *cudart.Device) measure.Group {
	k := &kernels{resources: resources{dev: dev}, n: chainBytes, host: true}
	if dev.Runtime().Library().Simulated {
		k.n = maxSimulated
	}
	var ends int // where the chain leads
	prepare := func(ctx context.Context) error {
		ends = chain(unsafe.Slice((*uint64)(unsafe.Pointer(&k.bytes[0])), len(k.bytes)/8), chainLine/8, chainSteps)
		if err := k.s.CopyToDevice(k.p, unsafe.Pointer(&k.bytes[0]), k.n); err != nil {
			return err
		}
		return k.s.Synchronize(ctx)
	}
	var cases []measure.Case
	for _, memory := range []string{memoryDevice, memoryMapped} {
		cases = append(cases, measure.Case{
			Series: result.Series{Name: seriesLoad, Unit: result.Seconds, Better: result.Lower, Labels: labelsOf(dev, result.Memory, memory)},
			WarmUp: 1,
			Sample: after(prepare, func(ctx context.Context) (float64, error) {
				at := k.p
				if memory == memoryMapped {
					at = k.mapped
				}
				took, err := k.span.Time(ctx, k.s, func() error { return k.memory.Chase(k.s, at, 0, chainSteps, k.result) })
				return took.Seconds() / chainSteps, err
			}),
			Verify: func(ctx context.Context) error {
				var got [2]uint64
				if err := k.dev.CopyToHost(unsafe.Pointer(&got), k.result, gpukernels.ResultBytes); err != nil {
					return err
				}
				if got[0] != uint64(ends) {
					return fmt.Errorf("%w: the chain led to %d, not %d", measure.ErrMismatch, got[0], ends)
				}
				return nil
			},
		})
	}
	return k.group("single loads", cases)
}

// chain makes entries that lead from 0 over so many others in random order, stride apart, and
// returns where so many steps lead.
func chain(entries []uint64, stride, steps int) (ends int) {
	order := rand.New(rand.NewPCG(1, 2)).Perm(len(entries)/stride - 1)
	at := 0
	for i := range steps {
		next := (order[i%len(order)] + 1) * stride
		entries[at] = uint64(next)
		at = next
	}
	return at
}
