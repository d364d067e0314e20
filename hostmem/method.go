package hostmem

// A Method is how the GPU was given direct access to memory.
//
// Not every host lets cudaHostRegister pin memory. [Alloc] tries, in this order:
//
//   - one registration, or one for each Options.Chunk;
//   - if that is refused for its size or for the number of registrations: as few
//     registrations as the driver accepts, from 16 GiB down to 64 MiB, each half as
//     large as the one before. On Linux 6.11 they start at 1 GiB, because a
//     refused call of more than 2 GiB leaks its memory until the next boot;
//   - if these are refused too, or registering is not supported at all, as on hosts
//     with confidential computing and on some integrated GPUs: cudaHostAlloc, of the
//     bytes rounded up to a page.
//
// Buffers from cudaHostAlloc are used as others are. But cudaFreeHost waits for all
// work of the device, so Close takes as long. CloseContext returns with its context, and
// the memory is freed later.
//
// What worked is remembered for the device, so that the next Alloc does not try the
// rest again. It is forgotten when it fails, and a refusal for size or number also
// when memory of the device is unregistered. A host that is short of memory gets an
// error and no further attempts.
//
// Where the GPU uses the host's page tables (the attribute
// PageableMemoryAccessUsesHostPageTables is 1), as on GH200, it accesses all memory of
// the process directly. Registering would not page-lock it, so nothing is registered.
// To a device of the same host that does not use them, such memory is pageable.
//
// [Register] and [MapFile] make smaller registrations, too, but never move memory to
// other addresses: what cudaHostAlloc would be needed for is an error.
type Method int

// The methods. One that the options do not request has a note: see [Info].
const (
	Registered        Method = iota // by one call of cudaHostRegister
	RegisteredInSpans               // by several: see [Buffer.Spans]
	HostAllocated                   // by cudaHostAlloc
	SharedPageTables                // not pinned: the GPU uses the host's page tables
)

// String returns "registered", "registered in spans", "cudaHostAlloc" or "shared page
// tables", and "unknown" for other values.
func (m Method) String() string {
	names := [...]string{
		Registered: "registered", RegisteredInSpans: "registered in spans", HostAllocated: "cudaHostAlloc", SharedPageTables: "shared page tables",
	}
	if m < 0 || int(m) >= len(names) {
		return "unknown"
	}
	return names[m]
}

func (m *Buffer) method() Method {
	switch {
	case m.allocated != nil:
		return HostAllocated
	case m.host != nil && m.host.shared():
		return SharedPageTables
	case m.background != nil || len(m.registered()) > 1: // of the spans when it was opened
		return RegisteredInSpans
	}
	return Registered
}
