// Package pages gives hostmem its memory: anonymous mappings of exactly the
// pages that were asked for, aligned, advised, placed on a NUMA node and made
// resident by several threads. It knows nothing of CUDA.
//
// # A region
//
// [Map] over-allocates address space, unmaps head and tail and keeps the
// middle, so a region of n bytes keeps n rounded up to a page whatever its
// alignment is. What the kernel merely would not do for us (an advice refused,
// no hugetlb page free, a page on another node) is a note on the region, see
// [Region.Notes]; what leaves the region unusable is an error, and then nothing
// stays mapped.
//
// # The host
//
// [System] holds what is read once from /sys and the system calls themselves.
// Tests swap the calls by [Calls.Before] to make any of them fail.
//
// # Populating
//
// See [Populate] and the comment in crew.go on how many threads work.
package pages
