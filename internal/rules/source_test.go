package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// linuxOnly is the constraint of every file that loads a C library.
const linuxOnly = "//go:build linux && !android && (amd64 || arm64)"

func TestFilesThatLoadCAreForLinuxOnly(t *testing.T) {
	t.Parallel()
	tree := repository(t)
	loads := 0
	for _, f := range tree.files {
		if slices.Contains(f.imports, "github.com/ebitengine/purego") {
			loads++
			assert.Equal(t, linuxOnly, f.constraint, "%s imports purego: its build constraint", f.path)
		}
	}
	assert.Positive(t, loads)
}

var readmeProgram = regexp.MustCompile("(?s)```go\n(package main\n.*?)```")

// The program in the README runs as it is printed.
func TestReadmeProgramRuns(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	program := readmeProgram.FindSubmatch(readme)
	require.NotNil(t, program)
	main := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(main, program[1], 0o600))
	built := filepath.Join(t.TempDir(), "program")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", built, main).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = hosttest.Command(t.Context(), built).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), " received 67108864 bytes and returned them\n")
}

var (
	moduleLine  = regexp.MustCompile(`(?m)^module (\S+)$`)
	requireLine = regexp.MustCompile(`(?m)^\s+(\S+\.\S+/\S+) v\S+( // indirect)?$`)
)

// repository reads go.mod and every Go file that the go command would.
func repository(t *testing.T) (all tree) {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(root, "go.mod"), "this test reads the source tree")
	files := os.DirFS(root)
	mod, err := fs.ReadFile(files, "go.mod")
	require.NoError(t, err)
	module := moduleLine.FindSubmatch(mod)
	require.NotNil(t, module)
	all.module = string(module[1])
	for _, m := range requireLine.FindAllSubmatch(mod, -1) {
		if len(m[2]) == 0 {
			all.requires = append(all.requires, string(m[1]))
		}
	}
	require.NotEmpty(t, all.requires)

	err = fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		base := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name != "." && (base[0] == '.' || base[0] == '_'):
			return fs.SkipDir
		case entry.IsDir() && name != "." && isModule(files, name):
			return fs.SkipDir
		case entry.IsDir():
			all.dirs = append(all.dirs, name)
			if base == "testdata" {
				return fs.SkipDir
			}
			return nil
		case path.Ext(base) != ".go":
			return nil
		}
		source, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), name, source, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		f := file{path: name, constraint: constraintOf(parsed)}
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			f.imports = append(f.imports, imported)
		}
		all.files = append(all.files, f)
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, all.files)
	return all
}

// isModule reports whether a directory is the root of a module of its own.
func isModule(files fs.FS, dir string) bool {
	_, err := fs.Stat(files, path.Join(dir, "go.mod"))
	return err == nil
}

// constraintOf returns the file's //go:build line, or "" if it has none.
func constraintOf(f *ast.File) string {
	for _, group := range f.Comments {
		for _, line := range group.List {
			if line.Pos() < f.Package && strings.HasPrefix(line.Text, "//go:build ") {
				return line.Text
			}
		}
	}
	return ""
}
