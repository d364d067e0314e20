package dlpack

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// A DeviceType is a DLDeviceType: the kind of memory of a tensor.
type DeviceType int32

// The kinds of host memory.
const (
	CPU      DeviceType = 1
	CUDAHost DeviceType = 3 // pinned
)

// A TypeCode is a DLDataTypeCode: the kind of number of an element. Any code of DLPack may
// be used, also codes without a constant here.
type TypeCode uint8

// The common codes.
const (
	Int     TypeCode = 0
	Uint    TypeCode = 1
	Float   TypeCode = 2 // IEEE 754
	BFloat  TypeCode = 4
	Complex TypeCode = 5 // the bits are those of both parts
	Bool    TypeCode = 6
)

// A DataType is a DLDataType: the type of an element, in the byte order of the host.
type DataType struct {
	Code  TypeCode // kind of number
	Bits  uint8    // of a lane, a multiple of 8
	Lanes uint16   // numbers in an element, for vector types; 0 is 1
}

// String returns "float32", "float32x4" or "code 8, 8 bits".
func (t DataType) String() string {
	names := [...]string{Int: "int", Uint: "uint", Float: "float", BFloat: "bfloat", Complex: "complex", Bool: "bool"}
	s := fmt.Sprintf("code %d, %d bits", t.Code, t.Bits)
	if int(t.Code) < len(names) && names[t.Code] != "" {
		s = fmt.Sprintf("%s%d", names[t.Code], t.Bits)
	}
	if t.Lanes > 1 {
		s = fmt.Sprintf("%sx%d", s, t.Lanes)
	}
	return s
}

// size returns the bytes of an element.
func (t DataType) size() int { return int(t.Bits) / 8 * max(1, int(t.Lanes)) }

// align returns the bytes to which the address of an element should be a multiple.
func (t DataType) align() uintptr {
	n := int(t.Bits) / 8
	if t.Code == Complex {
		n /= 2
	}
	return uintptr(max(1, n&-n)) // a power of two also for types of 3 bytes
}

// A Tensor describes memory as an array of any number of dimensions, none for a single
// element.
type Tensor struct {
	// Device is CUDAHost if it is 0. CPU is for consumers that refuse CUDAHost, such
	// as PyTorch: the CPU accesses both in the same way.
	Device DeviceType
	// Type is the type of an element, of whole bytes.
	Type DataType
	// Shape is the number of elements in each dimension, 0 or more.
	Shape []int
	// Strides is, for each dimension, the distance of neighbors in elements, 0 or
	// more. Nil is an array without gaps, with the last dimension's elements side by
	// side (row-major, as in C).
	Strides []int
	// ReadOnly is set if the consumer must not write.
	ReadOnly bool
}

// maxDims is the largest number of dimensions, as in NumPy and PyTorch.
const maxDims = 64

// layout returns the distances of neighbors in elements, also if Strides is nil, and the
// bytes from the start of the first element to the end of the last: 0 if there are no
// elements.
func (t *Tensor) layout() (strides []int, size int, err error) {
	negative := func(n int) bool { return n < 0 }
	switch {
	case t.Type.Bits == 0 || t.Type.Bits%8 != 0:
		return nil, 0, fmt.Errorf("Tensor.Type of %v: elements of whole bytes are supported", t.Type)
	case len(t.Shape) > maxDims:
		return nil, 0, fmt.Errorf("Tensor.Shape of %d dimensions: there can be %d", len(t.Shape), maxDims)
	case t.Strides != nil && len(t.Strides) != len(t.Shape):
		return nil, 0, fmt.Errorf("Tensor.Strides for %d dimensions: Tensor.Shape has %d", len(t.Strides), len(t.Shape))
	case slices.ContainsFunc(t.Shape, negative):
		return nil, 0, fmt.Errorf("Tensor.Shape of %v: dimension %d is negative", t.Shape, slices.IndexFunc(t.Shape, negative))
	case slices.ContainsFunc(t.Strides, negative):
		return nil, 0, fmt.Errorf("Tensor.Strides of %v: dimension %d is negative", t.Strides, slices.IndexFunc(t.Strides, negative))
	}
	strides, next, ok := t.Strides, 1, true
	if strides == nil {
		strides = make([]int, len(t.Shape))
		for i, n := range slices.Backward(t.Shape) {
			strides[i] = next
			next, ok = addProduct(0, next, n, ok)
		}
	}
	if ok && slices.Contains(t.Shape, 0) {
		return strides, 0, nil // consumers read the strides of empty tensors, too
	}
	last, elements := 0, 1 // the index of the last element; with strides of 0 there are more elements than indices
	for i, n := range t.Shape {
		elements, ok = addProduct(0, elements, n, ok)
		last, ok = addProduct(last, n-1, strides[i], ok)
	}
	if size, ok = addProduct(t.Type.size(), last, t.Type.size(), ok); !ok {
		return nil, 0, errors.New("the tensor is larger than the address space")
	}
	return strides, size, nil
}

// addProduct returns a + b*c for numbers that are not negative. ok stays true if neither
// overflows.
func addProduct(a, b, c int, ok bool) (int, bool) {
	high, low := bits.Mul64(uint64(b), uint64(c))
	sum, carry := bits.Add64(low, uint64(a), 0)
	return int(sum), ok && high == 0 && carry == 0 && int(sum) >= 0
}
