package findlib

import "golang.org/x/sys/unix"

// elevated reports whether the kernel set AT_SECURE: the process has more
// rights than its caller. The dynamic loader reads the same.
func elevated() bool {
	const atSecure = 23
	vector, _ := unix.Auxv() // not available in some build modes: as if not set
	for _, entry := range vector {
		if entry[0] == atSecure {
			return entry[1] != 0
		}
	}
	return false
}
