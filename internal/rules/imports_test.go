// Package rules tests what no compiler checks: that imports go down, that calls into CUDA end with their context, that
// the program in the README runs, and that files which load C are for Linux only.
// It reads the sources of all platforms, on whichever it runs.
package rules

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A room is a directory, with those below it that are no rooms of their own.
type room struct {
	dir      string
	modules  []string // that it imports, by the ends of their paths
	testOnly bool     // only tests import it
}

// rooms are in an order in which each imports only from those below it: the command and what only it needs, the
// library, what several of its packages are built on, and what tests need.
var rooms = []room{
	{dir: "cmd/pincheck", modules: []string{"cobra", "pflag"}},
	{dir: "cmd/pincheck/internal/licenses"},
	{dir: "examples", modules: []string{"x/sys"}},
	{dir: "cmd/pincheck/internal/report", modules: []string{"x/term"}},
	{dir: "cmd/pincheck/internal/compare"},
	{dir: "cmd/pincheck/internal/supportfile"},
	{dir: "cmd/pincheck/internal/capture"},
	{dir: "cmd/pincheck/internal/jsonlimit"},
	{dir: "cmd/pincheck/internal/printable"},
	{dir: "cmd/pincheck/internal/probe"},
	{dir: "cmd/pincheck/internal/doctor"},
	{dir: "cmd/pincheck/internal/findings"},
	{dir: "cmd/pincheck/internal/bench", modules: []string{"x/sys"}},
	{dir: "cmd/pincheck/internal/measure"},
	{dir: "cmd/pincheck/internal/reference"},
	{dir: "cmd/pincheck/internal/result"},
	{dir: "cmd/pincheck/internal/procmem"},
	{dir: "cmd/pincheck/internal/nvml", modules: []string{"purego"}},
	{dir: "cmd/pincheck/internal/probe/child"},
	{dir: "cmd/pincheck/internal/hostinfo"},
	{dir: "cmd/pincheck/internal/kernellog", modules: []string{"x/sys"}},
	{dir: "verify", modules: []string{"x/sys"}},
	{dir: "loader"},
	{dir: "weights", modules: []string{"x/sys"}},
	{dir: "transfer/blocks"},
	{dir: "transfer", modules: []string{"x/sys"}},
	{dir: "managed"},
	{dir: "hostmem/arrowmem"},
	{dir: "hostmem/dlpack", modules: []string{"purego"}},
	{dir: "hostmem/pool"},
	{dir: "hostmem/shm", modules: []string{"x/sys"}},
	{dir: "hostmem", modules: []string{"x/sys"}},
	{dir: "internal/hostkind"},
	{dir: "internal/gpukernels"},
	{dir: "kernel/cublas"},
	{dir: "kernel"},
	{dir: "internal/pending"},
	{dir: "internal/peers"},
	{dir: "internal/fence"},
	{dir: "cudart/cudasim", modules: []string{"purego", "x/sys"}},
	{dir: "cudart", modules: []string{"purego", "x/sys"}},
	{dir: "internal/findlib", modules: []string{"x/sys"}},
	{dir: "internal/pattern"},
	{dir: "internal/ptx"},
	{dir: "internal/raw"},
	{dir: "internal/elements"},
	{dir: "internal/dynlib", modules: []string{"purego"}},
	{dir: "internal/ntcopy", modules: []string{"x/sys"}},
	{dir: "internal/hosttext"},
	{dir: "internal/linux", modules: []string{"x/sys"}},
	{dir: "internal/hostos", modules: []string{"x/sys"}},
	{dir: "internal/lifetime"},
	{dir: "internal/bounded"},
	{dir: "internal/units"},
	{dir: "internal/crc"},
	{dir: "internal/poll"},
	{dir: "internal/sentinel"},
	{dir: "internal/testgpu", modules: []string{"purego", "testify"}, testOnly: true},
	{dir: "hostmem/internal/hostmemtest", modules: []string{"testify", "x/sys"}, testOnly: true},
	{dir: "internal/hosttest", testOnly: true},
	{dir: "internal/benchmarks", testOnly: true},
	{dir: "internal/rules", testOnly: true},
}

// A tree is a module.
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

// check returns what is wrong in a tree.
func check(rooms []room, t tree) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	used := make(map[string]bool)
	for i, r := range rooms {
		if slices.IndexFunc(rooms, func(other room) bool { return r.dir == other.dir }) != i {
			complain("%s is two rooms", r.dir)
		}
		if !slices.Contains(t.dirs, r.dir) {
			complain("%s does not exist", r.dir)
		}
	}
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
				switch to := roomOf(rooms, inside); {
				case to < 0:
					complain("%s imports %s, which is in no room", f.path, inside)
				case !r.testOnly && rooms[to].testOnly:
					complain("%s imports %s, which is for tests only", f.path, inside)
				case !r.testOnly && to < home:
					complain("%s imports %s, which is above it", f.path, inside)
				}
			case strings.Contains(first, "."):
				at := slices.IndexFunc(t.requires, func(m string) bool { return imported == m || strings.HasPrefix(imported, m+"/") })
				if at < 0 {
					complain("%s imports %s, which go.mod does not require", f.path, imported)
					continue
				}
				name := slices.IndexFunc(r.modules, func(m string) bool { return strings.HasSuffix(t.requires[at], "/"+m) })
				if name < 0 {
					complain("%s imports %s: open an issue before you add a module to %s", f.path, imported, r.dir)
					continue
				}
				used[r.dir+" "+r.modules[name]] = true
			}
		}
	}
	for _, r := range rooms {
		for _, m := range r.modules {
			if !used[r.dir+" "+m] {
				complain("no file of %s imports module %s", r.dir, m)
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

func TestImportsGoDown(t *testing.T) {
	t.Parallel()
	assert.Empty(t, check(rooms, repository(t)))
}

func smallRooms() []room {
	return []room{{dir: "cmd/tool", modules: []string{"cobra"}}, {dir: "lib/part"}, {dir: "lib", modules: []string{"x/sys"}},
		{dir: "internal/helper", modules: []string{"testify"}, testOnly: true}}
}

func smallTree() tree {
	return tree{
		module:   "example.org/m",
		requires: []string{"golang.org/x/sys", "example.org/cobra", "example.org/testify"},
		dirs:     []string{"cmd/tool", "lib/part", "lib", "internal/helper"},
		files: []file{
			{path: "cmd/tool/main.go", imports: []string{"example.org/m/lib", "example.org/m/lib/part", "example.org/cobra", "fmt"}},
			{path: "lib/part/part.go", imports: []string{"example.org/m/lib"}},
			{path: "lib/lib.go", imports: []string{"unsafe", "golang.org/x/sys/unix", "example.org/m/lib/inner"}},
			{path: "lib/inner/inner.go"},
			{path: "lib/lib_test.go", imports: []string{"example.org/testify/assert", "example.org/m/internal/helper", "example.org/m/cmd/tool"}},
			{path: "internal/helper/helper.go", imports: []string{"example.org/m/lib", "example.org/testify/assert"}},
		},
	}
}

func TestTreesThatAreWrong(t *testing.T) {
	t.Parallel()
	require.Empty(t, check(smallRooms(), smallTree()), "this one is right")
	for want, change := range map[string]func(rooms *[]room, t *tree){
		"lib/gone does not exist":                                        func(rooms *[]room, _ *tree) { *rooms = append(*rooms, room{dir: "lib/gone"}) },
		"lib is two rooms":                                               func(rooms *[]room, _ *tree) { *rooms = append(*rooms, room{dir: "lib"}) },
		"no file of lib/part imports module x/":                          func(rooms *[]room, _ *tree) { (*rooms)[1].modules = []string{"x/sys"} },
		"lib/lib.go imports golang.org/x/sys/unix: open an issue before": func(rooms *[]room, _ *tree) { (*rooms)[2].modules = nil },
		"other/other.go is in no room":                                   func(_ *[]room, t *tree) { t.files = append(t.files, file{path: "other/other.go"}) },
		"lib/lib.go imports other, which is in no room":                  func(_ *[]room, t *tree) { t.files[2].imports[2] = "example.org/m/other" },
		"lib/lib.go imports lib/part, which is above it":                 func(_ *[]room, t *tree) { t.files[2].imports[2] = "example.org/m/lib/part" },
		"lib/lib.go imports internal/helper, which is for tests only":    func(_ *[]room, t *tree) { t.files[2].imports[2] = "example.org/m/internal/helper" },
		"lib/lib.go imports example.org/other, which go.mod does not":    func(_ *[]room, t *tree) { t.files[2].imports[2] = "example.org/other" },
		"lib/lib_test.go uses cgo":                                       func(_ *[]room, t *tree) { t.files[4].imports[0] = "C" },
	} {
		rooms, tree := smallRooms(), smallTree()
		change(&rooms, &tree)
		assert.Contains(t, strings.Join(check(rooms, tree), "\n"), want)
	}
}
