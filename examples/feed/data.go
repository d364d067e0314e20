//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/loader"
)

// A dataset is a source that describes its fields. Your own takes the place of vectors.
type dataset interface {
	loader.Source
	describe() []field
}

// shardOf returns every world-th sample of the data, from sample rank on. All ranks have the same
// number of samples.
func shardOf(data dataset, rank, world int) loader.Source {
	s := shard{data, rank, world}
	if _, ok := data.(loader.BatchSource); ok {
		return batchShard{s}
	}
	return s
}

type shard struct {
	dataset
	rank, world int
}

func (s shard) Len() int         { return s.dataset.Len() / s.world }
func (s shard) sample(i int) int { return i*s.world + s.rank }

func (s shard) Read(ctx context.Context, i int, sample [][]byte) error {
	return s.dataset.Read(ctx, s.sample(i), sample)
}

// A batchShard is a shard of data that reads many samples in one call.
type batchShard struct{ shard }

func (s batchShard) ReadBatch(ctx context.Context, indices []int, samples [][]byte) error {
	for at, i := range indices {
		indices[at] = s.sample(i)
	}
	return s.dataset.(loader.BatchSource).ReadBatch(ctx, indices, samples)
}

// The fields of a sample.
const (
	vector = iota // width float32
	index         // the number of the sample in the data, as an int64
)

// vectors are samples of width float32, value j of sample i is (i + j) % period, and their numbers.
type vectors struct{ n, width int }

const period = 1024

func (v vectors) Len() int      { return v.n }
func (v vectors) Fields() []int { return []int{vector: 4 * v.width, index: 8} }

func (v vectors) describe() []field {
	return []field{
		{Name: "vector", Dtype: "float32", Shape: []int{v.width}, Bytes: 4 * v.width},
		{Name: "index", Dtype: "int64", Shape: []int{}, Bytes: 8},
	}
}

func (v vectors) Read(_ context.Context, i int, sample [][]byte) error {
	x := floats(sample[vector])
	for j := range x {
		x[j] = float32((i + j) % period)
	}
	binary.LittleEndian.PutUint64(sample[index], uint64(i))
	return nil
}

func floats(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// inMemory are vectors that are in memory before they are asked for. They are copied by non-temporal stores: the
// consumer's GPU reads a batch next, and would have to fetch it from the caches of the cores that wrote it. loader.InMemory
// does so only for loaders with a device.
type inMemory struct {
	vectors
	fields [2][]byte
}

func newInMemory(v vectors) (dataset, error) {
	m := inMemory{vectors: v}
	sizes := v.Fields()
	for f, size := range sizes {
		m.fields[f] = make([]byte, v.n*size)
	}
	for i := range v.n {
		sample := [][]byte{m.fields[vector][i*sizes[vector]:][:sizes[vector]], m.fields[index][i*sizes[index]:][:sizes[index]]}
		if err := v.Read(context.Background(), i, sample); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m inMemory) Read(ctx context.Context, i int, sample [][]byte) error {
	return m.ReadBatch(ctx, []int{i}, sample)
}

// ReadBatch implements loader.BatchSource.
func (m inMemory) ReadBatch(_ context.Context, indices []int, samples [][]byte) error {
	for f, size := range m.Fields() {
		if err := loader.CopySamples(samples[f], m.fields[f], size, indices); err != nil {
			return err
		}
	}
	return nil
}

// slow are vectors of a store that takes its time to answer, and that are normalised on the way.
type slow struct {
	vectors
	wait time.Duration
}

func (s slow) Read(ctx context.Context, i int, sample [][]byte) error {
	select {
	case <-time.After(s.wait):
	case <-ctx.Done():
		return ctx.Err()
	}
	return s.vectors.Read(ctx, i, sample)
}

// normalise makes the mean of a vector zero, and its standard deviation one.
func normalise(_ context.Context, i int, sample [][]byte) error {
	x := floats(sample[vector])
	var sum, squares float64
	for _, y := range x {
		sum += float64(y)
		squares += float64(y) * float64(y)
	}
	n := float64(len(x))
	mean := sum / n
	deviation := math.Sqrt(squares/n - mean*mean)
	if deviation == 0 {
		return fmt.Errorf("sample %d has no deviation", i)
	}
	for j, y := range x {
		x[j] = float32((float64(y) - mean) / deviation)
	}
	return nil
}
