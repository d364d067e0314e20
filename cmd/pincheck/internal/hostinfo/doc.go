// Package hostinfo reads facts about a Linux host from /proc, /sys, its control
// groups and its device nodes: all that affects how much memory can be pinned, and
// how fast it is pinned and copied to a GPU.
//
// [Read] takes an [io/fs.FS]: the host that the process runs on, or a captured one.
// It opens no device, changes nothing and calls no CUDA function.
//
// # Unknown
//
// A file that is missing, unreadable or malformed is not an error. The zero value of
// every field means "unknown": an empty string, a zero count, a [Limit] that is not
// Known, a nil pointer. If zero is a possible value (free huge pages, a NUMA node),
// the field is a [Limit] or a pointer.
//
// # Units
//
// Sizes are bytes, link speeds are gigatransfers a second (GT/s) a lane, and
// rates are GB/s of 1e9 bytes.
package hostinfo
