// Package pages makes the memory that hostmem pins: anonymous mappings of exactly
// the pages that were requested, aligned, advised, placed on a NUMA node and made
// resident by several threads. It does not use CUDA.
//
// # Regions
//
// [Map] over-allocates address space, unmaps head and tail and keeps the middle,
// so a region of n bytes has n rounded up to a page, whatever its alignment.
// What the kernel refuses without making the region unusable (an advice, a hugetlb
// page, a page on a certain node) is a note, see [Region.Notes]. What makes it
// unusable is an error, and then nothing stays mapped. [Borrow] and [MapFile] make
// regions of memory that other code mapped, and of files.
//
// # The host
//
// [System] holds what is read once from /sys, and the system calls themselves.
// Tests replace the calls by [Calls.Before] to make any of them fail.
//
// # Populating
//
// [Region.Populate] makes pages resident with several threads: see maxThreads.
//
// Errors have no package name: the caller adds the package that its user called.
package pages
