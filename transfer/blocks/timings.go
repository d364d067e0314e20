package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/lifetime"
)

// timings are how long copies of blocks take, by direction, size and variant, as was measured
// on the device.
type timings [2][]timingsRow // up and down; sorted by size

// A timingsRow is of blocks of one size.
type timingsRow struct {
	size     int
	variants [numVariants]timing
}

// A kind of copy is a method, and for the kernel the unit of the addresses.
type kind int

// The variants: the kernel by each of kernelUnits, and the copy engine.
const (
	engineVariant = kind(len(kernelUnits))
	numVariants   = engineVariant + 1
)

// A timing is the time of n copies in nanoseconds: base + n*each.
type timing struct{ base, each float64 }

// quickest returns the method that takes less time.
func (t *timings) quickest(down bool, unit, size, count int) Method {
	variant := kind(slices.Index(kernelUnits[:], unit))
	rows := t[btoi(down)]
	if len(rows) > 0 && estimate(rows, engineVariant, size, count) < estimate(rows, variant, size, count) {
		return ByEngine
	}
	return ByKernel
}

// estimate returns how many nanoseconds a variant takes: between two sizes that were measured, and
// beyond the largest, on the line through two of them, and for smaller ones as long as the smallest.
func estimate(rows []timingsRow, variant kind, size, count int) float64 {
	at := func(row timingsRow) float64 {
		return row.variants[variant].base + float64(count)*row.variants[variant].each
	}
	i, _ := slices.BinarySearchFunc(rows, size, func(r timingsRow, size int) int { return r.size - size })
	if i == 0 || len(rows) == 1 {
		return at(rows[0])
	}
	i = min(i, len(rows)-1)
	low, high := rows[i-1], rows[i]
	return at(low) + (at(high)-at(low))*float64(size-low.size)/float64(high.size-low.size)
}

// What is measured: sizes in an order in which the table is of use when time runs out, and counts.
const (
	measureTime  = 100 * time.Millisecond
	measureBytes = 4 << 20 // of the host and of the device
	measureCount = 256
)

var measureSizes = [...]int{4 << 10, 64 << 10, 512, 1 << 20, 16 << 10}

// fill measures sizes until more is false.
func (t *timings) fill(took func(variant kind, down bool, size, count int) (time.Duration, error), more func() bool) error {
	for _, size := range measureSizes {
		if !more() {
			break
		}
		for down := range t {
			row := timingsRow{size: size}
			many := min(max(measureBytes/4/size, 4), measureCount)
			for variant := range row.variants {
				one, err := took(kind(variant), down == 1, size, 1)
				if err != nil {
					return err
				}
				all, err := took(kind(variant), down == 1, size, many)
				if err != nil {
					return err
				}
				each := max(float64(all-one)/float64(many-1), 0)
				row.variants[variant] = timing{max(float64(one)-each, 0), each}
			}
			t[down] = append(t[down], row)
		}
	}
	for _, rows := range t {
		slices.SortFunc(rows, func(a, b timingsRow) int { return a.size - b.size })
	}
	return nil
}

// measure makes the table, of copies on a stream of its own.
func (b *Copier) measure(ctx context.Context) (t timings, err error) {
	buf, err := hostmem.Alloc(ctx, b.dev, measureBytes+16, hostmem.Options{Label: "blocks, measured"})
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, lifetime.Undo(ctx, buf.CloseContext)) }()
	p, err := b.dev.Malloc(measureBytes + 16)
	if err != nil {
		return t, err
	}
	// Free waits for the device: copies of a measurement that was interrupted are done then.
	defer func() { err = errors.Join(err, b.dev.Free(p)) }()
	s, err := b.dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	began := time.Now()
	err = t.fill(func(variant kind, down bool, size, count int) (time.Duration, error) {
		return b.timed(ctx, s, buf, p, variant, down, size, count)
	}, func() bool { return time.Since(began) < measureTime })
	if err != nil {
		return t, fmt.Errorf("measure: %w", err)
	}
	return t, nil
}

// timed returns the time of copies from the call to the end, the shorter of two after a first one.
func (b *Copier) timed(ctx context.Context, s *cudart.Stream, buf *hostmem.Buffer, p cudart.DevPtr, variant kind, down bool, size, count int) (time.Duration, error) {
	c := launch{
		Copy:  Copy{Host: buf.Bytes()[:measureBytes], Device: p, DeviceLen: measureBytes, Size: size, Count: count, HostStride: size, DeviceStride: size},
		owner: buf, byKernel: variant != engineVariant,
	}
	if variant != engineVariant && kernelUnits[variant] < kernelUnits[0] {
		unit := kernelUnits[variant]
		c.Host, c.Device = unsafe.Slice((*byte)(unsafe.Add(buf.Pointer(), unit)), measureBytes), p+cudart.DevPtr(unit)
	}
	blocks := measureBytes / size
	c.HostIndex = make([]uint32, count)
	for i := range c.HostIndex {
		c.HostIndex[i] = uint32((i*31 + 7) % blocks) // in no order, and each once: 31 divides no power of two
	}
	var shortest time.Duration
	for i := range 3 {
		began := time.Now()
		one := call{Copier: b, ctx: ctx, s: s, down: down, launches: []launch{c}}
		err := one.copyLists(&one.launches[0])
		if err == nil {
			err = one.queueAll()
		}
		if err = errors.Join(err, s.Synchronize(ctx)); err != nil {
			return 0, err
		}
		if took := time.Since(began); i == 1 || i > 1 && took < shortest {
			shortest = took
		}
	}
	return shortest, nil
}
