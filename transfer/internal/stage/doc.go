// Package stage copies between pageable memory and GPUs.
//
// # Ring and workers
//
// A copy passes through a ring of pinned memory, of which each device has one.
// Workers of the process fill or drain it together: a chunk of up to 8 MiB in
// pieces of some hundred KiB, and the one that is done last queues the chunk's one
// copy on the link. So a ring of four chunks is enough to keep the link busy,
// and stays in the CPU's caches.
//
// # What may block
//
// Workers and ring memory are for work that does not block: copying memory, and
// reading what is in the page cache. Whatever may block (readers, writers, disks,
// callbacks, streams of callers) is its job's own to wait for, on goroutines of
// its own, and holds neither a worker nor memory of the ring meanwhile.
//
// # Fairness
//
// The goroutine that calls copies too, so that every job goes on whatever the
// workers do. Jobs that find no memory in the ring wait in the order in which they came.
package stage
