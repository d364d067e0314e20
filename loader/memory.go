package loader

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/internal/ntcopy"
)

// Memory returns a [BatchSource] of samples in memory: the bytes of data[f] are field
// f of all samples, back to back, with fields[f] bytes each. The memory may be a
// mapped file, and must not change during an epoch.
//
// An error says which field is not a whole number of samples, or has another number
// of them than the first one.
func Memory(fields []int, data ...[]byte) (BatchSource, error) {
	m := memory{slices.Clone(fields), slices.Clone(data), false}
	if err := m.check(); err != nil {
		return nil, failed("memory", err)
	}
	return m, nil
}

// memory is a data set in memory. If it is gpuOnly, no Transform reads the samples again, so
// that they are written with non-temporal stores: the GPU would have to fetch them from the
// caches.
type memory struct {
	fields  []int
	data    [][]byte
	gpuOnly bool
}

// maxGPUOnly is the largest batch that is written so. From 2 MiB on batches are quicker
// without: probably they have left the cores' caches when they are copied.
const maxGPUOnly = 1 << 20

func (m memory) check() error {
	switch {
	case len(m.fields) == 0:
		return errors.New("there are no fields")
	case len(m.fields) != len(m.data):
		return fmt.Errorf("%d sizes of fields, and data of %d", len(m.fields), len(m.data))
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

// fits returns why samples cannot be written to places.
func (m memory) fits(places [][]byte, indices []int) error {
	if len(places) != len(m.fields) {
		return fmt.Errorf("loader: memory: room for %d fields, not %d", len(places), len(m.fields))
	}
	for f, size := range m.fields {
		if n := len(indices) * size; len(places[f]) != n {
			return fmt.Errorf("loader: memory: field %d: room for %d bytes, not %d", f, len(places[f]), n)
		}
	}
	n := m.Len()
	for _, i := range indices {
		if i < 0 || i >= n {
			return fmt.Errorf("loader: memory: sample %d of %d", i, n)
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
	if err := m.fits(samples, indices); err != nil {
		return err
	}
	for f, size := range m.fields {
		switch {
		case !m.gpuOnly:
			gather(samples[f], m.data[f], size, indices, func(to, from []byte) int { return copy(to, from) })
		case ntcopy.Together(samples[f], size):
			ntcopy.Rows(samples[f], m.data[f], size, indices)
		default:
			gather(samples[f], m.data[f], size, indices, ntcopy.Copy)
		}
	}
	return nil
}

// gather copies the samples of the given numbers to one place, back to back.
// Neighbours are one copy.
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
