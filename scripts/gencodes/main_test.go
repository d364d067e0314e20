package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	table     = "../../cudart/codes.txt"
	generated = "../../cudart/codes.go"
)

func TestTheCodesAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	output := filepath.Join(t.TempDir(), "codes.go")
	require.NoError(t, run(table, output))
	want, err := os.ReadFile(output)
	require.NoError(t, err)
	have, err := os.ReadFile(generated)
	require.NoError(t, err)
	require.Equal(t, string(want), string(have), "run go generate ./cudart")
}

func TestOneCode(t *testing.T) {
	t.Parallel()
	got, err := generate("# comment\n0 cudaSuccess no error\n2 cudaErrorMemoryAllocation out of \"memory\"\n")
	require.NoError(t, err)
	assert.Contains(t, string(got), "\tSuccess             Code = 0 // no error\n\tErrMemoryAllocation Code = 2 // out of \"memory\"\n")
	assert.Contains(t, string(got), `{ErrMemoryAllocation, "cudaErrorMemoryAllocation", "out of \"memory\""},`)
}

func TestTableThatIsWrong(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"x cudaErrorOne y":                         "line 1: not NUMBER cudaErrorNAME TEXT",
		"1 cudaErrorOne":                           "line 1: not NUMBER cudaErrorNAME TEXT",
		"1 cudaErrorOne  padded":                   "line 1: not NUMBER cudaErrorNAME TEXT",
		"1 cudaErrorOne padded ":                   "line 1: not NUMBER cudaErrorNAME TEXT",
		"1 errorOne text":                          "line 1: not NUMBER cudaErrorNAME TEXT",
		"# c\n\n1 cudaErrorOne text":               "line 2: not NUMBER cudaErrorNAME TEXT",
		"99999999999999999999 cudaErrorOne text":   "line 1: not NUMBER cudaErrorNAME TEXT",
		"2 cudaErrorOne text\n1 cudaErrorTwo text": "line 2: 1 after 2: the table has to be sorted",
		"2 cudaErrorOne text\n2 cudaErrorTwo text": "line 2: 2 after 2: the table has to be sorted",
		"1 cudaErrorOne text\n2 cudaErrorOne text": "line 2: cudaErrorOne twice",
	} {
		_, err := generate(text)
		assert.ErrorContains(t, err, want, "%q", text)
	}
	require.ErrorIs(t, run("absent.txt", filepath.Join(t.TempDir(), "out.go")), os.ErrNotExist)
}
