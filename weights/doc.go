// Package weights brings the tensors of a model from its files onto GPUs, at the
// speed of their links. It reads safetensors and GGUF files, alone, with an index, or
// split into parts.
//
//	m, err := weights.OpenModel("/models/llama") // a directory, an index or a file
//	for t := range m.Tensors() {
//		fmt.Println(t.Name, t.DType, t.Shape, t.File.Name(), t.Offset, t.Size)
//	}
//	plan, err := weights.NewPlan(m.Tensors(), nil, weights.PlanOptions{})
//	p, err := dev.Malloc(plan.Devices[0].Bytes)
//	memory := map[int]weights.Memory{0: {Device: dev, Ptr: p, Bytes: plan.Devices[0].Bytes}}
//	err = plan.Load(ctx, memory, weights.LoadOptions{})
//	err = m.Close()
//
// Opening reads headers only. [File.Reader] reads the tensors' bytes, at
// [Tensor].Offset, for other uses.
//
// # Untrusted files
//
// A file from the internet may have been made by an attacker, or have been cut
// off. Before any tensor is returned, all that the header says is compared with
// the rules of the format and the size of the file: lengths and counts, types,
// products of shapes, and that the tensors lie within the file, do not overlap
// and leave no bytes between them. A file that breaks a rule is refused as a
// whole, with a [FormatError] that names the file, the tensor, what was found
// and what was expected. Memory and time grow in proportion to the header,
// which has at most 100 MB.
//
// The rules are those of the reference readers, huggingface/safetensors and
// ggml. Stricter than these: in safetensors files a key may not appear twice,
// and a tensor's entry has dtype, shape and data_offsets, nothing else, and at
// most 64 dimensions; in GGUF files the header has at most 100 MB, a key at
// most 65535 bytes, and a bool is 0 or 1; names of tensors have 1 to 65535
// bytes of UTF-8, none of them zero. More lenient: GGUF's version 1 is read,
// its tensors may have names of more than 63 bytes, and be listed in any order.
// Big-endian GGUF files are refused, because a GPU could not use their tensors
// as they are.
//
// # Plans
//
// [NewPlan] places chosen tensors in the memory of devices, aligned, in the
// order of the files, and merges what lies together: neighbours are one read of
// the file, and one copy where they are neighbours on the device too. [PlanShares]
// is for tensors that several devices get, whole or by rows. Both are pure
// functions; a [Plan] holds offsets and no addresses.
//
// # Loads
//
// [Plan.Load] reads and copies what a plan says, to memory that the caller has
// allocated. All devices are copied to at once through rings of pinned memory, by
// package transfer; what several devices get is read once. [Place] does the same for
// addresses of the caller's choice. When either fails, a [LoadError] names the tensor,
// the file and the offset, and lists the tensors that are complete.
package weights
