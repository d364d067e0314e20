package loader

import "math/bits"

// A permutation of [0, n) that needs no memory: a Feistel network over the next
// power of two, walked until it is back within n. It is the same on every
// machine.
type permutation struct {
	n           uint64
	left, right uint // bits of the halves
	keys        [rounds]uint64
}

const rounds = 6 // even, so that the halves are in place again

func newPermutation(n int, seed uint64, epoch int) permutation {
	b := uint(bits.Len64(uint64(n - 1)))
	p := permutation{n: uint64(n), left: b / 2, right: b - b/2}
	state := mix(seed) ^ mix(^uint64(epoch))
	for i := range p.keys {
		state += 0x9e3779b97f4a7c15
		p.keys[i] = mix(state)
	}
	return p
}

// at is where position i goes.
func (p *permutation) at(i int) int {
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

// mix is the finaliser of SplitMix64: every bit of x changes half of the
// result's.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
