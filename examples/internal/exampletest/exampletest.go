// Package exampletest runs the examples as their users do.
package exampletest

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

// Run calls a program's main with arguments, and returns what it wrote to its standard output. A program that
// fails ends the process of the test. The test must not be parallel, because arguments, flags and output are the process's.
func Run(t *testing.T, main func(), args ...string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "stdout")
	out, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func(args []string, flags *flag.FlagSet, stdout *os.File) {
		os.Args, flag.CommandLine, os.Stdout = args, flags, stdout
		_ = out.Close()
	}(os.Args, flag.CommandLine, os.Stdout)
	os.Args, flag.CommandLine, os.Stdout = append([]string{"example"}, args...), flag.NewFlagSet("example", flag.ExitOnError), out
	main()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
