// Package dlpack exchanges host memory with other libraries of the process as DLPack
// tensors, without copies. [Export] makes a tensor of pinned memory of package hostmem,
// for NumPy, CuPy, PyTorch, TVM or any C code that takes a DLManagedTensorVersioned.
// [Import] makes bytes of another library's tensor in host memory.
//
//	l, err := p.Get(ctx, 4*1000) // a lease of a pool, or a hostmem.Buffer
//	v, err := dlpack.Export(l.Bytes(), dlpack.Tensor{
//		Type: dlpack.DataType{Code: dlpack.Float, Bits: 32}, Shape: []int{10, 100},
//	}, func() { l.Release(stream) })
//	// v is the address of a DLManagedTensorVersioned for the other library.
//
//	in, err := dlpack.Import(v) // one of another library's
//	err = copier.Upload(ctx, dst, in.Bytes())
//	err = in.Close()
//
// In Python, v is what a capsule named "dltensor_versioned" has as its pointer.
//
// # Memory lifetime
//
// An exported tensor is in use until its consumer calls the deleter, on any thread. Until
// then the memory must not be closed or released by other means, and a pool that it is
// from returns cudart.ErrInUse from Close. The structs that C reads are outside Go's heap.
//
// After the deleter the consumer does not touch the memory, but copies that it has queued
// on streams of the GPU may still run: the function that releases the memory must wait for
// them, or name those streams. Export explains how.
package dlpack
