// Package rules tests what no compiler checks: that the map in CONTRIBUTING.md is true,
// that the program in the README compiles, and that files which load C are
// for Linux only.
// It reads the sources of all platforms, on whichever it runs.
package rules

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A room is a row of the map: a directory, with those below it that have no row of
// their own.
type room struct {
	dir      string
	imports  []string // directories of other rooms
	modules  []string // the ends of module paths, such as x/sys
	testOnly bool     // only tests import it
}

// The first cells of the headers of the map's two tables.
const (
	anyFile  = "directory"
	testOnly = "directory, for tests only"
)

var code = regexp.MustCompile("`([^`]+)`")

// parseMap reads the tables in the section "## Map" of a Markdown text.
func parseMap(text string) ([]room, error) {
	_, section, _ := strings.Cut(text, "\n## Map\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var rooms []room
	table := ""
	for line := range strings.Lines(section) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			table = ""
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case table == "":
			if table = cells[0]; table != anyFile && table != testOnly {
				return nil, fmt.Errorf("a table of %q: want %q or %q", table, anyFile, testOnly)
			}
			continue
		case strings.HasPrefix(cells[0], "---"):
			continue
		case len(cells) != 4:
			return nil, fmt.Errorf("a row of %d cells, want directory, contents, imports and modules: %s", len(cells), line)
		}
		dirs, err := names(cells[0])
		if err == nil && len(dirs) != 1 {
			err = fmt.Errorf("%d directories, want one", len(dirs))
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", line, err)
		}
		r := room{dir: dirs[0], testOnly: table == testOnly}
		if r.imports, err = names(cells[2]); err != nil {
			return nil, fmt.Errorf("imports of %s: %w", r.dir, err)
		}
		if r.modules, err = names(cells[3]); err != nil {
			return nil, fmt.Errorf("modules of %s: %w", r.dir, err)
		}
		rooms = append(rooms, r)
	}
	return rooms, nil
}

// The map's short name for the directory of what only pincheck needs.
const (
	shortName = "pincheck/"
	longName  = "cmd/pincheck/internal/"
)

// names reads a cell: names in code quotes with commas between them, or a dash.
func names(cell string) ([]string, error) {
	var list []string
	for _, m := range code.FindAllStringSubmatch(cell, -1) {
		name := strings.TrimSuffix(m[1], "/")
		if below, ok := strings.CutPrefix(name, shortName); ok {
			name = longName + below
		}
		list = append(list, name)
	}
	if rest := strings.Trim(code.ReplaceAllString(cell, ""), ", "); rest != "" && (rest != "–" || len(list) > 0) {
		return nil, fmt.Errorf("%q is not a list of names in code quotes", cell)
	}
	return list, nil
}

// A tree is what the map is about.
type tree struct {
	module   string
	requires []string // paths of other modules
	dirs     []string // all directories
	files    []file   // all Go files
}

// A file is a Go file, with its slash-separated path from the root.
type file struct {
	path       string
	imports    []string
	constraint string // its //go:build line, or ""
}

func (f file) test() bool { return strings.HasSuffix(f.path, "_test.go") }

// check returns what is wrong in the map of a tree.
func check(rooms []room, t tree) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	index := func(dir string) int { return slices.IndexFunc(rooms, func(r room) bool { return r.dir == dir }) }
	for i, r := range rooms {
		if index(r.dir) != i {
			complain("%s has two rows", r.dir)
		}
		if !slices.Contains(t.dirs, r.dir) {
			complain("%s does not exist", r.dir)
		}
		for _, to := range r.imports {
			switch at := index(to); {
			case at < 0:
				complain("%s imports %s, which has no row", r.dir, to)
			case !r.testOnly && rooms[at].testOnly:
				complain("%s imports %s, which is for tests only", r.dir, to)
			case !r.testOnly && at <= i:
				complain("%s imports %s, which is not below it", r.dir, to)
			}
		}
	}

	// What production files import, by room.
	type arrow struct{ from, to string }
	imports, modules := map[arrow]bool{}, map[arrow]bool{}
	for _, f := range t.files {
		home := roomOf(rooms, path.Dir(f.path))
		if home < 0 {
			complain("%s is in no room", f.path)
			continue
		}
		r := rooms[home]
		for _, imported := range f.imports {
			inside, ours := strings.CutPrefix(imported, t.module+"/")
			first, _, _ := strings.Cut(imported, "/")
			switch {
			case imported == "C":
				complain("%s uses cgo: calls into C go through purego, in cudart", f.path)
			case f.test():
			case ours:
				to := roomOf(rooms, inside)
				switch {
				case to < 0:
					complain("%s imports %s, which is in no room", f.path, inside)
				case to != home && !slices.Contains(r.imports, rooms[to].dir):
					complain("%s imports %s, which the row of %s does not list", f.path, inside, r.dir)
				default:
					imports[arrow{r.dir, rooms[to].dir}] = true
				}
			case strings.Contains(first, "."):
				at := slices.IndexFunc(t.requires, func(m string) bool { return imported == m || strings.HasPrefix(imported, m+"/") })
				if at < 0 {
					complain("%s imports %s, which go.mod does not require", f.path, imported)
					continue
				}
				name := slices.IndexFunc(r.modules, func(m string) bool { return strings.HasSuffix(t.requires[at], "/"+m) })
				if name < 0 {
					complain("%s imports %s, which the row of %s does not list", f.path, imported, r.dir)
					continue
				}
				modules[arrow{r.dir, r.modules[name]}] = true
			}
		}
	}
	for _, r := range rooms {
		for _, to := range r.imports {
			if !imports[arrow{r.dir, to}] {
				complain("no file of %s imports %s", r.dir, to)
			}
		}
		for _, to := range r.modules {
			if !modules[arrow{r.dir, to}] {
				complain("no file of %s imports module %s", r.dir, to)
			}
		}
	}
	return wrong
}

// roomOf returns the index of the innermost room that contains the directory, or -1.
func roomOf(rooms []room, dir string) int {
	for ; dir != "."; dir = path.Dir(dir) {
		if at := slices.IndexFunc(rooms, func(r room) bool { return r.dir == dir }); at >= 0 {
			return at
		}
	}
	return -1
}

// The map in CONTRIBUTING.md says what each directory imports, no more and no less.
func TestMapIsTrue(t *testing.T) {
	t.Parallel()
	text, tree := repository(t)
	rooms, err := parseMap(text)
	require.NoError(t, err)
	require.NotEmpty(t, rooms)
	for _, wrong := range check(rooms, tree) {
		t.Errorf("map in CONTRIBUTING.md: %s", wrong)
	}
}

const smallMap = "# Contributing\n\n## Map\n\nText.\n\n" +
	"| directory | what lives there | imports | modules |\n|---|---|---|---|\n" +
	"| `cmd/tool/` | a tool | `lib/`, `lib/part/` | `cobra` |\n" +
	"| `lib/part/` | a part | `lib/` | – |\n" +
	"| `pincheck/part/` | a part of the command | `lib/` | – |\n" +
	"| `lib/` | a library | – | `x/sys` |\n" +
	"\nMore.\n\n| directory, for tests only | what lives there | imports | modules |\n|---|---|---|---|\n" +
	"| `internal/helper/` | a helper | `lib/` | `testify` |\n" +
	"\n## Next\n\n| a | table |\n"

func smallTree() tree {
	return tree{
		module:   "example.org/m",
		requires: []string{"golang.org/x/sys", "example.org/cobra", "example.org/testify"},
		dirs:     []string{"cmd/tool", "cmd/pincheck/internal/part", "lib/part", "lib", "internal/helper"},
		files: []file{
			{path: "cmd/tool/main.go", imports: []string{"example.org/m/lib", "example.org/m/lib/part", "example.org/cobra", "fmt"}},
			{path: "cmd/pincheck/internal/part/part.go", imports: []string{"example.org/m/lib"}},
			{path: "lib/part/part.go", imports: []string{"example.org/m/lib"}},
			{path: "lib/lib.go", imports: []string{"unsafe", "golang.org/x/sys/unix", "example.org/m/lib/inner"}},
			{path: "lib/inner/inner.go"},
			{path: "lib/lib_test.go", imports: []string{"example.org/testify/assert", "example.org/m/internal/helper", "example.org/m/cmd/tool"}},
			{path: "internal/helper/helper.go", imports: []string{"example.org/m/lib", "example.org/testify/assert"}},
		},
	}
}

func TestMapsThatAreWrong(t *testing.T) {
	t.Parallel()
	rooms, err := parseMap(smallMap)
	require.NoError(t, err)
	require.Len(t, rooms, 5)
	require.Empty(t, check(rooms, smallTree()), "this one is right")

	for _, tt := range []struct {
		want     string
		old, new string // in the map
		change   func(*tree)
	}{
		{want: "lib/gone does not exist", old: "\nMore.", new: "| `lib/gone/` | | – | – |\n\nMore."},
		{want: "lib has two rows", old: "\nMore.", new: "| `lib/` | | – | – |\n\nMore."},
		{want: "lib/part imports away, which has no row", old: "a part | `lib/`", new: "a part | `lib/`, `away/`"},
		{want: "lib imports lib/part, which is not below it", old: "a library | –", new: "a library | `lib/part/`"},
		{want: "lib imports internal/helper, which is for tests only", old: "a library | –", new: "a library | `internal/helper/`"},
		{want: "no file of lib/part imports module x/sys", old: "a part | `lib/` | –", new: "a part | `lib/` | `x/sys`"},
		{want: "cmd/tool/main.go imports lib/part, which the row of cmd/tool does not list", old: "`lib/`, `lib/part/`", new: "`lib/`"},
		{want: "lib/lib.go imports golang.org/x/sys/unix, which the row of lib does not list", old: "a library | – | `x/sys`", new: "a library | – | –"},
		{want: "no file of cmd/pincheck/internal/part imports lib", change: func(t *tree) { t.files[1].imports = nil }},
		{want: "no file of lib/part imports lib", change: func(t *tree) { t.files[2].imports = nil }},
		{want: "other/other.go is in no room", change: func(t *tree) { t.files = append(t.files, file{path: "other/other.go"}) }},
		{want: "lib/lib.go imports other, which is in no room", change: func(t *tree) { t.files[3].imports[2] = "example.org/m/other" }},
		{want: "lib/lib.go imports internal/helper, which the row of lib does not list", change: func(t *tree) { t.files[3].imports[2] = "example.org/m/internal/helper" }},
		{want: "lib/lib.go imports example.org/other, which go.mod does not require", change: func(t *tree) { t.files[3].imports[2] = "example.org/other" }},
		{want: "lib/lib_test.go uses cgo", change: func(t *tree) { t.files[5].imports[0] = "C" }},
	} {
		require.Contains(t, smallMap, tt.old)
		rooms, err := parseMap(strings.Replace(smallMap, tt.old, tt.new, 1))
		require.NoError(t, err, tt.want)
		small := smallTree()
		if tt.change != nil {
			tt.change(&small)
		}
		assert.Contains(t, strings.Join(check(rooms, small), "\n"), tt.want)
	}

	for _, tt := range []struct{ want, old, new string }{
		{"is not a list of names", "`lib/`, `lib/part/`", "everything"},
		{"is not a list of names", "`x/sys`", "`x/sys` –"},
		{"a row of 3 cells", "| a part ", ""},
		{"want one", "| `lib/` | a library", "| `lib/`, `lib/inner/` | a library"},
		{`a table of "folder"`, "| directory |", "| folder |"},
	} {
		_, err := parseMap(strings.Replace(smallMap, tt.old, tt.new, 1))
		assert.ErrorContains(t, err, tt.want)
	}
}
