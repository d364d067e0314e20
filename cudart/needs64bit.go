//go:build 386 || arm || mips || mipsle

package cudart

// Sizes are ints, and the memory of a GPU has more bytes than 32 bits can count. So this
// module does not build for 32-bit platforms: the next line is the error.
var _ = pinned_needs_a_64_bit_platform
