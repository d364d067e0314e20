// Package ptx reads PTX, the text that compilers make of kernels, as far as the kernels' names,
// parameters and sizes of blocks.
package ptx

import (
	"bytes"
	"regexp"
	"strconv"
)

// Code is what a text of PTX contains.
type Code struct {
	Major, Minor int              // version of PTX: 7.8 is that of CUDA 11.8
	Target       string           // compute capability that it needs: "sm_75"
	Kernels      map[string]Entry // by name
}

// An Entry is a kernel.
type Entry struct {
	Params       []int // sizes of its parameters in bytes
	BlockThreads int   // maximum threads of a block (.maxntid, .reqntid), 0 where the code has no limit
}

var (
	header    = regexp.MustCompile(`^\s*\.version\s+(\d{1,3})\.(\d{1,3})\s`)
	target    = regexp.MustCompile(`\s\.target\s+(\w+)`)
	entry     = regexp.MustCompile(`^\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)`)
	parameter = regexp.MustCompile(`\.param\b[^,]*?\.[bsuf](\d+)(?:x2)?\b[^,\[]*(?:\[\s*(\d+)\s*\])?`)
	threads   = regexp.MustCompile(`\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?`)
)

// Parse reads PTX. It is false for a text that does not begin as PTX does, or names no target.
func Parse(text []byte) (Code, bool) {
	text = uncommented(text)
	h := header.FindSubmatch(text)
	if h == nil {
		return Code{}, false
	}
	t := target.FindSubmatch(text)
	if t == nil {
		return Code{}, false
	}
	c := Code{Major: number(h[1]), Minor: number(h[2]), Target: string(t[1]), Kernels: make(map[string]Entry)}
	for rest := text; ; {
		at := bytes.Index(rest, []byte(".entry"))
		if at < 0 {
			return c, true
		}
		rest = rest[at:]
		if e := entry.FindSubmatch(rest); e != nil {
			c.Kernels[string(e[1])] = Entry{parameters(e[2]), blockThreads(e[3])}
		}
		rest = rest[len(".entry"):]
	}
}

func parameters(list []byte) (sizes []int) {
	for _, p := range parameter.FindAllSubmatch(list, -1) {
		count := 1
		if len(p[2]) > 0 {
			count = number(p[2])
		}
		sizes = append(sizes, number(p[1])/8*count)
	}
	return sizes
}

func blockThreads(directives []byte) int {
	t := threads.FindSubmatch(directives)
	if t == nil {
		return 0
	}
	n := 1
	for _, dim := range t[1:] {
		if len(dim) > 0 {
			n *= number(dim)
		}
	}
	return n
}

// number is the value of digits.
func number(digits []byte) int {
	n, _ := strconv.Atoi(string(digits))
	return n
}

// uncommented returns the text with a space for each comment.
func uncommented(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for {
		at := bytes.IndexByte(text, '/')
		if at < 0 || at+1 == len(text) {
			return append(out, text...)
		}
		end := 0
		switch text[at+1] {
		case '/':
			end = bytes.IndexByte(text[at:], '\n') // the line's end stays
		case '*':
			if end = bytes.Index(text[at+2:], []byte("*/")); end >= 0 {
				end += 4
			}
		default:
			out, text = append(out, text[:at+1]...), text[at+1:]
			continue
		}
		out = append(append(out, text[:at]...), ' ')
		if end < 0 {
			return out
		}
		text = text[at+end:]
	}
}
