package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
)

func TestManualHasEveryCommandFlagAndExitCode(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("man must not open a library"))
	got := call(t, sys, "man")
	assert.Equal(t, exitOK, got.code)
	text := strings.ReplaceAll(got.stdout, `\-`, "-")

	root := newRoot(&options{}, sys)
	strict(root)
	has := func(c *cobra.Command, flags *pflag.FlagSet) {
		flags.VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" {
				assert.Contains(t, text, "--"+f.Name, "a flag of %s", c.Name())
			}
		})
	}
	has(root, root.Flags())
	var visit func(*cobra.Command)
	visit = func(parent *cobra.Command) {
		for _, c := range parent.Commands() {
			if c.IsAvailableCommand() {
				assert.Contains(t, text, `.SS "`+c.CommandPath())
				has(c, c.Flags())
				visit(c)
			}
		}
	}
	visit(root)
	for line := range strings.Lines(exitStatus) {
		if code := coded.FindStringSubmatch(strings.TrimRight(line, "\n")); code != nil {
			assert.Contains(t, text, ".TP\n.B \""+code[1]+"\"\n")
		}
	}
	assert.Equal(t, exitUsage, call(t, sys, "man", "--format", "json").code)
	assert.Equal(t, exitUsage, call(t, sys, "man", "bench").code)
}

func TestManualEscapesWhatIsSpecialToRoff(t *testing.T) {
	t.Parallel()
	var p page
	p.line(".so file\n'br \\n[x] --a ~^` … " + strings.Repeat("word ", 20) + ".Xx")
	p.macro("B", `say "it"`)
	lines := strings.Split(strings.TrimSuffix(p.String(), "\n"), "\n")
	assert.Equal(t, `\&.so file \(aqbr \en[x] \-\-a \(ti\(ha\(ga \[u2026] word word word word word`, lines[0])
	assert.Equal(t, `.B "say \(dqit\(dq"`, lines[len(lines)-1])
	for _, line := range lines[:len(lines)-1] {
		assert.LessOrEqual(t, len(line), maxLine)
		assert.NotContains(t, ".'", line[:1], "a line of text that roff takes for a request")
	}
}
