package loader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
)

// Shards returns a source of samples in files, which may be larger than the host's memory. A file,
// called a shard, has samples back to back, each with its fields back to back: fields has their
// sizes. Shards may have different numbers of samples. Sample 0 of a shard follows the last sample
// of the shard before it.
//
// Loaders of [New] register the page cache of some shards at a time, called a window
// ([hostmem.MapFile]), and have the GPU gather batches from it as with [InMemory]. Meanwhile a
// goroutine registers the next window. A window is unregistered when the copies of its samples have
// completed. So at most maxPinned bytes of shards are registered at any time, which
// Options.MaxBytes does not count: two windows, each of as many shards as fit into half of
// maxPinned if all were as large as the largest one. Shards that all fit into maxPinned are one
// window, which stays registered. The first window of an epoch is registered when the epoch begins,
// and the loop waits for it. Between loops up to two windows stay registered, until Close.
//
// Options.Shuffle is random within windows only. An epoch puts the shards into a random order,
// divides that into windows, and delivers all samples of a window, in a random order, before those
// of the next one. So a batch has samples of one window, or of two that follow each other, and it
// is a random draw from the data set only if each shard is. Distribute the samples over the shards
// at random, and let several shards fit into maxPinned: not hundreds, because a batch takes a
// kernel for each shard and field of its samples. The order depends on Seed, the number of the
// epoch, the sizes of the shards and the number of shards of a window alone. Without Shuffle
// samples come in the order of their numbers.
//
// The files must not change while the source is used. An epoch ends before the first batch of a
// window if one of its shards has another size than at first, or cannot be mapped or registered:
// the error names the shard. The next epoch tries again. With [NewHost], and within a source that
// has methods of its own, each sample is read from its file; within another source the order is not
// by windows, either.
//
// Shards asks the file system for the sizes. An error names a field or a shard: one that is not a
// regular file, or not a whole number of samples, or so large that two do not fit into maxPinned.
// New refuses a device that cannot access host memory by its address ([errors.ErrUnsupported]), and a
// BatchSize of more samples than a window may have; Options.HostBatches and Options.Transform have the CPU
// read each sample from its file, as NewHost does.
func Shards(fields []int, maxPinned int, paths ...string) (Source, error) {
	s := &shards{fields: slices.Clone(fields), paths: slices.Clone(paths), first: make([]int, 1, len(paths)+1)}
	if err := s.measure(maxPinned); err != nil {
		return nil, failed("shards", err)
	}
	return s, nil
}

type shards struct {
	fields []int
	sample int // size of a sample, in bytes
	paths  []string
	first  []int // number of each shard's first sample, and of all samples
	window int   // number of shards of a window
}

// measure sets sizes. A window has half of maxPinned.
func (s *shards) measure(maxPinned int) error {
	if len(s.fields) == 0 {
		return errors.New("there are no fields")
	}
	for f, size := range s.fields {
		if size <= 0 || size > math.MaxInt-s.sample {
			return fmt.Errorf("field %d has %d bytes: must be positive, and less than 2^63 with the others", f, size)
		}
		s.sample += size
	}
	if len(s.paths) == 0 {
		return errors.New("there are no shards")
	}
	page := os.Getpagesize()
	all, largest := 0, 0 // bytes that are registered
	for i, path := range s.paths {
		bytes, err := shardSize(path)
		if err != nil {
			return err
		}
		samples := bytes / s.sample
		switch {
		case bytes == 0 || bytes%s.sample != 0:
			return fmt.Errorf("%s has %d bytes: must be a whole number of samples of %d bytes, and not empty", path, bytes, s.sample)
		case samples > math.MaxUint32:
			return fmt.Errorf("%s has %d samples: the GPU gathers from at most %d", path, samples, math.MaxUint32)
		case bytes > math.MaxInt-page-all:
			return fmt.Errorf("%s has %d bytes: too many with the shards before it", path, bytes)
		}
		s.first = append(s.first, s.first[i]+samples)
		bytes = (bytes + page - 1) / page * page
		all, largest = all+bytes, max(largest, bytes)
	}
	s.window = len(s.paths)
	if all > maxPinned {
		s.window = maxPinned / 2 / largest
	}
	if s.window < 1 {
		return fmt.Errorf("maxPinned is %d: two shards of %d bytes do not fit, so one cannot be registered while another is used", maxPinned, largest)
	}
	return nil
}

func shardSize(path string) (int, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%s is not a regular file (mode %v)", path, info.Mode())
	}
	return int(info.Size()), nil
}

func (s *shards) Len() int      { return s.first[len(s.paths)] }
func (s *shards) Fields() []int { return s.fields }

// locate returns the shard of a sample, and the number of the sample in it.
func (s *shards) locate(i int) (shard, at int) {
	shard = segment(s.first, i)
	return shard, i - s.first[shard]
}

// segment returns the index of the last of the ascending starts that is not above i.
func segment(starts []int, i int) int {
	at, found := slices.BinarySearch(starts, i)
	if found {
		return at
	}
	return at - 1
}

// samples returns the number of samples of a shard.
func (s *shards) samples(shard int) int { return s.first[shard+1] - s.first[shard] }

// Read implements Source.
func (s *shards) Read(_ context.Context, i int, sample [][]byte) error {
	if i < 0 || i >= s.Len() {
		return fmt.Errorf("loader: shards: sample %d of %d", i, s.Len())
	}
	if err := fits(sample, s.fields, 1); err != nil {
		return fmt.Errorf("loader: shards: %w", err)
	}
	shard, at := s.locate(i)
	file, err := os.Open(s.paths[shard])
	if err != nil {
		return fmt.Errorf("loader: shards: %w", err)
	}
	defer file.Close()
	off := int64(at * s.sample)
	for _, field := range sample {
		if n, err := file.ReadAt(field, off); n < len(field) {
			if err == io.EOF {
				err = fmt.Errorf("it shrank: %w", io.ErrUnexpectedEOF)
			}
			return fmt.Errorf("loader: shards: %d bytes of %s at %d: %w", len(field), s.paths[shard], off, err)
		}
		off += int64(len(field))
	}
	return nil
}

// check returns an error if a batch may have samples of more than two windows.
func (s *shards) check(batchSize int) error {
	if len(s.paths) <= 2*s.window {
		return nil
	}
	samples := make([]int, len(s.paths))
	for i := range samples {
		samples[i] = s.samples(i)
	}
	slices.Sort(samples)
	n := 0
	for _, of := range samples[:s.window] {
		n += of
	}
	if batchSize > n {
		return fmt.Errorf("Options.BatchSize is %d: a window (%d of %d shards) may have only %d samples", batchSize, s.window, len(s.paths), n)
	}
	return nil
}
