//go:build linux && !android && (amd64 || arm64)

package loader_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"
	"sort"

	"github.com/gopinned/pinned/loader"
)

// shard is every world-th sample of a source, from sample rank on.
type shard struct {
	loader.Source
	rank, world int
}

func (s shard) Len() int { return s.Source.Len() / s.world }

func (s shard) Read(ctx context.Context, i int, sample [][]byte) error {
	return s.Source.Read(ctx, i*s.world+s.rank, sample)
}

// Two processes share a data set by rank and world size.
func ExampleSource_shard() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	for rank := range 2 {
		l, err := loader.New(ctx, dev, shard{squares, rank, 2}, loader.Options{BatchSize: 3})
		if err != nil {
			log.Fatal(err)
		}
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println("rank", rank, numbersOf(batch))
		}
		if err := l.Close(); err != nil {
			log.Fatal(err)
		}
	}

	// Output:
	// rank 0 [0 4 16]
	// rank 0 [36 64]
	// rank 1 [1 9 25]
	// rank 1 [49 81]
}

// subset is the samples of a source with the given numbers.
type subset struct {
	loader.Source
	numbers []int
}

func (s subset) Len() int { return len(s.numbers) }

func (s subset) Read(ctx context.Context, i int, sample [][]byte) error {
	return s.Source.Read(ctx, s.numbers[i], sample)
}

// A loader over three of the samples.
func ExampleSource_subset() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	validation := subset{squares, []int{2, 3, 7}}
	l, err := loader.New(ctx, dev, validation, loader.Options{BatchSize: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		for _, i := range batch.Indices() {
			fmt.Println("sample", validation.numbers[i])
		}
		fmt.Println(numbersOf(batch))
	}

	// Output:
	// sample 2
	// sample 3
	// sample 7
	// [4 9 49]
}

// weighted is draws from a source, with replacement.
type weighted struct {
	loader.Source
	sums  []float64 // of the weights up to each sample
	draws int       // of an epoch
	epoch int
}

func (w *weighted) Len() int { return w.draws }

func (w *weighted) Read(ctx context.Context, i int, sample [][]byte) error {
	// The same draw for each Read of i in an epoch.
	x := rand.New(rand.NewPCG(uint64(w.epoch), uint64(i))).Float64() * w.sums[len(w.sums)-1]
	n := sort.Search(len(w.sums), func(n int) bool { return w.sums[n] > x })
	return w.Source.Read(ctx, n, sample)
}

// Samples 3 and 5 are drawn, the second nine times as often.
func ExampleSource_weighted() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	source := &weighted{Source: squares, draws: 1000}
	sum := 0.0
	for _, weight := range []float64{3: 1, 5: 9, 9: 0} {
		sum += weight
		source.sums = append(source.sums, sum)
	}
	l, err := loader.New(ctx, dev, source, loader.Options{BatchSize: 100})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	drawn := make(map[uint64]int)
	for source.epoch = range l.Epochs(2) { // the loader does not call the source between loops
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			for _, n := range numbersOf(batch) {
				drawn[n]++
			}
		}
	}
	fmt.Println(len(drawn), "samples;", drawn[25] > 1700, drawn[9] > 100)

	// Output:
	// 2 samples; true true
}

// Sentences of different lengths: the fields have the maximum length, and one more field has the
// length of the sentence.
func ExampleSource_variableLength() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	sentences := []string{"to be", "or not", "to be"}
	const text, length, maxLength = 0, 1, 8
	source := loader.Func(len(sentences), []int{text: maxLength, length: 4}, func(_ context.Context, i int, sample [][]byte) error {
		n := copy(sample[text], sentences[i])
		clear(sample[text][n:]) // it contains bytes of an earlier sample
		binary.LittleEndian.PutUint32(sample[length], uint32(n))
		return nil
	})
	l, err := loader.New(ctx, dev, source, loader.Options{BatchSize: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		for i := range batch.Len() {
			n := binary.LittleEndian.Uint32(batch.Host(length)[4*i:])
			fmt.Printf("%q\n", batch.Host(text)[maxLength*i:][:n])
		}
	}

	// Output:
	// "to be"
	// "or not"
	// "to be"
}

// numbersOf returns the samples of a batch of squares.
func numbersOf(batch *loader.Batch) []uint64 {
	var list []uint64
	for b := range slices.Chunk(batch.Host(0), 8) {
		list = append(list, binary.LittleEndian.Uint64(b))
	}
	return list
}

// Batches in memory that another process maps: here it is of the Go heap. The position is a place in
// that memory.
func ExampleNewHost() {
	ctx := context.Background()
	var memory []byte
	l, err := loader.NewHost(squares, loader.Options{BatchSize: 4, Prefetch: 1}, func(n int) ([]byte, error) {
		memory = make([]byte, n) // a program maps a file
		return memory, nil
	})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		for i := range batch.Len() {
			fmt.Print(binary.LittleEndian.Uint64(memory[batch.Offset(0)+8*i:]), " ")
		}
	}

	// Output:
	// 0 1 4 9 16 25 36 49 64 81
}

// Samples that are in memory of the program's own.
func ExampleCopy() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	images := make([][]byte, 1000)
	for i := range images {
		images[i] = make([]byte, 4096)
		images[i][0] = byte(i)
	}
	source := loader.Func(len(images), []int{4096}, func(_ context.Context, i int, sample [][]byte) error {
		loader.Copy(sample[0], images[i])
		return nil
	})
	l, err := loader.New(ctx, dev, source, loader.Options{BatchSize: 256})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	n := 0
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		for i := range batch.Len() {
			if batch.Host(0)[i*4096] == byte(n) {
				n++
			}
		}
	}
	fmt.Println(n, "images in order")
	// Output: 1000 images in order
}
