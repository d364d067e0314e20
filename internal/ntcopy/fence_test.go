package ntcopy

import (
	_ "embed"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

//go:embed blocks_amd64.s
var assembly string

var nonTemporalStore = regexp.MustCompile(`^\s+V?MOVNT`)

// In the assembly of amd64 SFENCE comes between non-temporal stores and the return. The
// tests in blocks_amd64_test.go show what happens without it, where they have two CPUs.
func TestNonTemporalStoresAreFenced(t *testing.T) {
	functions, open := 0, false // open: stores without a fence
	for line := range strings.Lines(assembly) {
		switch {
		case strings.HasPrefix(line, "TEXT"):
			functions++
			assert.False(t, open, "the end of the function before %s", line)
		case nonTemporalStore.MatchString(line):
			open = true
		case strings.HasPrefix(line, "\tSFENCE"):
			open = false
		case strings.HasPrefix(line, "\tRET"):
			assert.False(t, open, "a return of function %d", functions)
			open = false
		}
	}
	assert.Equal(t, 4, functions)
	assert.False(t, open)
}
