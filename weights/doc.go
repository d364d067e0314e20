// Package weights brings the tensors of a model from its files onto GPUs, at the
// speed of their links, and back. It reads safetensors and GGUF files, alone, with an index, or
// split into parts, and writes safetensors.
//
//	l, err := weights.LoadModel(ctx, dev, "/models/llama", weights.LoadOptions{}) // a directory, an index or a file
//	p, err := l.Ptr("model.embed_tokens.weight")                                  // a cudart.DevPtr
//	err = l.Close()
//
// Its steps can be taken alone: [OpenModel] reads headers, [NewPlan] places tensors, and
// [Plan.LoadNew] or [Plan.Load] copies them.
//
// # Files
//
// [OpenModel], [OpenFile] and [Parse] read headers only. A [Tensor] has its name, its type, its shape,
// and its place in a file. [File.Reader] reads the tensors' bytes for other uses.
//
// [OpenModelFS] opens models of other sources: an [io/fs.FS] whose files can be read at offsets. Package httpfs has those
// of HTTP servers and of object stores. They are read in long ranges, several at once, with their bytes in pinned
// memory as they come; none is kept on disk.
//
// # Untrusted files
//
// A file from the internet may have been made by an attacker, or have been cut off. Before any
// tensor is returned, the whole header is compared with the rules of the format and the size of the
// file: lengths and counts, types, products of shapes, and that the tensors are within the file, do
// not overlap and leave no bytes between them. A file that breaks a rule is refused as a whole,
// with a [FormatError] that names the file, the tensor, what was found and what was expected.
// Memory and time grow in proportion to the header, which is limited to 100 MB: 10^6 tensors take
// one or two seconds of one core, and 360 MB.
//
// The rules are those of the formats' descriptions and of the reference readers,
// huggingface/safetensors and ggml. Stricter than these readers:
//   - names of tensors are UTF-8, not empty, and without zero bytes;
//   - in a safetensors header no key that has a meaning appears twice, tensors have at most 64
//     dimensions, and values are nested at most 10,000 levels deep;
//   - a GGUF header has at most 100 MB, a key at most 65535 bytes, and a bool is 0 or 1;
//   - a GGUF tensor without elements is refused if the product of the dimensions outside of the 0
//     exceeds [math.MaxInt];
//   - big-endian GGUF files are refused, because a GPU could not use their tensors as they are;
//   - the weight_map of an index has no key twice, and each tensor is in the file that it names.
//
// More lenient:
//   - white space may precede the { of a safetensors header: the reader accepts it, the format's
//     description does not;
//   - keys of a safetensors tensor's entry that the format does not have are ignored, as its reader
//     does;
//   - GGUF's version 1 is read, GGUF tensors may have names of more than 63 bytes and be listed in any
//     order, and the padding behind the last tensor may be missing.
//
// Different: if a model has an index, only the tensors that the index assigns to a file belong to
// the model. Transformers loads all tensors of the file. In some models, other files still contain
// older copies of tensors under the same names. [File.Tensors] returns all tensors of a file.
//
// # Models of several files
//
// A model is opened as a whole or not at all, whether by its directory, its index or one of its files. The
// names, the index and the headers must agree: files named name-00001-of-00003.safetensors or .gguf
// are one model of three parts, with or without an index or GGUF's split.* keys, and the error
// names parts that are missing. [OpenModel] has the rules.
//
// The files that an index names are in its directory, or in folders below it. A file
// may be a symbolic link to anywhere, as in Hugging Face's cache; a folder that links
// lead out of the directory is refused.
//
// # Plans
//
// [NewPlan] places chosen tensors in the memory of devices, aligned and in the order of the
// files. [PlanShares] is for tensors that several devices get, whole, by rows or by columns ([Tensor.Slice]).
// These are pure functions: a [Plan] holds offsets and no addresses. Neighbours in a file are one copy where they are
// neighbours on the device too.
//
// # Loads
//
// [Plan.LoadNew] allocates device memory for a plan and returns it as a [Loaded], which gives addresses by name.
// [Plan.Load] copies to memory that the caller has allocated, and [Place] to addresses of the caller's choice. All
// devices are copied to at once through rings of pinned memory, by one upload of package transfer for each set of
// devices that get the same tensors; bytes that several devices get are read once. When a load fails, a [LoadError]
// names the tensor, the file and the offset, and lists the tensors that are complete.
//
// # Saves
//
// [Save] writes tensors of devices, and of the host, to a safetensors file, or to several with an index. The bytes go
// from the devices to the files without a copy of the model in memory, or from a copy in pinned memory while the
// devices go on ([SaveOptions.Snapshot]). The model that was there is replaced as a whole: a process that is killed,
// and a machine that loses power, leave the model before or the new one.
//
// # Checksums
//
// A file of Save has checksums (CRC-32C) of all of its bytes. A device computes those of its tensors before they are
// copied, and Save compares them with those of the bytes that it writes. [Verify] compares the files with them, and
// [LoadOptions.Checksums] the bytes that are on the devices after a load. A [ChecksumError] tells bytes that changed in
// a copy from those that are wrong in a file. Where a device runs no kernels, the bytes in pinned memory are compared
// instead. The key pinned.crc32c of __metadata__ has three fields with a space between them:
//
//		1048576 c1d4dd5f 8a9136aa113f7ee5...
//
//	  - the size of a block in bytes;
//	  - the checksum of the bytes before the tensors, which are the size of the header and the header, with 0 instead of
//	    each digit of this field;
//	  - the checksums of the blocks: each tensor, in the order of data_offsets, is cut into blocks from its first byte on,
//	    and the last one may be shorter. A tensor without bytes has none.
//
// A checksum is 8 hexadecimal digits in lower case.
//
// # Contexts
//
// Loads take a context, and return when it ends although a call of CUDA does not return. Functions
// that open files take none: they take as long as the file system does. That of package httpfs has a context of its own.
package weights
