// Package dlpack exchanges host memory with other libraries of the process as DLPack
// tensors: pinned memory of package hostmem goes to NumPy, CuPy, PyTorch, TVM or any C
// code that takes a DLManagedTensorVersioned, and tensors of theirs in host memory come
// in as bytes. Nothing is copied.
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
// An exported tensor is in use until its consumer calls the deleter, which C may do on
// any thread. Until then the memory must not be closed or released by other means.
// What Export allocates for C lies outside Go's heap.
//
// The deleter says that the consumer does not touch the memory any more. It says nothing
// about copies that the consumer has queued on streams of the GPU: the function that
// releases the memory must wait for them, or name those streams. Export explains how.
package dlpack
