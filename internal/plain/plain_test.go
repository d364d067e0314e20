package plain

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

type vector [3]float32

type particle struct {
	Position, Velocity vector
	ID                 uint32
	Alive              bool
	next               uintptr
}

type named struct {
	Particle particle
	Names    [2]struct{ Name string }
}

func TestNumbersArraysAndStructsArePlain(t *testing.T) {
	t.Parallel()
	for range 2 { // the second time from the cache
		assert.NoError(t, Check[int8]())
		assert.NoError(t, Check[complex128]())
		assert.NoError(t, Check[bool]())
		assert.NoError(t, Check[uintptr]())
		assert.NoError(t, Check[vector]())
		assert.NoError(t, Check[particle]())
		assert.NoError(t, Check[[2][3]particle]())
	}
	assert.Zero(t, particle{}.next)
}

func TestTypesWithPointersAreRefusedByName(t *testing.T) {
	t.Parallel()
	for range 2 {
		assert.EqualError(t, Check[string](), "string is a string, which holds a pointer to host memory")
		assert.EqualError(t, Check[named](), "plain.named.Names[].Name is a string, which holds a pointer to host memory")
		for _, err := range []error{
			Check[*int](), Check[[]byte](), Check[any](), Check[map[int]int](), Check[chan int](), Check[func()](),
			Check[unsafe.Pointer](), Check[[4]error](), Check[struct{ P *particle }](),
		} {
			assert.ErrorContains(t, err, "holds a pointer to host memory")
		}
		assert.EqualError(t, Check[struct{}](), "struct {} has no bytes")
		assert.EqualError(t, Check[[0]int](), "[0]int has no bytes")
	}
}

func TestCheckDoesNotAllocate(t *testing.T) {
	assert.NoError(t, Check[particle]())
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = Check[particle]() }))
}
