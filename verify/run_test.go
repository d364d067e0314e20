package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/testgpu"
)

// small is a plan of a few cases on every path.
func small() Plan {
	return Plan{Sizes: []int{1, 7, 4097, 65537}, Variants: 2, NoStale: true}
}

// simulated opens device 0 of a simulated library.
func simulated(t *testing.T, cfg cudasim.Config) (*cudasim.Sim, *cudart.Device) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cfg)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return sim, dev
}

// newTrip allocates for cases of a path.
func newTrip(t *testing.T, dev, peer *cudart.Device, path Path, n, streams int) *trip {
	t.Helper()
	r := defaultRunner(dev)
	r.plan.Peer = peer
	tr, err := r.newTrip(t.Context(), path, n, streams)
	require.NoError(t, err)
	return tr
}

// runTampered is Run with a function that spoils what came back, guards
// included.
func runTampered(t *testing.T, dev *cudart.Device, plan Plan, tamper func(Case, []byte)) *Report {
	t.Helper()
	r, err := newRunner(t.Context(), dev, plan)
	require.NoError(t, err)
	r.tamper = tamper
	require.NoError(t, r.run(t.Context()))
	return r.report
}

// requireClean checks a report of a run where nothing was to go wrong.
func requireClean(t *testing.T, r *Report) {
	t.Helper()
	require.NoError(t, r.Err())
	assert.Equal(t, r.CasesPlanned, r.Cases+r.SkippedCases)
	cases, verified := 0, 0
	for _, p := range r.Paths {
		cases += p.Cases
		verified += p.VerifiedBytes
		assert.Equal(t, p.CasesPlanned, p.Cases+p.SkippedCases, "%s", p.Path)
	}
	assert.Equal(t, r.Cases, cases)
	assert.Equal(t, r.VerifiedBytes, verified)
	assert.Positive(t, r.VerifiedGBPerS)
}

func TestQuickPlan(t *testing.T) {
	plan := Plan{}
	if testgpu.Race {
		plan.MaxBytes = 65537
	}
	r, err := Run(t.Context(), testgpu.Device(t), plan)
	require.NoError(t, err)
	requireClean(t, r)
	for _, s := range r.Skipped {
		t.Log(s)
		assert.True(t, testgpu.Real(), "the simulated GPU can do everything: %v", s)
		assert.NotContains(t, s.Reason, "kernel")
	}
	require.NotNil(t, r.Stale)
	assert.Zero(t, r.Stale.BadAfter)
	if testgpu.Real() { // a simulated copy may overtake this goroutine on a busy host
		assert.True(t, r.Stale.Shown(), "%v", r.Stale)
	}
	t.Logf("%d cases, %.3f GB verified in %v, %.2f GB/s; %v", r.Cases, float64(r.VerifiedBytes)/1e9, r.Duration, r.VerifiedGBPerS, r.Stale)
	for _, p := range r.Paths {
		t.Logf("%-14s %5d cases %12d bytes %v", p.Path, p.Cases, p.VerifiedBytes, p.Duration)
		if p.Path == pathKernel || p.Path == pathDeviceMemory {
			assert.Positive(t, p.Cases, p.Path)
		}
	}
}

// The whole of a full plan is 181 GB, most of it in copies of 1 GiB and more: that is for PINNED_SOAK, and for pincheck
// verify --full. A real GPU otherwise gets eight combinations of patterns and offsets for each size up to 16 MiB, and
// copies beyond what 32 bits hold.
func TestFullPlan(t *testing.T) {
	plans := []Plan{{Full: true}}
	switch {
	case !testgpu.Real():
		plans[0].Sizes = []int{63, 4097}
	case os.Getenv("PINNED_SOAK") == "":
		plans[0].MaxBytes, plans[0].Variants = 16*mib+7, 8
		plans = append(plans, Plan{Paths: []Path{pathPinned, pathDeviceMemory, pathCopier}, Sizes: []int{2*gib + 1, 4*gib + 4097}, Streams: []int{1}, Variants: 1, NoStale: true})
	}
	dev := testgpu.Device(t)
	for _, plan := range plans {
		plan.Progress = func(p Progress) {
			require.LessOrEqual(t, p.CasesDone, p.CasesTotal)
		}
		r, err := Run(t.Context(), dev, plan)
		require.NoError(t, err)
		requireClean(t, r)
		t.Logf("%d cases, %.1f GB verified in %v, %.2f GB/s", r.Cases, float64(r.VerifiedBytes)/1e9, r.Duration, r.VerifiedGBPerS)
		for _, p := range r.Paths {
			t.Logf("%-10s %6d cases %14d bytes, up to %d, %v", p.Path, p.Cases, p.VerifiedBytes, p.LargestBytes, p.Duration)
		}
		for _, s := range r.Skipped {
			t.Log(s)
		}
	}
}

func TestEveryVersion(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			_, dev := simulated(t, cudasim.Config{Version: v})
			r, err := Run(t.Context(), dev, small())
			require.NoError(t, err)
			requireClean(t, r)
			assert.Empty(t, r.Skipped)
		})
	}
}

func TestSecondDevice(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := rt.Device(1)
	require.NoError(t, err)
	plan := small()
	plan.Peer, err = rt.Device(0)
	require.NoError(t, err)
	r, err := Run(t.Context(), dev, plan)
	require.NoError(t, err)
	requireClean(t, r)
}

func TestCorruptionIsFound(t *testing.T) {
	t.Parallel()
	const n = 65537
	tests := []struct {
		name  string
		spoil func(came []byte) // guards included
		check func(t *testing.T, m Mismatch)
	}{
		{"a bit", func(b []byte) { b[guardBytes+777] ^= 4 }, func(t *testing.T, m Mismatch) {
			assert.Equal(t, []int{777, 777, 1, 1}, []int{m.FirstBadOffsetBytes, m.LastBadOffsetBytes, m.BadBytes, m.BadBits})
			assert.Contains(t, m.String(), "a single bit")
		}},
		{"the last byte", func(b []byte) { b[guardBytes+n-1] ^= 0xF0 }, func(t *testing.T, m Mismatch) {
			assert.Equal(t, []int{n - 1, 1}, []int{m.FirstBadOffsetBytes, m.BadBytes})
		}},
		{"every 512th byte", func(b []byte) {
			for i := guardBytes; i < guardBytes+n; i += 512 {
				b[i] ^= 0x81
			}
		}, func(t *testing.T, m Mismatch) {
			assert.Equal(t, []int{512, 1, 129}, []int{m.StrideBytes, m.StrideRunBytes, m.BadBytes})
		}},
		{"one byte late", func(b []byte) {
			copy(b[guardBytes+1:guardBytes+n], slices.Clone(b[guardBytes:guardBytes+n-1]))
		}, func(t *testing.T, m Mismatch) {
			assert.Equal(t, causeShifted, m.Cause)
			assert.Equal(t, 1, m.ShiftBytes)
		}},
		{"a byte too many behind", func(b []byte) { b[guardBytes+n] = 1 }, func(t *testing.T, m Mismatch) {
			assert.Equal(t, causeOverrun, m.Cause)
			assert.Equal(t, atReturn, m.At)
			assert.Equal(t, n, m.FirstBadOffsetBytes)
		}},
		{"a byte too many before", func(b []byte) { b[guardBytes-1] = 1 }, func(t *testing.T, m Mismatch) {
			assert.Equal(t, causeOverrun, m.Cause)
			assert.Equal(t, -1, m.FirstBadOffsetBytes)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, dev := simulated(t, cudasim.Config{})
			plan := Plan{Sizes: []int{n}, Patterns: []Pattern{patternCounter}, Offsets: []Offset{{3, 5, 7}}, Streams: []int{2}, NoStale: true}
			plan.MaxDetails = 100
			// What kernels check does not come back to be spoiled.
			plan.Paths = slices.DeleteFunc(Paths(), func(p Path) bool { return p.info().kernels || p.info().peer })
			r := runTampered(t, dev, plan, func(c Case, came []byte) {
				if c.Path != pathRegistered { // which stays right
					tt.spoil(came)
				}
			})
			require.ErrorIs(t, r.Err(), ErrMismatch)
			const cases = 8 + 2*4 // those through a copier with and without a stream
			assert.Equal(t, cases, r.Cases)
			assert.Equal(t, cases-1, r.MismatchCount)
			require.Len(t, r.Mismatches, cases-1)
			for _, m := range r.Mismatches {
				assert.NotEqual(t, pathRegistered, m.Path)
				assert.Equal(t, Case{m.Path, patternCounter, n, Offset{3, 5, 7}, m.Streams}, m.Case)
				tt.check(t, m)
			}
			assert.Contains(t, r.Err().Error(), r.Mismatches[0].String())
		})
	}
}

func TestPageOfTheReturningMemoryIsReported(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	plan := Plan{Paths: []Path{pathPinned}, Sizes: []int{65537}, Patterns: []Pattern{patternRandom}, Offsets: []Offset{{1, 2, 3}}, Streams: []int{1}, NoStale: true}
	r := runTampered(t, dev, plan, func(_ Case, came []byte) {
		clear(came[guardBytes-3:][2*4096 : 3*4096]) // the target begins 3 bytes into a page
	})
	require.Len(t, r.Mismatches, 1)
	assert.Equal(t, 4096, r.Mismatches[0].PageBytes)
	assert.Equal(t, pageOfReturn, r.Mismatches[0].PageOf)
	assert.Equal(t, causeConstant, r.Mismatches[0].Cause)
}

// A case counts once, whatever is wrong with it: a byte of its own, and one outside.
func TestMismatchesAreCountedByCase(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	plan := Plan{Paths: []Path{pathPinned}, Sizes: []int{64}, Variants: 2, Streams: []int{1}, NoStale: true}
	r := runTampered(t, dev, plan, func(_ Case, came []byte) {
		came[0] ^= 1
		came[guardBytes] ^= 1
	})
	assert.Equal(t, 2, r.Cases)
	assert.Equal(t, 2, r.MismatchCount)
	assert.Len(t, r.Mismatches, 4, "with all that is wrong")
	require.ErrorContains(t, r.Err(), "in 2 of 2 cases")
}

// A round trip takes at most half of the memory that the host has to spare.
func TestCasesBeyondFreeHostMemoryAreSkipped(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	const n = 4096
	for _, c := range []struct {
		path   Path
		copies int // in host memory
	}{{pathPinned, 2}, {pathPageable, 2}, {pathCopierFile, 4}} {
		for _, enough := range []bool{true, false} {
			r, err := newRunner(t.Context(), dev, Plan{Paths: []Path{c.path}, Sizes: []int{1, n}, Variants: 1, Streams: []int{1}, NoStale: true})
			require.NoError(t, err)
			free := 2 * c.copies * n
			if !enough {
				free--
			}
			r.hostFree = func() (int, bool) { return free, true }
			require.NoError(t, r.run(t.Context()))
			requireClean(t, r.report)
			if enough {
				assert.Empty(t, r.report.Skipped, c.path)
				continue
			}
			require.Len(t, r.report.Skipped, 1, c.path)
			assert.Equal(t, fmt.Sprintf("takes at most half of the %d bytes free on the host", free), r.report.Skipped[0].Reason)
			assert.Equal(t, 1, r.report.Paths[0].LargestBytes, c.path)
		}
	}
}

func TestDetailsAreBounded(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	plan := Plan{Paths: []Path{pathPinned}, Sizes: []int{64}, Variants: 100, Streams: []int{1}, MaxDetails: 3, NoStale: true}
	r := runTampered(t, dev, plan, func(_ Case, came []byte) { came[guardBytes] ^= 1 })
	assert.Equal(t, 48, r.MismatchCount)
	assert.Len(t, r.Mismatches, 3)
}

// lazy returns an end whose copies after the first few do nothing.
func lazy(e *end, uploads, downloads int) *end {
	first := func(n int, f copyFunc) copyFunc {
		return func(ctx context.Context, s *cudart.Stream, dev cudart.DevPtr, off, size int) error {
			if n--; n < 0 {
				return nil
			}
			return f(ctx, s, dev, off, size)
		}
	}
	l := *e
	l.upload, l.download = first(uploads, e.upload), first(downloads, e.download)
	return &l
}

func TestCopiesThatDoNothingCannotPass(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	const n = 10000
	for _, path := range []Path{
		pathPinned, pathPageable, pathMapped, pathManaged, pathManagedMoved, pathHop, pathCopier, pathCopierFile, pathCopierIO, pathCopierParts,
	} {
		for _, pattern := range patterns() {
			tr := newTrip(t, dev, nil, path, n+8, 2)
			source, back := tr.source, tr.sink
			c := Case{Path: path, Pattern: pattern, SizeBytes: n, Offset: Offset{1, 2, 3}, Streams: 1}
			want := pattern.content(11)
			poisonings := len(tr.targets)
			for _, tt := range []struct {
				uploads, downloads int
				at                 string
			}{
				{poisonings, 1, atDevice},
				{poisonings + 1, 0, atReturn},
			} {
				tr.source, tr.sink = lazy(source, tt.uploads, 0), lazy(back, 0, tt.downloads)
				wrong, err := tr.run(t.Context(), c, want)
				require.NoError(t, err)
				require.Len(t, wrong, 1, "%s %s: no %s", path, pattern, tt.at)
				assert.Equal(t, []any{n, causeStale, tt.at}, []any{wrong[0].BadBytes, wrong[0].Cause, wrong[0].At}, "%s %s", path, pattern)
			}
			tr.source, tr.sink = source, back
			wrong, err := tr.run(t.Context(), c, want)
			require.NoError(t, err)
			assert.Empty(t, wrong)
			require.NoError(t, tr.release(t.Context()))
		}
	}
}

func TestFailingCallIsReportedWithItsCase(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Config{})
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 5, Code: cudart.ErrInvalidValue})
	plan := small()
	plan.Paths = []Path{pathHostAlloc}
	r, err := Run(t.Context(), dev, plan)
	require.NoError(t, err)
	require.ErrorIs(t, r.Err(), cudart.ErrInvalidValue)
	assert.Equal(t, 1, r.FailureCount)
	require.Len(t, r.Failures, 1)
	assert.Equal(t, plan.caseAt(t, pathHostAlloc, 1), r.Failures[0].Case)
	assert.Contains(t, r.Failures[0].String(), "cudaMemcpyAsync")
	assert.Equal(t, r.CasesPlanned-1, r.Cases, "all others were run")
	assert.Zero(t, r.MismatchCount)
}

func (p Plan) caseAt(t *testing.T, path Path, i int) Case {
	p, err := p.normal()
	require.NoError(t, err)
	return p.cases(path)[i]
}

func TestPathEndsAfterFailuresInARow(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Config{})
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Times: -1, Code: cudart.ErrInvalidValue})
	plan := small()
	plan.Paths = []Path{pathRegistered, pathPageable}
	var last Progress
	var reports []Report // as they were, and pointers to the same
	var pointers []*Report
	plan.Progress = func(p Progress) {
		last = p
		assert.Equal(t, p.CasesDone, p.Report.Cases+p.Report.FailureCount)
		assert.Positive(t, p.Report.Duration, "until now: it may be the last that is shown")
		for _, path := range p.Report.Paths {
			assert.Positive(t, path.Duration)
		}
		reports, pointers = append(reports, *p.Report), append(pointers, p.Report)
	}
	r, err := Run(t.Context(), dev, plan)
	require.NoError(t, err)
	for i := range reports {
		require.Equal(t, reports[i], *pointers[i], "what was shown does not change")
	}
	assert.Equal(t, pathFailures, last.Report.FailureCount)
	assert.Len(t, last.Report.Failures, pathFailures)
	assert.Len(t, last.Report.Paths, 2)
	assert.Equal(t, pathFailures, r.FailureCount)
	require.Len(t, r.Skipped, 1)
	assert.Contains(t, r.Skipped[0].String(), "registered")
	assert.Contains(t, r.Skipped[0].Reason, "ended after 3 failures")
	assert.Equal(t, r.CasesPlanned, r.Cases+r.SkippedCases+r.FailureCount)
	assert.Equal(t, r.Paths[1].CasesPlanned, r.Paths[1].Cases, "synchronous copies still work")
	assert.Equal(t, last.CasesTotal, last.CasesDone)
	assert.Equal(t, last.BytesTotal, last.BytesDone)
}

func TestAsynchronousFailure(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{})) // the device is lost with all it holds
	require.NoError(t, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 40, Async: true, Code: cudart.ErrLaunchFailure})
	r, err := Run(t.Context(), dev, small())
	require.NoError(t, err)
	require.ErrorIs(t, r.Err(), cudart.ErrLaunchFailure)
	assert.Positive(t, r.Cases)
	assert.Less(t, r.Cases, r.CasesPlanned)
	assert.Zero(t, r.MismatchCount)
	_, _ = rt.Close(), sim.Close() // report what the lost device held
}

func TestCancelBetweenCases(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	ctx, cancelCause := context.WithCancelCause(t.Context())
	cancel := func() { cancelCause(assert.AnError) }
	plan := small()
	plan.Progress = func(p Progress) {
		if p.CasesDone == 10 {
			cancel()
		}
	}
	r, err := Run(ctx, dev, plan)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, assert.AnError)
	assert.Equal(t, 10, r.Cases)
	assert.Zero(t, r.FailureCount, "a cancellation is no failure")
}

func TestCancelWaitsForCopiesInFlight(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex // the hook is called from several threads
	queries := -1     // since copies were held
	sim.OnCall(func(fn string, n int) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case fn == "cudaMemcpyAsync" && n == 20:
			sim.Hold()
			cancel()
			queries = 0
		case queries >= 0 && strings.HasSuffix(fn, "Query"):
			// So many queries are made only by a wait that outlasts the cancelled one.
			if queries++; queries == 100 {
				sim.Release()
			}
		case queries >= 0 && queries < 100:
			assert.NotContains(t, []string{"cudaHostUnregister", "cudaFreeHost", "cudaFree"}, fn, "memory released while copies are held")
		}
	})
	_, err := Run(ctx, dev, small())
	require.ErrorIs(t, err, context.Canceled)
	sim.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	assert.GreaterOrEqual(t, queries, 100)
}

func TestNothingIsSkippedSilently(t *testing.T) {
	t.Parallel()
	t.Run("no managed or mapped memory", func(t *testing.T) {
		t.Parallel()
		_, dev := simulated(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{
			cudart.AttrManagedMemory: 0, cudart.AttrConcurrentManagedAccess: 0, cudart.AttrCanMapHostMemory: 0,
		}}}})
		r, err := Run(t.Context(), dev, small())
		require.NoError(t, err)
		requireClean(t, r)
		require.Len(t, r.Skipped, 4)
		assert.Equal(t, pathKernel, r.Skipped[3].Path)
		assert.Contains(t, r.Skipped[0].Reason, "mapped host memory is not supported by device 0 (Simulated GPU): attribute 19 is 0")
		assert.Contains(t, r.Skipped[1].Reason, "managed memory is not supported by device 0 (Simulated GPU): attribute 83 is 0")
		assert.Equal(t, pathManaged, r.Skipped[1].Path)
		assert.Contains(t, r.Skipped[2].Reason, "moving managed memory is not supported by device 0 (Simulated GPU): attribute 89 is 0")
		assert.Equal(t, pathManagedMoved, r.Skipped[2].Path)
	})
	t.Run("little device memory", func(t *testing.T) {
		t.Parallel()
		_, dev := simulated(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 4 * mib}}})
		plan := Plan{Sizes: []int{4096, mib, 3 * mib}, Variants: 1, NoStale: true}
		r, err := Run(t.Context(), dev, plan)
		require.NoError(t, err)
		requireClean(t, r)
		for _, p := range r.Paths {
			assert.Positive(t, p.Cases, "%s", p.Path)
			assert.Positive(t, p.SkippedCases, "%s", p.Path)
		}
		for _, s := range r.Skipped {
			assert.Regexp(t, "takes at most (half|a quarter) of the [0-9]+ bytes free on the device", s.Reason)
		}
	})
	t.Run("memory that cannot be had", func(t *testing.T) {
		t.Parallel()
		sim, dev := simulated(t, cudasim.Config{})
		sim.Fail("cudaHostAlloc", cudasim.Fault{Times: 2, Code: cudart.ErrMemoryAllocation})
		plan := Plan{Paths: []Path{pathHostAlloc}, Sizes: []int{4096, 2 * mib, 3 * mib, 9 * mib}, Streams: []int{1}, Variants: 1, NoStale: true}
		r, err := Run(t.Context(), dev, plan)
		require.NoError(t, err)
		requireClean(t, r)
		assert.Equal(t, 1, r.Cases)
		require.Len(t, r.Skipped, 2)
		assert.Contains(t, r.Skipped[0].Reason, "no memory for 9 MiB: ")
		assert.Contains(t, r.Skipped[1].Reason, "no memory for 3 MiB: ")
		assert.Equal(t, 2, r.Skipped[1].Cases)
	})
	t.Run("hosts that cannot register", func(t *testing.T) {
		t.Parallel()
		_, dev := simulated(t, cudasim.ConfidentialComputing())
		r, err := Run(t.Context(), dev, small())
		require.NoError(t, err)
		requireClean(t, r)
		var paths []Path
		for _, s := range r.Skipped {
			paths = append(paths, s.Path)
			assert.Contains(t, s.Reason, "cudaHostRegister")
		}
		assert.Equal(t, []Path{pathRegistered}, paths, "all else has memory from cudaHostAlloc")
	})
	t.Run("hosts that need not register", func(t *testing.T) {
		t.Parallel()
		_, dev := simulated(t, cudasim.SharedPageTables())
		r, err := Run(t.Context(), dev, small())
		require.NoError(t, err)
		requireClean(t, r)
		assert.Empty(t, r.Skipped)
		assert.Positive(t, r.Cases)
	})
}

// What a limit on pinned memory forbids is skipped with the reason. Not parallel:
// the limits are the process's.
func TestALimitOnPinnedMemory(t *testing.T) {
	require.NoError(t, hostmem.SetLimits(hostmem.Limits{MaxShare: 1e-12}))
	defer func() { require.NoError(t, hostmem.SetLimits(hostmem.Limits{})) }()
	_, dev := simulated(t, cudasim.Config{})
	plan := Plan{Paths: []Path{pathPinned, pathPageable, pathCopier}, Sizes: []int{100, 3 * mib}, Variants: 1, NoStale: true}
	r, err := Run(t.Context(), dev, plan)
	require.NoError(t, err)
	requireClean(t, r)
	for i, skipped := range []bool{true, false, true} {
		assert.Equal(t, skipped, r.Paths[i].SkippedCases == r.Paths[i].CasesPlanned, "%v", r.Paths[i])
	}
	for _, s := range r.Skipped {
		assert.Contains(t, s.Reason, "hostmem: ")
	}
}

// long reports whether sweeps try all combinations.
func long() bool { return os.Getenv("PINNED_SOAK") != "" }

// positions are those of n calls of which one fails at a time: the first, the last and two between,
// or with PINNED_SOAK all.
func positions(n int) (all []int) {
	for nth := 1; nth <= n; nth++ {
		if long() || nth == 1 || nth == n || nth == (n+2)/3 || nth == (2*n+2)/3 {
			all = append(all, nth)
		}
	}
	return all
}

// TestEveryCallCanFail makes calls of each function in a small run fail in turn, once.
func TestEveryCallCanFail(t *testing.T) {
	t.Parallel()
	plan := Plan{
		Paths: []Path{pathPinned, pathRegistered, pathHostAlloc, pathPageable, pathMapped, pathManaged, pathManagedMoved, pathHop, pathCopierFile},
		Sizes: []int{100}, Patterns: []Pattern{patternRandom}, Offsets: []Offset{{1, 2, 3}}, Streams: []int{2}, NoStale: true,
	}
	// A run can go on without what the first ones say, the second ones are tried
	// again, and the third ones are what else a wait can do.
	optional := []string{
		"cudaDeviceGetAttribute", "cudaMemGetInfo",
		"cudaFree", "cudaFreeHost", "cudaHostUnregister", "cudaStreamDestroy", "cudaEventDestroy",
		"cudaEventRecord", "cudaEventQuery", "cudaStreamQuery", "cudaEventCreateWithFlags",
		"cuDevicePrimaryCtxRetain", // for the first of the calls above
	}

	sim, dev := simulated(t, cudasim.Config{})
	var mu sync.Mutex // the hook is called from several threads
	calls := make(map[string]int)
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	_, err := Run(t.Context(), dev, plan)
	require.NoError(t, err)
	sim.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	delete(calls, "cudaGetLastError") // cannot fail
	delete(calls, "cudaSetDevice")    // is not needed on a host with one device
	for _, fn := range slices.Sorted(maps.Keys(calls)) {
		t.Run(fn, func(t *testing.T) {
			times := calls[fn]
			if strings.HasSuffix(fn, "Query") { // as often as the wait happens to ask
				times = min(times, 2)
			}
			for _, nth := range positions(times) {
				sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
				require.NoError(t, err)
				rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
				require.NoError(t, err)
				dev, err := rt.Device(0)
				require.NoError(t, err)
				before := sim.Calls(fn)
				sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrInvalidValue})
				r, err := Run(t.Context(), dev, plan)
				require.NoError(t, err)
				assert.Zero(t, r.MismatchCount)
				if r.Err() != nil {
					assert.ErrorIs(t, r.Err(), cudart.ErrInvalidValue, "call %d", nth)
					assert.Contains(t, r.Err().Error(), fn, "call %d", nth)
				}
				if sim.Calls(fn)-before >= nth && !slices.Contains(optional, fn) {
					assert.Error(t, r.Err(), "call %d, skipped: %v", nth, r.Skipped)
				}
				require.NoError(t, rt.Close())
				testgpu.End(t, sim)
			}
		})
	}
}

// What CUDA refuses twice to release is reported, and the rest is released.
func TestMemoryThatCannotBeReleasedIsReported(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		path  Path
		fn    string
		stays string
	}{
		{pathRegistered, "cudaHostUnregister", "4324 B (4.22 KiB) of host memory stays: cudaHostUnregister"},
		{pathHostAlloc, "cudaFreeHost", "4324 B (4.22 KiB) of host memory stays: cudaFreeHost"},
		{pathManaged, "cudaFree", "4324 B (4.22 KiB) of host memory stays: cudaFree"},
		{pathPageable, "cudaFree", "4324 B (4.22 KiB) of device memory stays: cudaFree"},
		{pathPinned, "cudaHostUnregister", "4324 B (4.22 KiB) of host memory stays: hostmem: "},
		{pathPinned, "cudaStreamDestroy", "a stream stays: cudaStreamDestroy"},
		{pathCopier, "cudaHostUnregister", "release: 8648 B (8.45 KiB) of host memory and 4324 B (4.22 KiB) of device memory stay allocated: copies may be under way: the pinned memory of a copier stays: "},
	} {
		t.Run(string(test.path)+" "+test.fn, func(t *testing.T) {
			t.Parallel()
			sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
			require.NoError(t, err)
			rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
			require.NoError(t, err)
			dev, err := rt.Device(0)
			require.NoError(t, err)
			plan := Plan{Paths: []Path{test.path}, Sizes: []int{100}, Streams: []int{1}, Variants: 1, Offsets: []Offset{{64, 64, 64}}, NoStale: true}
			sim.Fail(test.fn, cudasim.Fault{Times: -1, Code: cudart.ErrInvalidValue})
			r, err := Run(t.Context(), dev, plan)
			require.NoError(t, err)
			require.ErrorIs(t, r.Err(), cudart.ErrInvalidValue)
			assert.ErrorContains(t, r.Err(), test.stays)
			require.Equal(t, 1, r.FailureCount)
			assert.Equal(t, Case{Path: test.path}, r.Failures[0].Case)
			assert.Equal(t, r.CasesPlanned, r.Cases)
			assert.Positive(t, sim.Calls(test.fn)-1, "tried again")
			_, _ = rt.Close(), sim.Close() // say what stays
		})
	}
}

// unanswered are the calls by which CUDA says whether work is done.
var unanswered = []string{"cudaEventRecord", "cudaEventQuery", "cudaStreamQuery", "cudaStreamWaitEvent", "cudaDeviceSynchronize"}

// No memory is freed, unregistered or unmapped while a copy may run, whatever
// keeps failing: the copies are held here, as on a GPU that is busy.
func TestNothingIsReleasedWhileCopiesMayRun(t *testing.T) {
	t.Parallel()
	for i, path := range []Path{pathPinned, pathRegistered, pathHostAlloc, pathMapped, pathManaged, pathManagedMoved, pathHop} {
		// While one call shows whether the work is done, it is waited for until the context ends.
		for j, c := range []struct {
			name    string
			failing []string
		}{
			{"all", unanswered},
			{"streams", []string{"cudaStreamQuery"}},
			{"recording", []string{"cudaStreamQuery", "cudaEventRecord"}},
			{"events", []string{"cudaStreamQuery", "cudaEventQuery"}},
			{"none", nil},
		} {
			name, failing, canceled := c.name, c.failing, c.name != "all"
			if !long() && path != pathPinned && i%5 != j {
				continue
			}
			t.Run(string(path)+" "+name, func(t *testing.T) {
				t.Parallel()
				sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
				require.NoError(t, err)
				rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
				require.NoError(t, err)
				dev, err := rt.Device(0)
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var held atomic.Bool
				sim.OnCall(func(fn string, n int) {
					switch {
					case fn == "cudaMemcpyAsync" && n == 5:
						sim.Hold()
						held.Store(true)
						for _, fn := range failing {
							sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrInvalidValue})
						}
						if canceled {
							cancel()
						}
					case held.Load():
						assert.NotContains(t, []string{"cudaHostUnregister", "cudaFreeHost", "cudaFree"}, fn)
					}
				})
				plan := Plan{Paths: []Path{path}, Sizes: []int{4097}, Streams: []int{2}, Variants: 2, Offsets: []Offset{{}}, NoStale: true}
				r, err := newRunner(ctx, dev, plan)
				require.NoError(t, err)
				r.grace = 20 * time.Millisecond
				err = r.run(ctx)
				if canceled {
					require.ErrorIs(t, err, context.Canceled)
				} else {
					require.NoError(t, err)
				}
				require.NotEmpty(t, r.report.Failures)
				last := r.report.Failures[len(r.report.Failures)-1]
				require.ErrorIs(t, last.Err, errBusy)
				require.Regexp(t, "release: [0-9].* of host memory and [0-9].* of device memory stay allocated: copies may be under way: ", last.Error)
				require.Zero(t, r.report.Cases)
				require.Zero(t, r.report.MismatchCount)
				if !canceled {
					require.Equal(t, 2, r.report.FailureCount, "the case's and the release's")
					require.Equal(t, 1, r.report.SkippedCases, "no other case may touch the memory")
				}

				sim.OnCall(nil)
				out := sim.Outstanding()
				require.Positive(t, out.DeviceAllocs)
				require.Positive(t, out.PendingOps)
				sim.ResetFaults()
				sim.Release()
				require.NoError(t, dev.Synchronize(t.Context()), "the copies find all their memory")
				require.Empty(t, sim.Misuses())
				_, _ = rt.Close(), sim.Close() // say what stays
			})
		}
	}
}

// With a stream of the caller, the copies of a copier come after what is queued there.
func TestCopierPathsUseTheCallersStream(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	other := peer(t, dev)
	const n = 1000
	for _, path := range Paths() {
		if !path.info().copier {
			continue
		}
		tr := newTrip(t, dev, other, path, mib, 1)
		s := tr.streams[0]
		// after runs a copy, and only then lets the stream fill the device's bytes.
		after := func(value byte, copies func() error) {
			blocked := make(chan struct{})
			require.NoError(t, s.LaunchHostFunc(func() { <-blocked }))
			require.NoError(t, s.Memset(tr.targets[0].p, value, n))
			copied := make(chan error, 1)
			go func() { copied <- copies() }()
			time.AfterFunc(5*time.Millisecond, func() { close(blocked) })
			require.NoError(t, <-copied, "%s", path)
			require.NoError(t, s.Synchronize(t.Context()))
		}
		sent := tr.source.mem[leadBytes:][:n]
		for i := range sent {
			sent[i] = byte(i)
		}
		device := tr.targets[0].p
		after(7, func() error { return tr.upload(t.Context(), s, device, leadBytes, n) })
		there := make([]byte, n)
		require.NoError(t, dev.CopyToHost(unsafe.Pointer(&there[0]), device, n))
		require.Equal(t, sent, there, "%s", path)
		after(9, func() error { return tr.download(t.Context(), s, leadBytes, device, n) })
		require.Equal(t, bytes.Repeat([]byte{9}, n), tr.sink.mem[leadBytes:][:n], "%s", path)
		require.NoError(t, tr.release(t.Context()))
	}
}

// A Progress function that panics, or ends its goroutine, leaves nothing behind.
func TestProgressThatPanics(t *testing.T) {
	t.Parallel()
	for _, ends := range []func(){func() { panic("in Progress") }, runtime.Goexit} {
		sim, dev := simulated(t, cudasim.Config{}) // whose end says if something is left
		plan := small()
		for _, when := range []int{0, 1, 7, 30, 100} {
			plan.Progress = func(p Progress) {
				if p.CasesDone == when {
					ends()
				}
			}
			ended := make(chan any)
			go func() {
				defer func() { ended <- recover() }()
				_, _ = Run(t.Context(), dev, plan)
				t.Error("it went on")
			}()
			if p := <-ended; p != nil {
				require.Equal(t, "in Progress", p)
			}
			out := sim.Outstanding()
			out.Events = 0 // a runtime keeps some for the next wait
			require.Equal(t, cudasim.Outstanding{}, out, "after %d cases", when)
		}
	}
}

// The exported functions and methods, with values that nobody should pass: zero ones, nil,
// typed nil, and sizes and offsets out of range. None panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	var none context.Context
	ctx := t.Context()
	run := func(ctx context.Context, dev *cudart.Device, plan Plan) func() error {
		return func() error { _, err := Run(ctx, dev, plan); return err }
	}
	stale := func(ctx context.Context, dev *cudart.Device) func() error {
		return func() error { _, err := StaleRead(ctx, dev); return err }
	}
	var noReport *Report
	for what, call := range map[string]struct {
		f    func() error
		want string
	}{
		"Run, nil context":       {run(none, dev, Plan{}), "verify: run: the context is nil"},
		"Run, nil device":        {run(ctx, nil, Plan{}), "verify: run: the device is nil"},
		"Run, zero device":       {run(ctx, new(cudart.Device), Plan{}), "verify: run: the device is nil"},
		"Run, zero peer":         {run(ctx, dev, Plan{Peer: new(cudart.Device)}), "Plan.Peer is"},
		"Run, the peer itself":   {run(ctx, dev, Plan{Peer: dev}), "Plan.Peer is"},
		"Run, path":              {run(ctx, dev, Plan{Paths: []Path{""}}), "unknown path"},
		"Run, pattern":           {run(ctx, dev, Plan{Patterns: []Pattern{""}}), "unknown pattern"},
		"Run, size":              {run(ctx, dev, Plan{Sizes: []int{0}}), "must be positive"},
		"Run, streams":           {run(ctx, dev, Plan{Streams: []int{math.MaxInt}}), "must be 1 to"},
		"Run, offset":            {run(ctx, dev, Plan{Offsets: []Offset{{Source: math.MinInt}}}), "must be 0 to"},
		"StaleRead, nil context": {stale(none, dev), "verify: stale read: the context is nil"},
		"StaleRead, nil device":  {stale(ctx, nil), "verify: stale read: the device is nil"},
		"StaleRead, zero device": {stale(ctx, new(cudart.Device)), "verify: stale read: the device is nil"},
		"Report, nil":            {noReport.Err, "the report is nil"},
		"Report, zero":           {new(Report).Err, "verify: "},
		"Report without a list":  {(&Report{MismatchCount: 1, FailureCount: 1}).Err, "verify: mismatch"},
	} {
		assert.NotPanics(t, func() { assert.ErrorContains(t, call.f(), call.want, what) }, what)
	}
	assert.NotPanics(t, func() {
		_ = Case{}.String() + Failure{}.String() + Skip{}.String() + Mismatch{}.String() + StaleResult{}.String()
		assert.False(t, StaleResult{}.Shown())
	})
	assert.NotPanics(t, func() { _ = Mismatch{Cause: causeConstant}.String() })
}

func TestReportAsJSON(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	plan := small()
	plan.Paths = []Path{pathPinned}
	r := runTampered(t, dev, plan, func(c Case, came []byte) {
		if c.SizeBytes == 7 {
			came[guardBytes] ^= 1
		}
	})
	text, err := json.Marshal(r)
	require.NoError(t, err)
	for _, key := range []string{"cases_planned", "verified_bytes", "duration_ns", "verified_gb_per_s", "mismatches", "expected_hex", "size_bytes"} {
		assert.Contains(t, string(text), `"`+key+`":`)
	}
	var back Report
	require.NoError(t, json.Unmarshal(text, &back))
	assert.Equal(t, *r, back)
}

func TestReportOfNothingIsNotOK(t *testing.T) {
	t.Parallel()
	assert.Error(t, (&Report{}).Err())
	assert.ErrorIs(t, (&Report{Cases: 1, Stale: &StaleResult{BadAfter: 1}}).Err(), ErrMismatch)
}

// The CPU writes, the device reads and writes, and the CPU reads, and the memory lies on
// the side that accesses it, case after case of the same memory.
func TestManagedMemoryIsPrefetchedBothWays(t *testing.T) {
	t.Parallel()
	for _, streams := range []int{1, 4} {
		sim, dev := simulated(t, cudasim.Config{})
		plan := Plan{Paths: []Path{pathManagedMoved}, Sizes: []int{100, 65537, mib + 1}, Streams: []int{streams}, NoStale: true}
		r, err := Run(t.Context(), dev, plan)
		require.NoError(t, err)
		requireClean(t, r)
		assert.Greater(t, sim.Calls("cudaMemPrefetchAsync"), 3*r.Cases)
		// Streams share the pages at the seams of their parts, which one may move to the host
		// before another accesses them. A seam has one page, up and down.
		assert.LessOrEqual(t, raw.TrafficOf(sim).FaultsOnDevice, 2*(streams-1)*r.Cases)
	}
}
