package cudart

import (
	"cmp"
	"slices"
	"strconv"
)

//go:generate go run ../internal/gencodes codes.txt codes.go

// Code is a cudaError_t. It is an error whose name and text are built in, so
// that errors.Is(err, ErrMemoryAllocation) and messages work with no library.
// A code of a library newer than this package keeps its number and is marked as
// unrecognized.
type Code int32

const (
	unrecognizedName = "unrecognized cudaError_t"
	unrecognizedText = "unrecognized error code"
)

// Name returns the C name, as cudaGetErrorName does: "cudaErrorMemoryAllocation".
// For an unrecognized code it is a phrase with spaces, which no name has.
func (c Code) Name() string {
	if info, ok := c.info(); ok {
		return info.name
	}
	return unrecognizedName
}

// Text returns the short description, as cudaGetErrorString does: "out of memory".
func (c Code) Text() string {
	if info, ok := c.info(); ok {
		return info.text
	}
	return unrecognizedText
}

// Error returns name, number and text: "cudaErrorMemoryAllocation (2): out of memory".
func (c Code) Error() string {
	return c.Name() + " (" + strconv.Itoa(int(c)) + "): " + c.Text()
}

func (c Code) info() (codeInfo, bool) {
	i, ok := slices.BinarySearchFunc(codeTable[:], c, func(row codeInfo, c Code) int {
		return cmp.Compare(row.code, c)
	})
	if !ok {
		return codeInfo{}, false
	}
	return codeTable[i], true
}
