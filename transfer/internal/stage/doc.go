// Package stage copies between pageable memory and GPUs.
//
// # Ring and workers
//
// A copy passes through a ring of pinned memory. Each device has one ring. Workers of the
// process fill or drain it together: a chunk has up to 8 MiB, in pieces of some hundred
// KiB, and the worker with the last piece queues one copy of the chunk on the link. So a
// ring of four chunks is enough to keep the link busy, and stays in the CPU's caches.
//
// # What may block
//
// Workers and ring memory are for work that does not block: copying memory, and
// reading from the page cache. Work that may block (readers, writers, disks,
// callbacks, streams of callers) runs on goroutines of its job, and holds neither a
// worker nor memory of the ring meanwhile.
//
// # Fairness
//
// The goroutine that calls copies too, so that every job goes on whatever the
// workers do. Jobs that find no memory in the ring wait in the order in which they came.
package stage
