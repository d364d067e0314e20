package kernel

import (
	"bytes"
	"regexp"
	"strconv"
)

// parameters are the sizes in bytes of a kernel's parameters.
type parameters []int

var (
	ptxVersion   = regexp.MustCompile(`(?m)^\s*\.version\s+\d+\.\d+`)
	ptxComment   = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	ptxEntry     = regexp.MustCompile(`\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?`)
	ptxParameter = regexp.MustCompile(`\.param\b[^,]*?\.[bsuf](\d+)(?:x2)?\b[^,\[]*(?:\[\s*(\d+)\s*\])?`)
)

// parsePTX returns the kernels of PTX and their parameters, and ok false for other code, such
// as a cubin.
func parsePTX(code []byte) (kernels map[string]parameters, ok bool) {
	if bytes.HasPrefix(code, []byte("\x7fELF")) || !ptxVersion.Match(code) {
		return nil, false
	}
	kernels = make(map[string]parameters)
	for _, entry := range ptxEntry.FindAllSubmatch(ptxComment.ReplaceAll(code, nil), -1) {
		var list parameters
		for _, p := range ptxParameter.FindAllSubmatch(entry[2], -1) {
			bits, _ := strconv.Atoi(string(p[1])) // digits
			count := 1
			if len(p[2]) > 0 {
				count, _ = strconv.Atoi(string(p[2]))
			}
			list = append(list, bits/8*count)
		}
		kernels[string(entry[1])] = list
	}
	return kernels, true
}
