// Package hostinfo tells what a Linux host says about itself in /proc, /sys,
// its control groups and its device nodes: everything that bears on how fast,
// and how much, memory can be pinned and copied to a GPU.
//
// [Read] takes an [io/fs.FS], so a captured host serves as well as the one
// the process runs on. No device is opened, nothing is changed, no CUDA call
// is made.
//
// # Unknown
//
// A file that is missing, unreadable or odd is a fact, never a failure. The
// zero value of every field means "unknown": an empty string, a zero count, a
// [Limit] that is not Known, a nil pointer. Where zero is a real answer (free
// huge pages, a NUMA node) the field is a [Limit] or a pointer.
//
// # Units
//
// Sizes are bytes, link speeds are gigatransfers a second (GT/s) a lane, and
// rates are GB/s of 1e9 bytes.
package hostinfo
