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
	m := memory{fields: slices.Clone(fields), data: slices.Clone(data)}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("loader: memory: %w", err)
	}
	return m, nil
}

// memory is a data set in memory.
type memory struct {
	fields []int
	data   [][]byte
}

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

// Read implements Source.
func (m memory) Read(_ context.Context, i int, sample [][]byte) error {
	for f, size := range m.fields {
		copy(sample[f], m.data[f][i*size:])
	}
	return nil
}

// ReadBatch implements BatchSource.
func (m memory) ReadBatch(_ context.Context, indices []int, run [][]byte) error {
	for f, size := range m.fields {
		gather(run[f], m.data[f], size, indices, func(to, from []byte) int { return copy(to, from) })
	}
	return nil
}

// An unread memory is one whose samples only the device reads: nothing transforms them.
// They are written past the caches, from which the device would have to fetch them.
type unread struct{ memory }

// mostUnread is the largest batch of which that is done. From 2 MiB on batches are quicker
// without: probably they have left the cores' caches when they are copied.
const mostUnread = 1 << 20

// ReadBatch implements BatchSource.
func (m unread) ReadBatch(_ context.Context, indices []int, run [][]byte) error {
	for f, size := range m.fields {
		if ntcopy.Together(run[f], size) {
			ntcopy.Rows(run[f], m.data[f], size, indices)
		} else {
			gather(run[f], m.data[f], size, indices, ntcopy.Copy)
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
