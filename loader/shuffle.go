package loader

import "math/bits"

// A permutation is the order of the samples of one epoch. It is the same on
// every machine and with every version of Go, because programs store positions in
// it; a change of it needs another description in Options.order.
type permutation struct {
	list []uint16 // a permutation of at most maxListed samples

	// A permutation of more samples takes no memory: it is a Feistel network over the next
	// power of two, which is applied until the result is below n. With few samples its orders
	// would differ from random ones in how often samples are neighbours.
	n           uint64
	left, right uint // number of bits of the halves
	keys        [rounds]uint64
}

const (
	maxListed = 4096 // samples
	rounds    = 6    // even, so that the halves are not swapped at the end
)

func newPermutation(n int, seed uint64, epoch int) permutation {
	random := random{mix(seed) ^ mix(^uint64(epoch))}
	if n <= maxListed {
		return permutation{list: random.shuffled(n)}
	}
	b := uint(bits.Len64(uint64(n - 1)))
	p := permutation{n: uint64(n), left: b / 2, right: b - b/2}
	for i := range p.keys {
		p.keys[i] = random.next()
	}
	return p
}

// at returns the sample at position i.
func (p *permutation) at(i int) int {
	if p.list != nil {
		return int(p.list[i])
	}
	x := uint64(i)
	for {
		left, right := p.left, p.right
		for _, k := range p.keys {
			l, r := x>>right, x&(1<<right-1)
			x = r<<left | l ^ mix(r^k)&(1<<left-1)
			left, right = right, left
		}
		if x < p.n {
			return int(x)
		}
	}
}

// random is the generator SplitMix64.
type random struct{ state uint64 }

func (r *random) next() uint64 {
	r.state += 0x9e3779b97f4a7c15
	return mix(r.state)
}

// below returns a number from 0 to n-1 with equal probability (Lemire's method with rejection).
func (r *random) below(n uint64) uint64 {
	for {
		high, low := bits.Mul64(r.next(), n)
		if low >= -n%n {
			return high
		}
	}
}

// shuffled returns the numbers from 0 to n-1 in random order (Fisher-Yates).
func (r *random) shuffled(n int) []uint16 {
	list := make([]uint16, n)
	for i := range list {
		j := r.below(uint64(i) + 1)
		list[i] = list[j]
		list[j] = uint16(i)
	}
	return list
}

// mix is the finaliser of SplitMix64: every bit of x changes half of the
// result's.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
