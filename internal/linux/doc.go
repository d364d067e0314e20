// Package linux reads what the Linux kernel reports about a host and about this
// process in /proc, /sys and the control group file systems. Each of these files
// has one parser and one reader in the module, and they are here.
//
// # Parsers and readers
//
// A Parse function takes the text of a file and returns its content. It opens
// nothing and builds on every platform. A Read function, or a method that takes
// an [io/fs.FS], opens the file below a root: os.DirFS("/") for the running host,
// a captured host in tests. On platforms without these files every reader returns
// [io/fs.ErrNotExist].
//
// [Maps] is the only part that makes a system call of its own, PROCMAP_QUERY, and
// does without it where the kernel or the root has none.
//
// # Errors
//
// A file that is missing is an error that wraps [io/fs.ErrNotExist], and a file
// that cannot be read wraps the cause; both name the file. A file that is not of
// the form that the kernel documents is a [*SyntaxError], which names the file and
// the line: a reader never returns half of a file, and never guesses.
//
// Values that a kernel may lack, such as the defrag setting of transparent huge
// pages, are zero where their file is missing; the comments on the fields name them.
//
// # Units
//
// Sizes are bytes as int, whatever the kernel counts in. A size that an int does
// not hold is math.MaxInt. Addresses are uintptr.
package linux
