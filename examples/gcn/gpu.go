package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/kernel/cublas"
	"github.com/gopinned/pinned/managed"
	"github.com/gopinned/pinned/transfer"
)

// memory is a backend's.
type memory struct {
	label string
	n     int // elements of 4 bytes

	p       cudart.DevPtr
	managed *managed.Memory // or plain device memory

	host    []float64 // of backend cpu
	indices []uint32
}

// reserve is device memory that unified memory leaves to cuBLAS and the kernels.
const reserve = 512 << 20

// gpu is a backend on one device and one stream.
type gpu struct {
	options
	rt      *cudart.Runtime
	dev     *cudart.Device
	s       *cudart.Stream
	copier  *transfer.Copier
	network *network
	blas    *cublas.Handle // nil without

	unified *managed.Allocator // nil without
	all     []*memory
	losses  *memory
	epoch   int
	plain   managed.Counts // of plain device memory
	out     io.Writer
}

func newGPU(ctx context.Context, o options, out io.Writer) (b *gpu, err error) {
	b = &gpu{options: o, out: out}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.rt, err = o.open(ctx); err != nil {
		return b, err
	}
	if b.dev, err = b.rt.Device(o.device); err != nil {
		return b, err
	}
	if b.s, err = b.dev.NewStream(cudart.StreamOptions{}); err != nil {
		return b, err
	}
	if b.network, err = newNetwork(ctx, b.dev); err != nil {
		return b, err
	}
	if o.blas {
		if b.blas, err = cublas.New(ctx, b.s); errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintln(out, "without cuBLAS:", err)
			b.blas, err = nil, nil
		} else if err != nil {
			return b, err
		}
	}
	if o.managed {
		var logger *slog.Logger
		if o.verbose {
			logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		b.unified, err = managed.New(ctx, b.dev, managed.Options{Reserve: reserve, Logger: logger})
		return b, err
	}
	b.copier, err = transfer.NewCopier(ctx, b.dev, transfer.Options{})
	return b, err
}

// open opens the machine's CUDA, or a simulated one.
func (o options) open(ctx context.Context) (*cudart.Runtime, error) {
	if o.source != nil {
		return cudart.Open(ctx, cudart.Options{Source: o.source})
	}
	return device.Open(ctx, o.sim, cudasim.Config{Kernels: simulatedKernels})
}

func (b *gpu) alloc(ctx context.Context, label string, n int, small bool) (m *memory, err error) {
	m = &memory{label: label, n: n}
	if b.unified != nil && !small {
		if m.managed, err = b.unified.Alloc(ctx, 4*n, managed.AllocOptions{Label: label}); err != nil {
			return nil, err
		}
		m.p = m.managed.Ptr()
		b.all = append(b.all, m)
		return m, nil
	}
	if m.p, err = b.dev.Malloc(4 * n); err != nil {
		if free, total, e := b.dev.MemInfo(); e == nil {
			err = fmt.Errorf("%w (%.2f GB of %.2f are free: -managed with a -budget needs less)", err, float64(free)/1e9, float64(total)/1e9)
		}
		return nil, err
	}
	b.all = append(b.all, m)
	b.plain.Allocs++
	b.plain.Allocated += 4 * n
	b.plain.Peak = max(b.plain.Peak, b.plain.Allocated)
	if b.verbose && 4*n >= 100e6 {
		fmt.Fprintf(os.Stderr, "allocation %d: %.2f GB of device memory for %s\n", b.plain.Allocs, 4*float64(n)/1e9, label)
	}
	return m, nil
}

func (b *gpu) fill(ctx context.Context, m *memory, f func(dst []float32, first int)) error {
	if m.managed != nil { // nothing is queued yet that uses it
		f(hostmem.Slice[float32](m.managed.Bytes()), 0)
		return nil
	}
	part := make([]float32, min(m.n, 16<<20))
	for at := 0; at < m.n; at += len(part) {
		part = part[:min(len(part), m.n-at)]
		f(part, at)
		if err := b.upload(ctx, m.p+cudart.DevPtr(4*at), bytesOf(part)); err != nil {
			return err
		}
	}
	return nil
}

func (b *gpu) fillIndices(ctx context.Context, m *memory, v []uint32) error {
	if m.managed != nil {
		copy(hostmem.Slice[uint32](m.managed.Bytes()), v)
		return nil
	}
	return b.upload(ctx, m.p, bytesOf(v))
}

func bytesOf[T float32 | uint32](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*len(v))
}

// upload copies in the order of the stream. Unified memory alone needs no copier but for the
// weights: cudaMemcpy is good enough for those.
func (b *gpu) upload(ctx context.Context, p cudart.DevPtr, src []byte) error {
	if b.copier != nil {
		return b.copier.With(transfer.Call{Stream: b.s}).Upload(ctx, p, src)
	}
	if err := b.dev.CopyToDevice(p, unsafe.Pointer(&src[0]), len(src)); err != nil {
		return err
	}
	return b.dev.Synchronize(ctx) // cudaMemcpy may return before the device has it
}

// at is the address of a matrix.
func at(m matrix) cudart.DevPtr { return m.memory.p + cudart.DevPtr(4*m.off) }

func (b *gpu) zero(m matrix) error { return b.s.Memset(at(m), 0, 4*m.len()) }

func (b *gpu) copy(dst, src matrix) error { return b.s.CopyOnDevice(at(dst), at(src), 4*src.len()) }

func (b *gpu) multiply(c, x, y matrix, tx, ty bool, beta float32) error {
	to := cublas.Matrix{P: at(c), Rows: c.rows, Cols: c.cols}
	left := cublas.Matrix{P: at(x), Rows: x.rows, Cols: x.cols, Transposed: tx}
	right := cublas.Matrix{P: at(y), Rows: y.rows, Cols: y.cols, Transposed: ty}
	if b.blas != nil {
		return b.blas.Multiply(to, left, right, 1, beta)
	}
	return b.network.multiply(b.s, to, left, right, 1, beta)
}

func (b *gpu) addEdges(dst, src matrix, l edgeList) error {
	off := cudart.DevPtr(4 * l.first)
	return b.network.addEdges(b.s, at(dst), at(src), l.from.p+off, l.to.p+off, l.weight.p+off, l.count, dst.cols)
}

func (b *gpu) relu(m matrix) error { return b.network.relu(b.s, at(m), at(m), m.len()) }

func (b *gpu) reluGradient(gradient, output matrix) error {
	return b.network.reluGradient(b.s, at(gradient), at(gradient), at(output), gradient.len())
}

func (b *gpu) crossEntropy(logits matrix, labels *memory, scale float32) error {
	return b.network.crossEntropy(b.s, at(logits), at(logits), labels.p, b.losses.p+cudart.DevPtr(8*b.epoch), logits.rows, logits.cols, scale)
}

func (b *gpu) sgd(weight, gradient matrix, rate float32) error {
	return b.network.sgd(b.s, at(weight), at(gradient), rate, weight.len())
}

func (b *gpu) begin(epoch int) error {
	b.epoch = epoch
	return b.s.Memset(b.losses.p+cudart.DevPtr(8*epoch), 0, 8)
}

func (b *gpu) loss(ctx context.Context, epoch int) (loss float64, err error) {
	if err := b.s.Synchronize(ctx); err != nil {
		return 0, err
	}
	err = b.dev.CopyToHost(unsafe.Pointer(&loss), b.losses.p+cudart.DevPtr(8*epoch), 8)
	return loss, err
}

// runner returns the runner that moves the memory of the steps to the device.
func (b *gpu) runner(ctx context.Context, m *model, epochs int) (runner, error) {
	var err error
	if b.losses, err = b.alloc(ctx, "losses", 2*epochs, true); err != nil {
		return nil, err
	}
	if b.budget == 0 {
		for _, p := range b.all {
			if p.managed == nil {
				continue
			}
			if err := p.managed.Whole().Prefetch(ctx, b.s, b.dev.Location()); err != nil {
				return nil, err
			}
		}
		return inOrder{epochs}, nil
	}
	budget := int(b.budget * float64(m.bytes()))
	fmt.Fprintf(b.out, "budget: %.3f GB of %.3f GB of the graph's memory, panels of %d columns\n", float64(budget)/1e9, float64(m.bytes())/1e9, m.width)
	if !b.plan {
		return &byFaults{s: b.s, epochs: epochs, budget: budget}, nil
	}
	return newPlanned(ctx, b, m, epochs, budget)
}

func (b *gpu) stats(out io.Writer) error {
	c, name := b.plain, "device"
	if b.unified != nil {
		s := b.unified.Stats()
		c, name = s.Counts, "unified"
		for _, note := range b.unified.Notes() {
			fmt.Fprintln(out, "note:", note)
		}
		for _, label := range slices.Sorted(maps.Keys(s.Labels)) {
			fmt.Fprintf(out, "  %-16s %7.3f GB\n", label, float64(s.Labels[label].Peak)/1e9)
		}
	}
	free, total, err := b.dev.MemInfo()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "memory: %s memory allocated %.3f GB, peak %.3f GB, %d allocations, %d frees; %.2f GB of %.2f GB of device memory are free\n",
		name, float64(c.Allocated)/1e9, float64(c.Peak)/1e9, c.Allocs, c.Frees, float64(free)/1e9, float64(total)/1e9)
	return err
}

// close waits for the work, and releases everything that there is.
func (b *gpu) close() error {
	var errs []error
	add := func(err error) { errs = append(errs, err) }
	if b.s != nil {
		add(b.s.Synchronize(context.Background()))
	}
	if b.blas != nil {
		add(b.blas.Close())
	}
	if b.network != nil {
		add(b.network.Close())
	}
	if b.copier != nil {
		add(b.copier.Close())
	}
	for _, m := range b.all {
		if m.managed != nil {
			add(m.managed.Close())
		} else {
			add(b.dev.Free(m.p))
		}
	}
	if b.unified != nil {
		add(b.unified.Close())
	}
	if b.s != nil {
		add(b.s.Close())
	}
	if b.rt != nil {
		add(b.rt.Close())
	}
	return errors.Join(errs...)
}
