//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostinfo/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

// hostWith is a host with so many GiB of memory and so many to spare.
func hostWith(total, available int) fstest.MapFS {
	return fstest.MapFS{"proc/meminfo": {Data: fmt.Appendf(nil, "MemTotal: %d kB\nMemFree: 1 kB\nMemAvailable: %d kB\n", total<<20, available<<20)}}
}

func TestTheGuardLeavesTheHostAShare(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const gib = 1 << 30
	files := hostWith(64, 10)
	l := newLimiter(files)
	require.NoError(t, l.take(ctx, 9*gib-1), "nine tenths of 10 GiB")
	err := l.take(ctx, gib)
	require.NoError(t, err, "the host tells anew: what is pinned is available no more")
	files["proc/meminfo"] = hostWith(64, 1)["proc/meminfo"]
	err = l.take(ctx, gib)
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorContains(t, err, "1073741824 bytes")
	require.ErrorContains(t, err, "1.0 of 64.0 GiB (/proc/meminfo MemAvailable)")
	require.ErrorContains(t, err, "MaxShare")

	// What was refused counts for nothing, and more may be allowed.
	l.set(Limits{MaxShare: 1})
	require.NoError(t, l.take(ctx, gib))
	l.set(Limits{MaxShare: 1.5})
	require.NoError(t, l.take(ctx, 100*gib), "switched off")
}

func TestTheGuardLooksAgainBeforeItRefuses(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const mib = 1 << 20
	files := hostWith(64, 1)
	files["proc/meminfo"] = &fstest.MapFile{Data: []byte("MemTotal: 1048576 kB\nMemAvailable: 20480 kB\n")}
	l := newLimiter(files)
	require.NoError(t, l.take(ctx, 10*mib))
	require.ErrorIs(t, l.take(ctx, 19*mib), ErrLimit)
	files["proc/meminfo"] = &fstest.MapFile{Data: []byte("MemTotal: 1048576 kB\nMemAvailable: 40960 kB\n")}
	require.NoError(t, l.take(ctx, 19*mib), "20 MiB came back meanwhile")
}

func TestTheGuardKnowsTheTighterCgroup(t *testing.T) {
	t.Parallel()
	files := hostWith(64, 60)
	files["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("0::/job\n")}
	files["proc/self/mountinfo"] = &fstest.MapFile{Data: []byte("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")}
	files["sys/fs/cgroup/job/memory.max"] = &fstest.MapFile{Data: []byte("1073741824\n")}
	files["sys/fs/cgroup/job/memory.current"] = &fstest.MapFile{Data: []byte("536870912\n")}
	files["sys/fs/cgroup/job/memory.stat"] = &fstest.MapFile{Data: []byte("inactive_file 0\nactive_file 0\n")}
	err := newLimiter(files).take(context.Background(), 500<<20)
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorContains(t, err, "0.5 of 1.0 GiB")
	require.ErrorContains(t, err, "memory.max")
}

// What pincheck reports of these hosts is tested in internal/hostinfo: both must say
// the same.
func TestTheGuardOnCapturedHosts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		host string
		left linux.Headroom
	}{
		{"cgroup-v2-high", linux.Headroom{Available: 30 * mib, Total: 60 * mib, Source: "/sys/fs/cgroup/kubepods.slice/pod1/ctr memory.high"}},
		{"cgroup-v2-nested", linux.Headroom{Available: gib + gib/2, Total: 8 * gib, Source: "/sys/fs/cgroup/slurm/job_7 memory.max"}},
		{"no-gpu-cgroup-v1", linux.Headroom{Available: 24219608 * kib, Total: 24682416 * kib, Source: "/proc/meminfo MemAvailable"}},
	} {
		fsys, err := hosttest.Load(filepath.Join("..", "testdata", "hosts", tc.host+".txtar"))
		require.NoError(t, err)
		left, err := headroom(fsys)
		require.NoError(t, err)
		assert.Equal(t, tc.left, left, tc.host)
		l := newLimiter(fsys)
		l.set(Limits{MaxShare: 1})
		require.NoError(t, l.take(t.Context(), tc.left.Available), tc.host)
		require.ErrorIs(t, l.take(t.Context(), tc.left.Available+1), ErrLimit, tc.host)
	}
}

func TestAHostThatTellsNothingIsNotGuarded(t *testing.T) {
	t.Parallel()
	require.NoError(t, newLimiter(fstest.MapFS{}).take(context.Background(), 1<<40))
	old, err := hosttest.Load(filepath.Join("..", "testdata", "hosts", "container-cgroup-v1.txtar"))
	require.NoError(t, err)
	_, err = headroom(old)
	require.EqualError(t, err, "/proc/meminfo has no MemTotal or no MemAvailable")
	require.NoError(t, newLimiter(old).take(context.Background(), 1<<40))
}

// A control group that cannot be read is no limit; the host's own still is.
func TestTheGuardWithoutAReadableCgroup(t *testing.T) {
	t.Parallel()
	files := hostWith(64, 10)
	files["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("what?\n")}
	require.ErrorIs(t, newLimiter(files).take(context.Background(), 10<<30), ErrLimit)
}

// The process's own limit makes Alloc wait, in turn, until enough is given back.
func TestTheProcessLimitWaits(t *testing.T) {
	g := newSimRig(t, cudasim.Config{})
	limits.bytes.mu.Lock()
	held := limits.bytes.used // by what other tests lost on purpose
	limits.bytes.mu.Unlock()
	const n = 1 << 20
	require.NoError(t, SetLimits(Limits{MaxBytes: held + n}))
	t.Cleanup(func() { assert.NoError(t, SetLimits(Limits{})) })
	first, err := Alloc(t.Context(), g.dev, n, Options{})
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	_, err = Alloc(ctx, g.dev, n, Options{})
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	_, err = Alloc(t.Context(), g.dev, held+2*n, Options{})
	require.ErrorIs(t, err, ErrLimit, "more than the limit can never be had")

	got := make(chan error, 1)
	go func() {
		b, err := Alloc(t.Context(), g.dev, n, Options{})
		if err == nil {
			err = b.Close()
		}
		got <- err
	}()
	require.NoError(t, first.Close())
	require.NoError(t, <-got)
	require.Error(t, SetLimits(Limits{MaxBytes: -1}))
}

func TestAvailable(t *testing.T) {
	t.Parallel()
	n, ok := Available()
	if runtime.GOOS != "linux" {
		require.False(t, ok)
		return
	}
	require.True(t, ok)
	require.Positive(t, n)
	require.Less(t, n, 1<<50, "no host has that much: a missing limit was taken for one")
}
