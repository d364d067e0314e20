package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"runtime"
	"sync"
)

// sizes are those of a graph and its network. They and the seed decide everything.
type sizes struct {
	Nodes        int    `json:"nodes"`
	EdgesPerNode int    `json:"edges_per_node"`
	Features     int    `json:"features"`
	Hidden       int    `json:"hidden"`
	Classes      int    `json:"classes"`
	Seed         uint64 `json:"seed"`
}

// edges is the number of edges, with one of each node to itself.
func (s sizes) edges() int { return s.Nodes * (s.EdgesPerNode + 1) }

// panelBytes is the size of so many columns of the features.
func (s sizes) panelBytes(width int) int { return 4 * s.Nodes * width }

// bytes is the size of all large memory.
func (s sizes) bytes() int { return 4*s.Nodes*(2*s.Features+2*s.Classes) + 12*s.edges() }

// A graph is random: edges between random nodes, random features. A node's label is the
// largest of its first features, so that there is something to learn.
type graph struct {
	sizes
	from, to []uint32
	weight   []float32 // of each edge: 1 by the number of edges to its target
}

func newGraph(s sizes) *graph {
	g := &graph{sizes: s, from: make([]uint32, s.edges()), to: make([]uint32, s.edges()), weight: make([]float32, s.edges())}
	parallel(len(g.from), func(first, last int) {
		for e := first; e < last; e++ {
			if e < s.Nodes {
				g.from[e], g.to[e] = uint32(e), uint32(e)
				continue
			}
			g.from[e] = uint32(hash(s.Seed, 1, e) % uint64(s.Nodes))
			g.to[e] = uint32(hash(s.Seed, 2, e) % uint64(s.Nodes))
		}
	})
	count := make([]uint32, s.Nodes)
	for _, t := range g.to {
		count[t]++
	}
	parallel(len(g.to), func(first, last int) {
		for e := first; e < last; e++ {
			g.weight[e] = 1 / float32(count[g.to[e]])
		}
	})
	return g
}

// parallel calls f for parts of n items, on all cores.
func parallel(n int, f func(first, last int)) {
	var all sync.WaitGroup
	for i, k := 0, runtime.GOMAXPROCS(0); i < k; i++ {
		all.Go(func() { f(n*i/k, n*(i+1)/k) })
	}
	all.Wait()
}

// hash gives a random number by its place.
func hash(seed, what uint64, i int) uint64 {
	z := seed*0x2545F4914F6CDD1D + what*0xD1342543DE82EF95 + uint64(i)*0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// uniform is a random number from -1 to 1 that float32 holds exactly.
func uniform(seed, what uint64, i int) float32 {
	return float32(int32(hash(seed, what, i)>>40)-1<<23) / (1 << 23)
}

// features fills dst with elements from first on of some columns of the features, row by row.
func (g *graph) features(dst []float32, first, column, columns int) {
	parallel(len(dst), func(from, to int) {
		for i := from; i < to; i++ {
			row, c := (first+i)/columns, (first+i)%columns
			dst[i] = uniform(g.Seed, 3, row*g.Features+column+c)
		}
	})
}

// labels returns all labels.
func (g *graph) labels() []uint32 {
	labels := make([]uint32, g.Nodes)
	parallel(g.Nodes, func(from, to int) {
		for i := from; i < to; i++ {
			best := uniform(g.Seed, 3, i*g.Features)
			for c := 1; c < g.Classes; c++ {
				if x := uniform(g.Seed, 3, i*g.Features+c); x > best {
					best, labels[i] = x, uint32(c)
				}
			}
		}
	})
	return labels
}

// weights returns the first weights of a layer, row by row.
func (g *graph) weights(layer uint64, in, out int) []float32 {
	w := make([]float32, in*out)
	bound := float32(math.Sqrt(6 / float64(in+out)))
	for i := range w {
		w[i] = bound * uniform(g.Seed, 10+layer, i)
	}
	return w
}

// write stores everything in a file: a line of JSON with the sizes, then in little endian, row
// by row, from, to (uint32), features (float32), labels (uint32), and the weights of both layers.
func (g *graph) write(name string) (err error) {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := bufio.NewWriterSize(file, 1<<20)
	header, err := json.Marshal(g.sizes)
	if err != nil {
		return err
	}
	if _, err := w.Write(append(header, '\n')); err != nil {
		return err
	}
	parts := []any{g.from, g.to}
	for _, p := range parts {
		if err := binary.Write(w, binary.LittleEndian, p); err != nil {
			return err
		}
	}
	row := make([]float32, min(g.Nodes, 1<<14)*g.Features)
	for at, all := 0, g.Nodes*g.Features; at < all; at += len(row) {
		row = row[:min(len(row), all-at)]
		g.features(row, at, 0, g.Features)
		if err := binary.Write(w, binary.LittleEndian, row); err != nil {
			return err
		}
	}
	for _, p := range []any{g.labels(), g.weights(1, g.Features, g.Hidden), g.weights(2, g.Hidden, g.Classes)} {
		if err := binary.Write(w, binary.LittleEndian, p); err != nil {
			return err
		}
	}
	return w.Flush()
}
