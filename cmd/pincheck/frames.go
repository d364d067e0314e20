package main

import (
	"errors"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
)

// framesExperiment is the experiment that has the frameFlags.
const framesExperiment = "frames"

// frameFlags are the flags of the experiment frames, named as those of the PyTorch script that it measures.
type frameFlags struct {
	batch, repeats, warmUp int
	shape                  shape
	dtype                  string
}

// elementBytes are the types of --dtype, by PyTorch's names.
var elementBytes = map[string]int{
	"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}

var dtypes = []string{"uint8", "int8", "int16", "float16", "bfloat16", "int32", "float32", "int64", "float64"}

// maxRepeats keeps all samples of a series in memory, and its estimate in a time.Duration.
const maxRepeats = 100_000

func (f *frameFlags) register(cmd *cobra.Command) {
	f.shape = shape{3, 3840, 2160}
	flags := cmd.Flags()
	flags.IntVar(&f.batch, "batch", 0, "frames in a batch (default: as many as memory allows)")
	named(flags, "batch", "N")
	flags.Var(&f.shape, "shape", "dimensions of a frame")
	flags.StringVar(&f.dtype, "dtype", "float32", "type of its elements: "+strings.Join(dtypes, ", "))
	named(flags, "dtype", "TYPE")
	flags.IntVar(&f.repeats, "repeats", 0, "samples of each method (default: as many as fit in its time)")
	named(flags, "repeats", "N")
	flags.IntVar(&f.warmUp, "warmup", 1, "samples to discard first")
	named(flags, "warmup", "N")
	for _, name := range []string{"batch", "shape", "repeats", "warmup"} {
		complete[string](cmd, name)
	}
	complete(cmd, "dtype", dtypes...)
}

// validate returns what the flags ask for, zeros for flags that are not set.
func (f *frameFlags) validate(cmd *cobra.Command, chosen []measure.Experiment) (out measure.Frames, err error) {
	changed := cmd.Flags().Changed
	if set := given(cmd, "batch", "shape", "dtype", "repeats", "warmup"); len(set) > 0 && len(chosen) != 1 {
		return out, usagef("%s: run bench %s alone", set[0], framesExperiment)
	}
	size := elementBytes[f.dtype]
	switch {
	case changed("batch") && f.batch < 1:
		return out, usagef("--batch %d: must be at least 1", f.batch)
	case size == 0:
		return out, wrongValue("dtype", f.dtype, dtypes)
	case changed("repeats") && (f.repeats < 1 || f.repeats > maxRepeats):
		return out, usagef("--repeats %d: must be from 1 to %d", f.repeats, maxRepeats)
	case f.warmUp < 0 || f.warmUp > maxRepeats:
		return out, usagef("--warmup %d: must be from 0 to %d", f.warmUp, maxRepeats)
	case changed("repeats") && changed("duration"):
		return out, usagef("--repeats and --duration exclude each other")
	case changed("sizes") && (changed("batch") || changed("shape") || changed("dtype")):
		return out, usagef("--sizes excludes --batch, --shape and --dtype")
	}
	if changed("shape") || changed("dtype") || changed("batch") {
		for _, n := range f.shape {
			if n > largestSize/size {
				return out, usagef("--shape %v of %s: a frame must be at most 1 TiB", &f.shape, f.dtype)
			}
			size *= n
		}
		if f.batch > largestSize/size {
			return out, usagef("--batch %d of frames of %v %s: must be at most 1 TiB", f.batch, &f.shape, f.dtype)
		}
		out.Batch, out.Bytes = f.batch, size
	}
	out.Repeats = f.repeats
	if changed("warmup") {
		out.WarmUp = &f.warmUp
	}
	return out, nil
}

// A shape is the value of --shape: dimensions, such as 3x3840x2160.
type shape []int

func (s *shape) String() string {
	var parts []string
	for _, n := range *s {
		parts = append(parts, strconv.Itoa(n))
	}
	return strings.Join(parts, "x")
}

func (s *shape) Type() string { return "SHAPE" }

func (s *shape) Set(text string) error {
	var dimensions shape
	for part := range strings.SplitSeq(text, "x") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 1 {
			return errors.New("want dimensions from 1 on, such as 3x3840x2160")
		}
		dimensions = append(dimensions, n)
	}
	*s = dimensions
	return nil
}
