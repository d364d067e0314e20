package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// Every command ends when it is interrupted, and by --timeout, also while a call into CUDA, or a pipe
// that it reads, does not return: with what it has where it has a result, and else with a line.
func TestEveryCommandEnds(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, c := range []struct {
		command string
		fn      string // that does not return; empty for the standard input
		result  bool   // there is one
	}{
		{"check --format json", "cudaGetDeviceCount", true},
		{"check --format json", "cudaMemcpyAsync", true},
		{"verify --format json", "cudaMemcpyAsync", true},
		{"devices --format json", "cudaGetDeviceCount", true},
		{"devices --format json", "cudaMemGetInfo", true},
		{"bench link --format json", "cudaGetDeviceCount", true},
		{"bench link --format json", "cudaMemcpyAsync", true},
		{"report --format json -o -", "cudaMemcpyAsync", true},
		{"capture -o FILE", "cudaMemcpyAsync", false},
		{"report - -o FILE", "", false},
		{"compare - FILE", "", false},
	} {
		for _, how := range []string{"interrupt", "timeout"} {
			t.Run(c.command+" "+c.fn+" "+how, func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				sys := on(t, "h200-vm")
				sys.experiments = []measure.Experiment{bench.Link(bench.LinkPlan{SizeBytes: 4096, Samples: 3})}
				sys.releaseGrace, sys.callGrace = 50*time.Millisecond, 10*time.Millisecond
				if c.fn == "cudaGetDeviceCount" {
					sys.releaseGrace = time.Minute // it ends by callGrace, and has to report the call
				}
				reached := make(chan struct{}, 100)
				var inTime atomic.Bool // it was called before the run was ended
				sys.open = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
					sim, err := cudasim.New(cudasim.Config{})
					if err != nil {
						return nil, err
					}
					t.Cleanup(func() { sim.Close() }) // what does not return stays open
					unblock := sim.Block(c.fn, cudasim.Fault{Times: -1})
					t.Cleanup(unblock)
					sim.OnCall(func(fn string, _ int) {
						if fn == c.fn {
							inTime.Store(inTime.Load() || ctx.Err() == nil)
							select {
							case reached <- struct{}{}:
							default:
							}
						}
					})
					return cudart.Open(ctx, cudart.Options{Source: sim})
				}
				file := filepath.Join(t.TempDir(), "out")
				command := strings.ReplaceAll(strings.ReplaceAll(c.command, "-o -", ""), "FILE", file)
				args := strings.Fields(command)
				want := exitInterrupted
				if how == "timeout" {
					args, want = append(args, "--timeout", "300ms"), exitIncomplete
				} else {
					go func() {
						if c.fn != "" {
							<-reached
						}
						cancel()
					}()
				}
				o := &options{}
				root := newRoot(o, sys)
				var stdout, stderr strings.Builder
				pipe, _ := io.Pipe() // nobody writes
				root.SetIn(pipe)
				root.SetArgs(args)
				root.SetOut(&stdout)
				root.SetErr(&stderr)
				cmd, err := root.ExecuteContextC(ctx)
				got := exitCode(cmd, err, &stderr)
				assert.Equal(t, want, got, "%s%s", stdout.String(), stderr.String())
				if !c.result {
					_, err := os.Stat(file)
					assert.True(t, strings.Contains(stderr.String(), "nothing is written") && err != nil || strings.HasPrefix(c.command, "capture") && err == nil, stderr.String())
					return
				}
				text := stdout.String()
				if strings.HasPrefix(c.command, "report") {
					written, err := os.ReadFile(file)
					if err == nil {
						text = string(written)
					}
				}
				r, err := report.Read([]byte(text))
				require.NoError(t, err, text)
				assert.False(t, r.Complete)
				if c.fn == "cudaGetDeviceCount" && (how == "interrupt" || inTime.Load()) {
					require.NotEmpty(t, r.Probes)
					assert.Contains(t, r.Probes[0].Call, c.fn)
				}
			})
		}
	}
}
