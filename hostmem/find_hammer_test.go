//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart/cudasim"
)

// While buffers and registrations come and go, each is found for as long as it is
// open, at its place, and memory that is not pinned never is.
func TestFindWhileOthersComeAndGo(t *testing.T) {
	t.Parallel()
	const goroutines, rounds, page = 8, 60, 4096
	g := newSimFixture(t, cudasim.Config{})
	plain := mapped(t, -1, 16*page, readWrite, private)
	var wg sync.WaitGroup
	for i := range goroutines {
		others := mapped(t, -1, 16*page, readWrite, private)
		wg.Go(func() {
			random := rand.New(rand.NewPCG(3, uint64(i)))
			is := func(mem []byte, whole int) bool {
				from := random.IntN(len(mem))
				to := from + 1 + random.IntN(len(mem)-from)
				p, off, ok := Find(mem[from:to])
				return assert.True(t, ok) && assert.Equal(t, whole, p.Len()) && assert.Equal(t, from, off)
			}
			isNot := func(mem []byte) {
				_, _, ok := Find(mem[random.IntN(len(mem)):])
				assert.False(t, ok)
			}
			for range rounds {
				b, err := Alloc(t.Context(), g.Dev, 1+random.IntN(8*page), Options{})
				if !assert.NoError(t, err) {
					return
				}
				r, err := Register(t.Context(), g.Dev, others[page/2:][:1+random.IntN(12*page)], RegisterOptions{})
				if !assert.NoError(t, err) {
					return
				}
				is(b.Bytes(), b.Len())
				is(r.Bytes(), r.Len())
				isNot(plain)
				isNot(others[:page/2])
				assert.NoError(t, r.Close())
				isNot(others)
				is(b.Bytes(), b.Len())
				assert.NoError(t, b.Close())
			}
		})
	}
	wg.Wait()
}
