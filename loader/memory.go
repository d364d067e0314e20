package loader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/internal/ntcopy"
)

// InMemory returns a [BatchSource] of samples in memory. data[f] has field f of all samples, back
// to back, with fields[f] bytes each. The memory may be a mapped file, and must not change
// during an epoch. InMemory does not block.
//
// Where the memory is pinned, as bytes of a [hostmem.Buffer] or a lease are, the GPU of a loader of [New]
// gathers the batches over the link, by a kernel on a few multiprocessors; the CPU only writes
// lists of indices. [Batch.Host] is nil then, [Batch.Offset] -1, and [Stats].Gathered counts the
// samples. Order, positions and all else are those of other sources. Fields whose samples are a multiple of
// 16 bytes, and begin at such an address, are quickest. The memory must stay open as long as the loader: an
// epoch fails if it was closed meanwhile, but for a lease, whose memory may be another lease's then.
//
// In all other cases the CPU fills the batches: if the memory is not pinned, with
// Options.HostBatches or Options.Transform, if the device cannot access host memory by its address,
// for more than 2^32 - 1 samples, for [NewHost], and within a source with its own methods.
//
// The error names a field that is not a whole number of samples, or whose number of samples differs
// from field 0's.
func InMemory(fields []int, data ...[]byte) (BatchSource, error) {
	m := memory{slices.Clone(fields), slices.Clone(data), false}
	if err := m.check(); err != nil {
		return nil, failed("in memory", err)
	}
	return m, nil
}

// memory is a data set in memory. If gpuOnly is set, there is no Transform: the CPU does not read
// the batch again, so it is written with non-temporal stores. The GPU would have to fetch the
// bytes from the CPU's caches otherwise.
type memory struct {
	fields  []int
	data    [][]byte
	gpuOnly bool
}

// maxGPUOnly is the maximum size of a batch, in bytes, that is written with non-temporal stores.
// Larger batches are faster without: those of 1 MiB by 13 %, with a fifth less of the CPU. Without, those of 64 KiB reach half
// the rate (H200, 2026-11-29); sizes between were not measured.
const maxGPUOnly = 256 << 10

func (m memory) check() error {
	switch {
	case len(m.fields) == 0:
		return errors.New("there are no fields")
	case len(m.fields) != len(m.data):
		return fmt.Errorf("fields has %d sizes, and data %d fields", len(m.fields), len(m.data))
	}
	for f, size := range m.fields {
		switch bytes := len(m.data[f]); {
		case size <= 0:
			return fmt.Errorf("field %d has %d bytes: must be positive", f, size)
		case bytes%size != 0:
			return fmt.Errorf("field %d: %d bytes are not a whole number of samples of %d bytes", f, bytes, size)
		case bytes/size != m.Len():
			return fmt.Errorf("field %d has %d samples, and field 0 has %d", f, bytes/size, m.Len())
		}
	}
	return nil
}

func (m memory) Len() int      { return len(m.data[0]) / m.fields[0] }
func (m memory) Fields() []int { return m.fields }

// fits checks that a destination has the fields of n samples.
func fits(to [][]byte, fields []int, n int) error {
	if len(to) != len(fields) {
		return fmt.Errorf("the destination has %d fields, not %d", len(to), len(fields))
	}
	for f, size := range fields {
		if len(to[f]) != n*size {
			return fmt.Errorf("field %d: the destination has %d bytes, not %d", f, len(to[f]), n*size)
		}
	}
	return nil
}

// exist checks that all indices are of n samples.
func exist(indices []int, n int) error {
	for _, i := range indices {
		if uint(i) >= uint(n) {
			return fmt.Errorf("sample %d of %d", i, n)
		}
	}
	return nil
}

// Read implements Source.
func (m memory) Read(ctx context.Context, i int, sample [][]byte) error {
	indices := [1]int{i}
	return m.ReadBatch(ctx, indices[:], sample)
}

// ReadBatch implements BatchSource.
func (m memory) ReadBatch(_ context.Context, indices []int, samples [][]byte) error {
	if err := cmp.Or(fits(samples, m.fields, len(indices)), exist(indices, m.Len())); err != nil {
		return fmt.Errorf("loader: memory: %w", err)
	}
	for f, size := range m.fields {
		if m.gpuOnly {
			copySamples(samples[f], m.data[f], size, indices)
		} else {
			gather(samples[f], m.data[f], size, indices, func(to, from []byte) int { return copy(to, from) })
		}
	}
	return nil
}

// CopySamples copies samples of size bytes with the given numbers, which lie back to back in from, into the
// loader's host memory, as [Copy] does and quicker than by a Copy each: it is for ReadBatch of a [BatchSource]. to
// must have len(indices)*size bytes. The error names a sample that is not in from, or another size; then nothing was
// copied. It does not block.
func CopySamples(to, from []byte, size int, indices []int) error {
	// Divisions: products of an index and a size may overflow.
	if size <= 0 || len(to)%size != 0 || len(to)/size != len(indices) {
		return fmt.Errorf("loader: copy %d samples of %d bytes into %d bytes", len(indices), size, len(to))
	}
	if err := exist(indices, len(from)/size); err != nil {
		return fmt.Errorf("loader: copy %w", err)
	}
	copySamples(to, from, size, indices)
	return nil
}

func copySamples(to, from []byte, size int, indices []int) {
	from = slices.Clip(from)
	if ntcopy.Together(to, size) {
		ntcopy.Rows(to, from, size, indices)
	} else {
		gather(to, from, size, indices, ntcopy.Copy)
	}
}

// gather copies the samples with the given indices back to back. Neighbours take one copy.
func gather(to, from []byte, size int, indices []int, put func(to, from []byte) int) {
	for len(indices) > 0 {
		n := 1
		for n < len(indices) && indices[n] == indices[n-1]+1 {
			n++
		}
		to = to[put(to, from[indices[0]*size:(indices[0]+n)*size]):]
		indices = indices[n:]
	}
}
