package elements

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

type half uint16

type pair struct {
	Key   uint32
	Value [2]float64
	_     uint16
}

func TestNumbersAndWhatIsMadeOfThemAreElements(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		Check[int8](), Check[int](), Check[uint64](), Check[uintptr](), Check[float32](), Check[complex128](),
		Check[half](), Check[[3]half](), Check[pair](), Check[[2]pair](), Check[struct{ a, b pair }](),
	} {
		assert.NoError(t, err)
	}
}

func TestTypesWithPointersAreNoElements(t *testing.T) {
	t.Parallel()
	for range 2 { // the second time from the cache
		for want, err := range map[string]error{
			"elements of type *int: a *int holds pointers":                           Check[*int](),
			"elements of type string: a string holds pointers":                       Check[string](),
			"elements of type []uint8: a []uint8 holds pointers":                     Check[[]byte](),
			"elements of type interface {}: a interface {} holds pointers":           Check[any](),
			"elements of type unsafe.Pointer: a unsafe.Pointer holds pointers":       Check[unsafe.Pointer](),
			"elements of type struct { n [2]string }: field n: a string holds":       Check[struct{ n [2]string }](),
			"elements of type [0]func(): a func() holds pointers":                    Check[[0]func()](),
			"elements of type bool: a bool may not have any byte":                    Check[bool](),
			"elements of type struct { ok bool }: field ok: a bool may not have any": Check[struct{ ok bool }](),
			"elements of type struct {} have no bytes":                               Check[struct{}](),
			"elements of type [0]int have no bytes":                                  Check[[0]int](),
		} {
			assert.ErrorContains(t, err, want)
		}
	}
}

func TestKnownTypesAreCheckedWithoutAllocations(t *testing.T) {
	assert.NoError(t, Check[pair]())
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = Check[pair]() }))
}
