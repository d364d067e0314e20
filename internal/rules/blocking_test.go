package rules

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/gopinned/pinned/"

// bounding are the packages whose calls end with their context.
var bounding = []string{"hostmem", "hostmem/pool", "hostmem/dlpack", "hostmem/arrowmem", "hostmem/shm", "transfer", "transfer/blocks", "transfer/internal/queue", "transfer/internal/stage",
	"loader", "weights", "managed", "kernel", "kernel/cublas", "internal/gpukernels", "internal/fence", "internal/peers", "internal/pending", "internal/lifetime"}

// quick are the functions of cudart that call no function of CUDA, or only one that does not wait for the GPU, for the
// queue of a stream or for a lock that is held meanwhile. Methods that take a context are not asked about.
var quick = regexp.MustCompile(`^(` + strings.Join([]string{
	`\(Point\)\..*`, `\(\*Runtime\)\.Library`, `\(Version\)\..*`, `\(Location\)\..*`, `HostLocation`,
	`\(\*Stream\)\.(Device|Point|Query)`,
	`\(\*Device\)\.(Runtime|Attribute|PCIBusID|Location)`,
	`\(\*DeviceMemory\)\.(Ptr|Len|Device)`,
	`\(\*CopyBatch\)\.(Len|Reset|ToHost|ToDevice)`,
}, "|") + `)$`)

// elsewhere has calls of CUDA in functions that are handed over as data: who calls them, on which goroutine, is not
// seen in the source. A call that is not here, or that is found no more, fails the test.
var elsewhere = map[string][]string{
	"package stage calls Copy.Queue on the goroutine of a link or of a chunk's copy": {
		"(*transfer/internal/queue.Batcher).Flush > (*cudart.Stream).CopyBatch",
		"(*transfer/internal/queue.Batcher).single > (*cudart.Stream).CopyToDevice",
		"(*transfer/internal/queue.Batcher).single > (*cudart.Stream).CopyToHost",
		"(transfer.target).stage > (*cudart.Stream).CopyToDevice",
		"(transfer.target).stage > (*cudart.Stream).CopyToHost",
	},
	"package stage runs direct copies by runBounded": {
		"(transfer.target).forward > (*cudart.Stream).CopyPeer",
		"(transfer.target).forward > (*cudart.Stream).WaitPoint",
		"transfer.sendOther > (*cudart.Stream).CopyToDevice",
		"transfer.sendOther > (*cudart.Stream).CopyToHost",
	},
}

// A function is what a function of the library calls on the goroutine that it is called on.
type function struct {
	calls   []string // full names
	context bool     // it is exported and takes one, and so promises to return when that ends
}

// A call into CUDA may never return. So each exported function that takes a context makes such calls through
// package bounded. The test follows the calls in the source from these functions; it sees no call of an interface's
// method.
func TestCallsThatTakeAContextDoNotBlockInCUDA(t *testing.T) {
	t.Parallel()
	found := make(map[string]string)
	functions, info := load(t, bounding)
	all := graph(functions, info)
	for name, f := range all {
		if f.context {
			callsOfCUDA(all, name, found)
		}
	}
	listed := slices.Concat(slices.Collect(maps.Values(elsewhere))...)
	for call, path := range found {
		assert.Contains(t, listed, call, "%s: use internal/bounded, or list the call above under the reason why it may", path)
	}
	for _, call := range listed {
		assert.Contains(t, found, call, "it is not found any more")
	}
}

// callsOfCUDA adds the calls that a function makes on its goroutine: the last function and the call, with a path.
func callsOfCUDA(all map[string]*function, from string, found map[string]string) {
	seen := map[string]bool{from: true}
	var walk func(name, path string)
	walk = func(name, path string) {
		for _, callee := range all[name].calls {
			inCUDA := strings.Replace(callee, module+"cudart.", "", 1)
			switch {
			case inCUDA != callee && !quick.MatchString(inCUDA):
				found[short(name)+" > "+short(callee)] = path + " > " + short(callee)
			case all[callee] != nil && !seen[callee]:
				seen[callee] = true
				walk(callee, path+" > "+short(callee))
			}
		}
	}
	walk(from, short(from))
}

func short(name string) string { return strings.ReplaceAll(name, module, "") }

// A function that returns when its context ends leaves what it has started to goroutines that go on. These must not use
// its named results, which belong to the caller by then.
func TestNamedResultsAreNotOfGoroutinesThatGoOn(t *testing.T) {
	t.Parallel()
	functions, info := load(t, nil)
	assert.Empty(t, outliving(functions, info), "a goroutine may use a named result after the function has returned: give it a variable of its own")
}

// outliving returns the named results that functions on other goroutines use.
func outliving(functions []declared, info *types.Info) (wrong []string) {
	wrappers := wrappersOf(functions, info)
	for _, f := range functions {
		results := make(map[types.Object]bool)
		for v := range f.object.Signature().Results().Variables() {
			results[v] = v.Name() != ""
		}
		own := make(map[*ast.Ident]bool)
		onCaller(f.Body, info, wrappers, func(n ast.Node) {
			if name, ok := n.(*ast.Ident); ok {
				own[name] = true
			}
		})
		ast.Inspect(f.Body, func(n ast.Node) bool {
			literal, ok := n.(*ast.FuncLit)
			if !ok {
				return true
			}
			ast.Inspect(literal, func(n ast.Node) bool {
				if name, ok := n.(*ast.Ident); ok && !own[name] && results[info.Uses[name]] {
					wrong = append(wrong, short(f.object.FullName())+": "+name.Name)
				}
				return true
			})
			return false
		})
	}
	return wrong
}

// load returns the functions of packages, of all if there is no list.
func load(t *testing.T, dirs []string) ([]declared, *types.Info) {
	t.Helper()
	exports, goFiles := exported(t)
	fset := token.NewFileSet()
	imports := importing(fset, exports)
	var functions []declared
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object), Defs: make(map[*ast.Ident]types.Object)}
	if dirs == nil {
		for name := range goFiles {
			if dir, ok := strings.CutPrefix(name, module); ok {
				dirs = append(dirs, dir)
			}
		}
	}
	for _, dir := range dirs {
		var parsed []*ast.File
		for _, name := range goFiles[module+dir] {
			f, err := parser.ParseFile(fset, filepath.Join("..", "..", dir, name), nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			parsed = append(parsed, f)
		}
		functions = append(functions, declarations(t, fset, module+dir, parsed, imports, info)...)
	}
	return functions, info
}

// exported returns the files with the types of all packages, and their source files, as the go command has them.
func exported(t *testing.T) (exports map[string]string, goFiles map[string][]string) {
	t.Helper()
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}\t{{.GoFiles}}", "./...")
	list.Dir = filepath.Join("..", "..")
	out, err := list.Output()
	require.NoError(t, err)
	exports, goFiles = make(map[string]string), make(map[string][]string)
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSpace(line), "\t")
		require.Len(t, fields, 3, line)
		exports[fields[0]] = fields[1]
		goFiles[fields[0]] = strings.Fields(strings.Trim(fields[2], "[]"))
	}
	return exports, goFiles
}

func importing(fset *token.FileSet, exports map[string]string) types.Importer {
	return importer.ForCompiler(fset, "gc", func(name string) (io.ReadCloser, error) { return os.Open(exports[name]) })
}

// A declared function has a body.
type declared struct {
	*ast.FuncDecl
	object *types.Func
}

func declarations(t *testing.T, fset *token.FileSet, name string, files []*ast.File, imports types.Importer, info *types.Info) (functions []declared) {
	t.Helper()
	_, err := (&types.Config{Importer: imports}).Check(name, fset, files, info)
	require.NoError(t, err)
	for _, file := range files {
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Body != nil {
				functions = append(functions, declared{f, info.Defs[f.Name].(*types.Func)})
			}
		}
	}
	return functions
}

// wrappersOf returns the functions that give their arguments to package bounded.
func wrappersOf(functions []declared, info *types.Info) map[string]bool {
	wrappers := make(map[string]bool)
	for range 3 { // wrappers of wrappers
		for _, f := range functions {
			if wraps(f.FuncDecl, f.object, info, wrappers) {
				wrappers[f.object.FullName()] = true
			}
		}
	}
	return wrappers
}

// graph returns the functions by their full names.
func graph(functions []declared, info *types.Info) map[string]*function {
	wrappers := wrappersOf(functions, info)
	all := make(map[string]*function)
	for _, f := range functions {
		g := &function{context: f.Name.IsExported() && !strings.Contains(f.object.Pkg().Path(), "/internal/") && takesContext(f.object)}
		onCaller(f.Body, info, wrappers, func(n ast.Node) {
			name, ok := n.(*ast.Ident)
			if !ok {
				return
			}
			callee, ok := info.Uses[name].(*types.Func) // a function that is handed over may be called, too
			if ok && (callee.Pkg() == nil || callee.Pkg().Path() != module+"cudart" || !takesContext(callee)) {
				g.calls = append(g.calls, callee.Origin().FullName())
			}
		})
		all[f.object.FullName()] = g
	}
	return all
}

// takesContext reports whether a parameter is a context.
func takesContext(f *types.Func) bool {
	for v := range f.Signature().Params().Variables() {
		if v.Type().String() == "context.Context" {
			return true
		}
	}
	return false
}

// called returns the function or method that a call names, nil if that is a variable.
func called(call *ast.CallExpr, info *types.Info) *types.Func {
	e := ast.Unparen(call.Fun)
	switch f := e.(type) {
	case *ast.IndexExpr:
		e = f.X
	case *ast.IndexListExpr:
		e = f.X
	}
	var name *ast.Ident
	switch f := ast.Unparen(e).(type) {
	case *ast.Ident:
		name = f
	case *ast.SelectorExpr:
		name = f.Sel
	default:
		return nil
	}
	f, _ := info.Uses[name].(*types.Func)
	if f == nil {
		return nil
	}
	return f.Origin()
}

// waiting are the functions of package bounded that return after the functions that they call.
var waiting = []string{"ForEach", "Guard", "Inside"}

// onCaller visits the nodes of a body that run on its goroutine: not those in go statements and in arguments of
// package bounded and of the functions that give their arguments to it.
func onCaller(body ast.Node, info *types.Info, wrappers map[string]bool, visit func(ast.Node)) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			return false
		case *ast.IfStmt:
			if cannotEnd(n.Cond) {
				return false
			}
		case *ast.CallExpr:
			if f := called(n, info); f != nil && f.Pkg() != nil && (f.Pkg().Path() == module+"internal/bounded" && !slices.Contains(waiting, f.Name()) || wrappers[f.FullName()]) {
				return false
			}
		}
		if n != nil {
			visit(n)
		}
		return true
	})
}

// cannotEnd reports whether a condition is that of a context that cannot end.
func cannotEnd(condition ast.Expr) bool {
	c, ok := condition.(*ast.BinaryExpr)
	if !ok || c.Op != token.EQL {
		return false
	}
	call, ok := c.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	done, ok := call.Fun.(*ast.SelectorExpr)
	return ok && done.Sel.Name == "Done"
}

// wraps reports whether a function has a function as a parameter and does not use it on its goroutine.
func wraps(f *ast.FuncDecl, object *types.Func, info *types.Info, wrappers map[string]bool) bool {
	parameters := make(map[types.Object]bool)
	for v := range object.Signature().Params().Variables() {
		if _, ok := v.Type().Underlying().(*types.Signature); ok {
			parameters[v] = true
		}
	}
	used := false
	onCaller(f.Body, info, wrappers, func(n ast.Node) {
		if name, ok := n.(*ast.Ident); ok && parameters[info.Uses[name]] {
			used = true
		}
	})
	return len(parameters) > 0 && !used
}

func TestCallGraph(t *testing.T) {
	t.Parallel()
	const source = `package p
import ("context"; "github.com/gopinned/pinned/cudart"; "github.com/gopinned/pinned/internal/bounded")
type T struct { dev *cudart.Device }
func (t *T) Direct(ctx context.Context) { t.free() }
func (t *T) free() { t.dev.Free(1) }
func (t *T) Closure(ctx context.Context) { f := func() { t.free() }; f() }
func (t *T) Guarded(ctx context.Context) { bounded.Guard(func() error { return t.dev.Free(1) }) }
func (t *T) Shared(ctx context.Context) { bounded.ForEach(ctx, 2, 1, 2, func(_ context.Context, _, _ int) error { return t.dev.Free(1) }) }
func (t *T) Inside(ctx context.Context, g *bounded.Group) { g.Inside(ctx, func() error { return t.dev.Free(1) }) }
func (t *T) Bounded(ctx context.Context) {
	bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { t.free(); return 0, nil }})
}
func run(ctx context.Context, f func() error) {
	if ctx.Done() == nil { f(); return }
	bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { return 0, f() }})
}
func again(ctx context.Context, f func() error) { run(ctx, f) }
func (t *T) Wrapped(ctx context.Context) { again(ctx, func() error { return t.dev.Free(1) }) }
func (t *T) Value(ctx context.Context) { with(t, (*T).free) }
func with(t *T, f func(*T)) { f(t) }
func (t *T) Goes(ctx context.Context) { go t.free() }
func (t *T) Quick(ctx context.Context) { t.dev.Runtime().Library(); t.dev.Synchronize(ctx) }
func (t *T) NoContext() { t.free() }
func generic[V any](ctx context.Context, t *T, v V) { t.free() }
func Generic(ctx context.Context, t *T) { generic[int](ctx, t, 1) }`
	functions, info := declarationsOf(t, source)
	all := graph(functions, info)
	var wrong []string
	for name, f := range all {
		found := make(map[string]string)
		if f.context {
			callsOfCUDA(all, name, found)
		}
		if len(found) > 0 {
			wrong = append(wrong, name[strings.LastIndex(name, ".")+1:])
		}
	}
	assert.ElementsMatch(t, []string{"Direct", "Closure", "Guarded", "Shared", "Inside", "Value", "Generic"}, wrong)
}

func TestOutliving(t *testing.T) {
	t.Parallel()
	const source = `package p
import ("context"; "github.com/gopinned/pinned/internal/bounded")
func run(ctx context.Context, f func() error) error {
	_, err := bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { return 0, f() }})
	return err
}
func Right(ctx context.Context) (n int, err error) {
	defer func() { n = 1 }()
	err = run(ctx, func() (err error) { n := 2; _ = n; return err })
	return n, run(ctx, nil)
}
func Bounded(ctx context.Context) (b int, err error) {
	return bounded.Do(ctx, bounded.Call[int]{Run: func() (int, error) { return b, nil }})
}
func Wrapped(ctx context.Context) (w int, err error) { return 0, run(ctx, func() error { w++; return nil }) }
func Goes() (g int) { go func() { g++ }(); return 0 }`
	functions, info := declarationsOf(t, source)
	assert.Equal(t, []string{"p.Bounded: b", "p.Wrapped: w", "p.Goes: g"}, outliving(functions, info))
}

// declarationsOf returns the functions of a package p.
func declarationsOf(t *testing.T, source string) ([]declared, *types.Info) {
	t.Helper()
	exports, _ := exported(t)
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p.go", source, parser.SkipObjectResolution)
	require.NoError(t, err)
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object), Defs: make(map[*ast.Ident]types.Object)}
	return declarations(t, fset, module+"p", []*ast.File{file}, importing(fset, exports), info), info
}
