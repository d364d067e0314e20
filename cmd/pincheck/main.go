// Pincheck checks a machine's transfers between CPU and GPU: it finds the CUDA runtime,
// proves that bytes survive the round trip, measures pinned copies, and reports what is
// wrong and what to do about it.
//
// The exit status is explained by pincheck help exit-status.
package main

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/shm"
)

func main() {
	child.Serve(children(probe.Local{ReadHost: thisHost})) // returns, unless a probe or an experiment has started this process
	runOn(thisMachine())
}

// runOn runs the command of this process, and ends the process.
func runOn(sys system) {
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as nohup does
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	// A closed pipe is an error of writing, which is reported, and not the end of the
	// process in the middle of a run.
	signal.Ignore(syscall.SIGPIPE)
	// After the first signal everything is released. A second one ends the process
	// at once.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr, sys)
	os.Exit(code)
}

func thisMachine() system {
	return system{
		environ:     os.Environ(),
		root:        hostinfo.Root(),
		open:        cudart.Open,
		shared:      shm.DefaultDir,
		isolated:    true,
		expect:      expectedRates,
		hostname:    os.Hostname,
		experiments: bench.All(),
	}
}

// children are what processes of their own do.
func children(l probe.Local) map[string]child.Func {
	funcs := probe.Children(l)
	maps.Copy(funcs, bench.Children())
	return funcs
}

func thisHost() *hostinfo.Host { return hostinfo.Read(hostinfo.Root(), os.Environ()) }

// version may be set when linking: -ldflags "-X main.version=v1.2.3". Otherwise it is
// the module's version, which go install sets.
var version string

func tool() report.Tool {
	t := report.Tool{Name: "pincheck", Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if ok {
		if t.Version == "" {
			t.Version = info.Main.Version
		}
		t.Revision = revision(info.Settings)
	}
	if t.Version == "" || t.Version == "(devel)" {
		t.Version = "devel"
	}
	return t
}

// revision returns the revision of the source, if the build recorded it.
func revision(settings []debug.BuildSetting) string {
	var rev, dirty string
	for _, s := range settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+dirty"
			}
		}
	}
	if rev == "" {
		return ""
	}
	return rev[:min(12, len(rev))] + dirty
}
