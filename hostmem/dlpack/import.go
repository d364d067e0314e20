package dlpack

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// An Imported is a tensor of another library, in host memory and without gaps. Close it.
// Its methods may be called from any goroutine; Bytes must not be used after Close.
type Imported struct {
	Tensor

	mem     []byte
	deleter func()
	closed  atomic.Bool
}

// Import takes a DLManagedTensorVersioned of another library. The memory stays that
// library's, and stays valid until Close, which calls the deleter; an Imported that is
// lost without Close is leaked. It is ordinary or pinned memory, at any address:
// alignment is not checked. Work that writes the memory, on the CPU or with a GPU, must be
// done. The memory of a ReadOnly tensor must not be written. Import does not block.
//
// The error wraps [errors.ErrUnsupported] for memory of a GPU or another device, for elements that
// are not of whole bytes, for arrays with gaps or in another order than row-major, for other major
// versions of DLPack, and on platforms other than Linux on amd64 and arm64. More than 64
// dimensions, negative or too large sizes, and a data pointer of 0 are errors too; Import cannot
// check whether an address has memory. After an error the caller still owns the tensor: see
// [Versioned.Delete].
func Import(v Versioned) (*Imported, error) {
	if err := importable(uintptr(v)); err != nil {
		return nil, err
	}
	c := at[cVersioned](uintptr(v))
	if c.major != majorVersion {
		return nil, fmt.Errorf("dlpack: import: DLPack %d.%d, and only %d.x is supported: %w", c.major, c.minor, majorVersion, errors.ErrUnsupported)
	}
	return importTensor(&c.tensor, c.flags&flagReadOnly != 0, v.Delete)
}

// ImportUnversioned is [Import] of a DLManagedTensor, of DLPack before 1.0.
func ImportUnversioned(u Unversioned) (*Imported, error) {
	if err := importable(uintptr(u)); err != nil {
		return nil, err
	}
	return importTensor(&at[cUnversioned](uintptr(u)).tensor, false, u.Delete)
}

// importable reports whether there can be a tensor at an address.
func importable(address uintptr) error {
	err := supported()
	if err == nil && address == 0 {
		err = errors.New("the address is 0")
	}
	if err != nil {
		return fmt.Errorf("dlpack: import: %w", err)
	}
	return nil
}

func importTensor(c *cTensor, readOnly bool, release func()) (*Imported, error) {
	t, n, err := c.read()
	if err != nil {
		return nil, fmt.Errorf("dlpack: import: %w", err)
	}
	t.ReadOnly = readOnly
	in := &Imported{Tensor: t, mem: []byte{}, deleter: release}
	if n == 0 {
		return in, nil
	}
	start := c.data + uintptr(c.byteOffset)
	if c.data == 0 || start < c.data || start+uintptr(n) < start {
		return nil, fmt.Errorf("dlpack: import: %d bytes at address %#x + %d: address out of range", n, c.data, c.byteOffset)
	}
	in.mem = unsafe.Slice(at[byte](start), n)
	return in, nil
}

// read returns the tensor and the number of its bytes.
func (c *cTensor) read() (t Tensor, n int, err error) {
	switch {
	case c.deviceType != CPU && c.deviceType != CUDAHost:
		return t, 0, fmt.Errorf("its device type is %d, and only host memory (%d and %d) can be imported: %w", c.deviceType, CPU, CUDAHost, errors.ErrUnsupported)
	case c.dtype.Bits == 0 || c.dtype.Bits%8 != 0 || c.dtype.Lanes == 0:
		return t, 0, fmt.Errorf("its elements are %v with %d lanes, and only whole bytes are supported: %w", c.dtype, c.dtype.Lanes, errors.ErrUnsupported)
	case c.ndim < 0 || c.ndim > maxDims || c.ndim > 0 && c.shape == 0:
		return t, 0, fmt.Errorf("it has %d dimensions, and its shape is at address %#x", c.ndim, c.shape)
	}
	t = Tensor{Device: c.deviceType, Type: c.dtype, Shape: ints(c.shape, c.ndim)}
	compact, n, err := t.layout()
	if err != nil || n == 0 || c.strides == 0 {
		return t, n, err
	}
	if strides := ints(c.strides, c.ndim); !t.same(strides, compact) {
		return t, 0, fmt.Errorf("its shape is %v and its strides are %v, and only arrays without gaps, row-major as in C, are supported: %w", t.Shape, strides, errors.ErrUnsupported)
	}
	return t, n, nil
}

// same reports whether two strides address the same elements.
func (t Tensor) same(a, b []int) bool {
	for i, n := range t.Shape {
		if n != 1 && a[i] != b[i] {
			return false
		}
	}
	return true
}

// ints copies n numbers of C's.
func ints(address uintptr, n int32) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = *at[int](address + uintptr(i)*unsafe.Sizeof(list[i]))
	}
	return list
}

// Bytes returns the memory of all elements, in row-major order, and nil after Close.
func (i *Imported) Bytes() []byte {
	if i == nil || i.closed.Load() {
		return nil
	}
	return i.mem
}

// Close calls the tensor's deleter, after which the other library may reuse the memory:
// copies that use it must be done. Close takes as long as the deleter, which no context can
// end, and always returns nil. A second Close does nothing, nor does Close of the zero
// Imported.
func (i *Imported) Close() error {
	if i != nil && i.deleter != nil && i.closed.CompareAndSwap(false, true) {
		i.deleter()
	}
	return nil
}

// Delete calls the deleter of a tensor, as its consumer does at the end. It is for a
// tensor that no consumer has taken, or that Import has refused. The address must not be
// used afterwards, also not for Delete. 0 is ignored, and so is a tensor without a
// deleter.
func (v Versioned) Delete() {
	if v != 0 {
		callDeleter(at[cVersioned](uintptr(v)).deleter, uintptr(v))
	}
}

// Delete is [Versioned.Delete] for tensors of DLPack before 1.0.
func (u Unversioned) Delete() {
	if u != 0 {
		callDeleter(at[cUnversioned](uintptr(u)).deleter, uintptr(u))
	}
}
