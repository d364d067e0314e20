package report

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
)

func TestMarkdownOnATerminal(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	require.NoError(t, WriteMarkdown(&b, "# no_uvm\n\nCUDA needs `nvidia_uvm`,\nand [a page](https://example.org) of *some more* GPUs (`c *:* rwm`).\n\n- Why: the module is loaded by the first program\n  that uses CUDA\n- Do: load it: `sudo modprobe nvidia_uvm --first-time`. Try again.\n\n```\nmake  it\n```\n", Style{Width: 40}))
	assert.Equal(t, "no_uvm\n\nCUDA needs nvidia_uvm, and a page\n(https://example.org) of <some more>\nGPUs (c *:* rwm).\n\n- Why: the module is loaded by the first\n  program that uses CUDA\n- Do: Load it:\n    sudo modprobe nvidia_uvm --first-time\n  Try again.\n\n    make it\n", b.String())
}

// No page of a finding is wider than the terminal, or shows its markup.
func TestPagesOfFindingsOnATerminal(t *testing.T) {
	t.Parallel()
	for _, id := range findings.IDs() {
		p, ok := findings.Get(id)
		require.True(t, ok, id)
		var b strings.Builder
		require.NoError(t, WriteMarkdown(&b, p.Text, Style{Width: 80}))
		for line := range strings.Lines(b.String()) {
			if command := strings.HasPrefix(line, "    "); !command { // which is not wrapped
				assert.LessOrEqual(t, len([]rune(strings.TrimRight(line, "\n"))), 80, "%s", line)
			}
		}
		assert.NotContains(t, b.String(), "##")
		assert.NotContains(t, b.String(), "](")
		assert.NotContains(t, b.String(), "`")
		assert.NotContains(t, b.String(), ".md)")
		for _, code := range regexp.MustCompile("`[^`]*`").FindAllString(p.Text, -1) { // paragraphs, not code, may be broken
			if words := strings.Join(strings.Fields(strings.Trim(code, "`")), " "); len(words) < 75 {
				assert.Contains(t, b.String(), words, id)
			}
		}
	}
}
