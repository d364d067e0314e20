// Package rules holds the rules of this repository that no compiler keeps: which folder may import
// which, and which files are for linux only. It reads the sources of every platform, whatever
// platform the test runs on.
package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/gopinned/pinned"

// A room is a folder with all below it that is in no room of its own.
type room struct {
	folder string
	// imports names the rooms that this one may import; with each of them come those that it may
	// import in turn, unless only is set.
	imports []string
	only    bool
	// helper marks a room for tests: every test may import it, other files only where imports
	// names it.
	helper bool
	// modules names the modules of others that it may import.
	modules []string
}

const (
	purego  = "github.com/ebitengine/purego"
	xsys    = "golang.org/x/sys"
	testify = "github.com/stretchr/testify"
	cobra   = "github.com/spf13/cobra"
	pflag   = "github.com/spf13/pflag"
	xterm   = "golang.org/x/term"
	cudasim = "cudart/cudasim"
)

// rooms goes from top to bottom: imports go down only. CONTRIBUTING.md shows the same as a map.
var rooms = []room{
	{folder: "cmd/pincheck", imports: []string{"internal/report", "internal/doctor", "loader", "managed", cudasim}, modules: []string{cobra, pflag, xsys, xterm}},
	{folder: "examples", imports: []string{"loader", cudasim}},
	{folder: "internal/report", imports: []string{"internal/doctor", "internal/measure", "internal/hostinfo", "verify", "cudart"}, only: true},
	{folder: "internal/doctor", imports: []string{"internal/hostinfo", "internal/measure", "verify"}},
	{folder: "internal/measure", imports: []string{"loader", "managed", "verify"}, modules: []string{xsys}},
	{folder: "internal/rules"},
	{folder: "internal/gencodes"},
	{folder: "internal/hostinfo/hosttest", imports: []string{"internal/hostinfo"}, helper: true, modules: []string{testify}},
	{folder: "internal/hostinfo", imports: []string{"internal/linux"}, modules: []string{xsys}},
	{folder: "verify", imports: []string{"hostmem", "transfer"}, modules: []string{xsys}},
	{folder: "loader", imports: []string{"transfer", "hostmem"}},
	{folder: "weights"},
	{folder: "transfer", imports: []string{"hostmem"}, modules: []string{xsys}},
	{folder: "managed", imports: []string{"cudart"}, modules: []string{xsys}},
	{folder: "hostmem", imports: []string{"cudart", "internal/linux"}, modules: []string{xsys}},
	{folder: "internal/testgpu", imports: []string{"cudart", cudasim}, helper: true, modules: []string{testify}},
	{folder: cudasim, imports: []string{"cudart", "internal/linux"}, helper: true, modules: []string{purego, xsys}},
	{folder: "internal/fence", imports: []string{"cudart"}},
	{folder: "cudart", imports: []string{"internal/findlib", "internal/sentinel"}, modules: []string{purego, xsys}},
	{folder: "internal/findlib", imports: []string{"internal/linux"}, modules: []string{xsys}},
	{folder: "internal/linux", modules: []string{xsys}},
	{folder: "internal/sentinel"},
}

// linuxOnly is the constraint of every file that loads a C library, as it must stand in the file.
const linuxOnly = "//go:build linux && !android && (amd64 || arm64)"

func TestRoomsGoDown(t *testing.T) {
	t.Parallel()
	for i, r := range rooms {
		for _, below := range r.imports {
			at := slices.IndexFunc(rooms, func(o room) bool { return o.folder == below })
			assert.Greater(t, at, i, "%s may import %s, which is not below it", r.folder, below)
		}
	}
}

func TestImports(t *testing.T) {
	t.Parallel()
	for _, f := range sources(t) {
		home, ok := roomOf(f.folder)
		if !assert.True(t, ok, "%s: folder %s is in no room: add it to the table in this test and to CONTRIBUTING.md", f.path, f.folder) {
			continue
		}
		for _, imported := range f.imports {
			assert.Empty(t, complaint(f, home, imported), "%s imports %s", f.path, imported)
		}
	}
}

func TestFilesThatLoadCAreForLinuxOnly(t *testing.T) {
	t.Parallel()
	for _, f := range sources(t) {
		if slices.Contains(f.imports, purego) {
			assert.Equal(t, linuxOnly, f.constraint, "%s imports purego: its build constraint", f.path)
		}
	}
}

func TestComplaints(t *testing.T) {
	t.Parallel()
	tests := []struct {
		file, imports string
		test, fine    bool
	}{
		{file: "hostmem/map.go", imports: module + "/cudart", fine: true},
		{file: "hostmem/map.go", imports: module + "/hostmem/internal/pages", fine: true},
		{file: "loader/loader.go", imports: module + "/cudart", fine: true}, // through transfer and hostmem
		{file: "cudart/open.go", imports: module + "/hostmem"},
		{file: "cudart/open.go", imports: module + "/internal/findlib", fine: true},
		{file: "internal/findlib/findlib.go", imports: module + "/cudart"},
		{file: "transfer/copier.go", imports: module + "/verify"},
		{file: "hostmem/map.go", imports: module + "/" + cudasim},
		{file: "hostmem/map_test.go", imports: module + "/" + cudasim, test: true, fine: true},
		{file: "cmd/pincheck/sim.go", imports: module + "/" + cudasim, fine: true},
		{file: "internal/report/text.go", imports: module + "/hostmem"},
		{file: "internal/hostinfo/pci.go", imports: module + "/internal/linux", fine: true},
		{file: "transfer/cores_linux.go", imports: module + "/internal/linux", fine: true}, // through hostmem
		{file: "internal/linux/maps.go", imports: module + "/cudart"},
		{file: "internal/linux/maps_test.go", imports: module + "/internal/hostinfo/hosttest", test: true, fine: true},
		{file: "internal/doctor/doctor.go", imports: module + "/internal/hostinfo/hosttest"},
		{file: "hostmem/map.go", imports: module + "/elsewhere"},
		{file: "hostmem/map.go", imports: "unsafe", fine: true},
		{file: "hostmem/map.go", imports: "C"},
		{file: "hostmem/map.go", imports: xsys + "/unix", fine: true},
		{file: "hostmem/map.go", imports: purego},
		{file: "cudart/call.go", imports: purego, fine: true},
		{file: "hostmem/map.go", imports: testify + "/assert"},
		{file: "hostmem/map_test.go", imports: testify + "/assert", test: true, fine: true},
		{file: "hostmem/map_test.go", imports: "example.org/other", test: true},
	}
	for _, tt := range tests {
		f := source{path: tt.file, folder: path.Dir(tt.file), test: tt.test}
		home, ok := roomOf(f.folder)
		require.True(t, ok, tt.file)
		if said := complaint(f, home, tt.imports); tt.fine {
			assert.Empty(t, said, "%s imports %s", tt.file, tt.imports)
		} else {
			assert.NotEmpty(t, said, "%s imports %s", tt.file, tt.imports)
		}
	}
}

// complaint tells what is wrong with file f of room home importing the package named; "" is nothing.
func complaint(f source, home room, imported string) string {
	if imported == "C" {
		return "no cgo: calls into C go through purego, in cudart alone"
	}
	inside, ours := strings.CutPrefix(imported, module+"/")
	if !ours {
		first, _, _ := strings.Cut(imported, "/")
		within := func(m string) bool { return imported == m || strings.HasPrefix(imported, m+"/") }
		switch {
		case !strings.Contains(first, "."), slices.ContainsFunc(home.modules, within):
			return ""
		case f.test && (within(testify) || within(xsys)):
			return ""
		}
		return "a module that " + home.folder + " may not import"
	}
	target, ok := roomOf(inside)
	switch {
	case !ok:
		return "a folder that is in no room"
	case target.folder == home.folder, slices.Contains(below(home), target.folder):
		return ""
	case target.helper && f.test:
		return ""
	}
	return "imports go down: " + home.folder + " may import " + strings.Join(below(home), ", ")
}

// roomOf finds the innermost room that holds the folder.
func roomOf(folder string) (room, bool) {
	for dir := folder; dir != "."; dir = path.Dir(dir) {
		if at := slices.IndexFunc(rooms, func(r room) bool { return r.folder == dir }); at >= 0 {
			return rooms[at], true
		}
	}
	return room{}, false
}

// below lists every room that r may import.
func below(r room) []string {
	all := slices.Clone(r.imports)
	if r.only {
		return all
	}
	for _, folder := range r.imports {
		next, _ := roomOf(folder)
		for _, deeper := range below(next) {
			if !slices.Contains(all, deeper) {
				all = append(all, deeper)
			}
		}
	}
	return all
}

// A source is a Go file of the repository; path and folder are relative to its root.
type source struct {
	path, folder string
	imports      []string
	constraint   string
	test         bool
}

// sources parses every Go file of the repository that the go command would.
func sources(t *testing.T) []source {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(root, "go.mod"), "this test reads the source tree")

	var all []source
	tree := os.DirFS(root)
	err = fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() && name != "." && (base == "testdata" || base[0] == '.' || base[0] == '_') {
			return fs.SkipDir
		}
		if entry.IsDir() || path.Ext(base) != ".go" {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		s := source{path: name, folder: path.Dir(name), test: strings.HasSuffix(base, "_test.go"), constraint: constraintOf(file)}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			s.imports = append(s.imports, imported)
		}
		all = append(all, s)
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// constraintOf returns the file's //go:build line, "" where it has none.
func constraintOf(file *ast.File) string {
	for _, group := range file.Comments {
		for _, line := range group.List {
			if line.Pos() < file.Package && strings.HasPrefix(line.Text, "//go:build ") {
				return line.Text
			}
		}
	}
	return ""
}
