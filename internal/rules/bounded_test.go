package rules

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The directories of the library, whose calls into CUDA may never return.
var library = []string{"cudart", "hostmem", "transfer", "loader", "weights", "managed", "kernel", "verify", "internal/hostos", "internal/gpukernels", "internal/fence", "internal/peers", "internal/pending", "internal/lifetime"}

// started has the goroutines and timers of the library that internal/bounded does not make, by
// reason and function. A function that is not here, or that starts nothing any more, fails the test.
var started = map[string][]string{
	"a wait for the GPU: poll outside of the caller's goroutine, bounded by Relay and Look": {
		"cudart.Point.Done",
		"cudart.Runtime.Stuck",
		"cudart.timeline.waitClosed",
		"cudart.sleeper.wait",
		"cudart.waits.await",
		"cudart.waits.init",
	},
	"one goroutine a device or a stream, which a call that does not return occupies": {
		"cudart.Device.addDrain",
		"cudart.Point.record",
		"hostmem/pool.core.flushLater",
		"loader.driver.after",
		"loader.driver.request",
		"transfer/internal/stage.ring.wantExtension",
	},
	"a finalizer must not block: what was lost is closed by a goroutine of its own": {
		"cudart.Device.NewStream",
		"cudart.newEvent",
		"hostmem/dlpack.deleted",
		"hostmem/pool.New",
	},
	"a time-out of bounded for a wait that takes a context": {
		"hostmem/pool.searching",
		"hostmem/pool.waiter.unrecoverable",
		"internal/fence.Fence.prune",
		"transfer/internal/stage.driver.beginGrace",
		"transfer/internal/stage.ring.check",
		"transfer/internal/stage.unknown",
		"verify.trip.drain",
		"verify.trip.release",
		"weights.release",
	},
	"a time-out of its caller for a wait that takes a context": {
		"hostmem/arrowmem.Allocator.Allocate",
	},
	"a timer of policy; no call into CUDA is waited for": {
		"hostmem/internal/budget.Budget.reclaimWaiting",
		"hostmem.background.waitForCopies",
		"hostmem/pool.newCore",
		"hostmem/shm.openUnlocked",
		"hostmem/pool.waiter.sleep",
		"loader.driver.hold",
		"transfer/internal/stage.ring.extend",
		"transfer/internal/stage.workerPool.sleep",
	},
	"one goroutine for a Buffer that is registered while it is used; Close waits for it": {
		"hostmem.background.start",
	},
	"one goroutine for the process while requests wait; what it calls ends with its context": {
		"hostmem/internal/budget.Budget.startReclaiming",
	},
	"workers that share the caller's work on the CPU": {
		"internal/hostos.PagesAhead.Start",
		"loader.Loader.begin",
		"loader.worker.work",
		"transfer/internal/stage.workerPool.publish",
	},
	"files are written while the caller goes on, who may wait for it": {
		"weights.Saving.begin",
		"weights.newPipeline",
	},
	"as many waits at once as there are streams or devices; each takes the context": {
		"internal/pending.Queue.Drain",
		"managed.movers.start",
		"weights.loading.load",
		"weights.Saving.copy",
		"weights.atOnce",
		"weights.pipeline.copyFile",
	},
	"requests to servers, whose contexts end them; no call into CUDA is waited for": {
		"weights/httpfs.body.pause",
		"weights/httpfs.body.send",
		"weights/httpfs.pause",
	},
	"the end of a context wakes who waits": {
		"managed.Allocator.newMovers",
	},
}

// Calls into CUDA that may never return, and callbacks of users, are made by
// internal/bounded: who waits for them, for how long, and how many threads they occupy is
// decided there. So the library starts goroutines and timers nowhere else, but for those
// above.
func TestGoroutinesAndTimersAreBounded(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	found := make(map[string]bool)
	for _, dir := range library {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(file string, d fs.DirEntry, err error) error {
			name, _ := filepath.Rel(root, file)
			switch {
			case err != nil:
				return err
			case d.IsDir() && (d.Name() == "testdata" || d.Name() == "cudasim" || d.Name() == "hostmemtest"):
				return fs.SkipDir
			case d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go"):
				return nil
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, function := range startsSomething(parsed) {
				found[path.Dir(filepath.ToSlash(name))+"."+function] = true
			}
			return nil
		}))
	}
	listed := slices.Concat(slices.Collect(maps.Values(started))...)
	assert.ElementsMatch(t, slices.Collect(maps.Keys(found)), listed,
		"a function starts a goroutine or a timer: use internal/bounded, or list it here under the reason why it may")
}

// startsSomething returns the functions of a file that start goroutines or timers.
func startsSomething(file *ast.File) (functions []string) {
	for _, decl := range file.Decls {
		name := "var"
		if f, ok := decl.(*ast.FuncDecl); ok {
			name = f.Name.Name
			if f.Recv != nil {
				name = fmt.Sprintf("%s.%s", receiver(f.Recv.List[0].Type), name)
			}
		}
		starts := false
		ast.Inspect(decl, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				starts = true
			case *ast.CallExpr:
				if s, ok := n.Fun.(*ast.SelectorExpr); ok {
					starts = starts || startsTimer(s)
				}
			}
			return true
		})
		if starts {
			functions = append(functions, name)
		}
	}
	return functions
}

// startsTimer reports whether a call is one of package time or context that starts a
// timer, or of sync.WaitGroup.Go.
func startsTimer(s *ast.SelectorExpr) bool {
	if s.Sel.Name == "Go" {
		return true
	}
	of, ok := s.X.(*ast.Ident)
	if !ok {
		return false
	}
	switch of.Name {
	case "time":
		return slices.Contains([]string{"After", "AfterFunc", "NewTimer", "NewTicker", "Tick", "Sleep"}, s.Sel.Name)
	case "context":
		return strings.HasPrefix(s.Sel.Name, "WithTimeout") || strings.HasPrefix(s.Sel.Name, "WithDeadline") || s.Sel.Name == "AfterFunc"
	}
	return false
}

// receiver returns the name of a method's receiver type.
func receiver(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return ""
}

func TestStartsSomething(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "", `package p
func plain() { f(); time.Now(); context.WithCancel(ctx) }
func goes() { go f() }
func (t *T[E]) group() { if x { t.all.Go(f) } }
func sleeps() { time.Sleep(1) }
func (t T) limits() { ctx, cancel = context.WithTimeout(ctx, 1) }
var x = func() { time.AfterFunc(1, f) }
`, 0)
	require.NoError(t, err)
	assert.Equal(t, []string{"goes", "T.group", "sleeps", "T.limits", "var"}, startsSomething(file))
}
