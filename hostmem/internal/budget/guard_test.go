package budget

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/linux"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// guardOf returns a budget that reads its figures from files, for a process whose
// Go heap does not grow.
func guardOf(files fstest.MapFS) *Budget {
	return withoutHeap(New(func(pinnedFiles int) (linux.Headroom, error) { return ReadHost(files, pinnedFiles) }))
}

func withoutHeap(b *Budget) *Budget {
	b.heap = func() int { return 0 }
	return b
}

// hostWith is a host with so many GiB of memory and so many available.
func hostWith(total, available int) fstest.MapFS {
	return fstest.MapFS{"proc/meminfo": {Data: fmt.Appendf(nil, "MemTotal: %d kB\nMemFree: 1 kB\nMemAvailable: %d kB\n", total<<20, available<<20)}}
}

func take(b *Budget, n int) error {
	_, err := b.Acquire(context.Background(), Request{Bytes: n})
	return err
}

func TestTheGuardLeavesTheHostAShare(t *testing.T) {
	t.Parallel()
	files := hostWith(64, 10)
	b := guardOf(files)
	first := b.mustReserve(t, 9*gib-1)
	err := take(b, gib)
	require.ErrorIs(t, err, ErrLimit, "nine tenths of 10 GiB are granted, although the kernel shows none of it yet")
	require.ErrorContains(t, err, "limit on pinned memory: 1 GiB: available are 10 GiB of 64 GiB (/proc/meminfo MemAvailable)")
	require.ErrorContains(t, err, "9.00 GiB that are being populated")
	require.ErrorContains(t, err, "a reserve of 64 MiB")
	require.ErrorContains(t, err, "Limits.MaxShare")
	files["proc/meminfo"] = hostWith(64, 1)["proc/meminfo"]
	first.MarkResident()
	require.ErrorIs(t, take(b, gib), ErrLimit, "now the kernel shows it")

	// What was refused counts for nothing, and more may be allowed.
	b.Set(0, 1)
	require.NoError(t, take(b, gib-64*mib), "all but the reserve")
	b.Set(0, 1.5)
	require.NoError(t, take(b, 100*gib), "switched off")
}

// Small requests end where one large one does.
func TestTheGuardCountsSmallRequestsToo(t *testing.T) {
	t.Parallel()
	h := &fakeHost{total: 1024 * mib}
	b := withoutHeap(New(h.read))
	random := rand.New(rand.NewPCG(1, 2))
	granted := 0
	for n := 64*kib + random.IntN(mib); ; n = 64*kib + random.IntN(mib) {
		g, err := b.Acquire(t.Context(), Request{Bytes: n})
		if err != nil {
			require.ErrorIs(t, err, ErrLimit)
			break
		}
		h.use(n)
		g.MarkResident()
		granted += n
	}
	assert.LessOrEqual(t, granted, 1024*mib*9/10)
	assert.Greater(t, granted, 1024*mib*9/10-2*mib)
}

func TestTheGuardReadsAgainBeforeItRefuses(t *testing.T) {
	t.Parallel()
	meminfo := func(available int) *fstest.MapFile {
		return &fstest.MapFile{Data: fmt.Appendf(nil, "MemTotal: 1048576 kB\nMemAvailable: %d kB\n", available>>10)}
	}
	files := fstest.MapFS{"proc/meminfo": meminfo(100 * mib)}
	b := guardOf(files)
	require.NoError(t, take(b, 10*mib))
	require.ErrorIs(t, take(b, 30*mib), ErrLimit, "90 MiB less the reserve of 64 are not enough")
	files["proc/meminfo"] = meminfo(120 * mib)
	require.NoError(t, take(b, 30*mib), "20 MiB were released meanwhile")
}

// A reading serves for a second, and for 64 MiB.
func TestTheGuardDoesNotTrustAnOldReading(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &fakeHost{total: 10 * gib}
		readings := 0
		b := withoutHeap(New(func(files int) (linux.Headroom, error) { readings++; return h.read(files) }))
		b.mustReserve(t, 32*mib)
		b.mustReserve(t, 32*mib)
		time.Sleep(time.Second)
		b.mustReserve(t, 0)
		b.mustReserve(t, 32*mib)
		require.Equal(t, 2, readings, "after 64 MiB, of which the first reading knew nothing")
		time.Sleep(time.Second + 1)
		h.use(10 * gib)
		require.ErrorIs(t, take(b, mib), ErrLimit, "after a second")
		require.Equal(t, 3, readings)
	})
}

func TestTheTighterCgroupCounts(t *testing.T) {
	t.Parallel()
	files := hostWith(64, 60)
	files["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("0::/job\n")}
	files["proc/self/mountinfo"] = &fstest.MapFile{Data: []byte("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")}
	files["sys/fs/cgroup/job/memory.max"] = &fstest.MapFile{Data: []byte("1073741824\n")}
	files["sys/fs/cgroup/job/memory.current"] = &fstest.MapFile{Data: []byte("536870912\n")}
	files["sys/fs/cgroup/job/memory.stat"] = &fstest.MapFile{Data: []byte("inactive_file 0\nactive_file 0\n")}
	err := take(guardOf(files), 500<<20)
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorContains(t, err, "512 MiB of 1 GiB")
	require.ErrorContains(t, err, "memory.max")
}

// What pincheck reports of these hosts is tested in cmd/pincheck/internal/hostinfo: both must say
// the same. The guard keeps its reserve of that.
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
		fsys, err := hosttest.Load(filepath.Join("..", "..", "..", "testdata", "hosts", tc.host+".txtar"))
		require.NoError(t, err)
		left, err := ReadHost(fsys, 0)
		require.NoError(t, err)
		assert.Equal(t, tc.left, left, tc.host)
		reserve := min(64*mib, tc.left.Total/8)
		for more, want := range map[int]error{0: nil, 1: ErrLimit} {
			b := withoutHeap(New(func(pinnedFiles int) (linux.Headroom, error) { return ReadHost(fsys, pinnedFiles) }))
			b.Set(0, 1)
			require.ErrorIs(t, take(b, tc.left.Available-reserve+more), want, tc.host)
		}
	}
}

func TestAHostWithoutFiguresIsNotGuarded(t *testing.T) {
	t.Parallel()
	require.NoError(t, take(guardOf(fstest.MapFS{}), 1<<40))
	old, err := hosttest.Load(filepath.Join("..", "..", "..", "testdata", "hosts", "container-cgroup-v1.txtar"))
	require.NoError(t, err)
	_, err = ReadHost(old, 0)
	require.EqualError(t, err, "/proc/meminfo has no MemTotal or no MemAvailable")
}

// A control group that cannot be read is no limit; the host's own still is.
func TestTheGuardWithoutAReadableCgroup(t *testing.T) {
	t.Parallel()
	files := hostWith(64, 10)
	files["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("what?\n")}
	require.ErrorIs(t, take(guardOf(files), 10<<30), ErrLimit)
}

// The growth of the Go heap is left available.
func TestTheReserveCoversTheGoHeap(t *testing.T) {
	t.Parallel()
	h := &fakeHost{total: 8 * gib}
	b := New(h.read)
	b.Set(0, 1)
	b.heap = func() int { return 3 * gib }
	require.ErrorIs(t, take(b, 5*gib-64*mib+1), ErrLimit)
	require.NoError(t, take(b, 5*gib-64*mib))

	before := heapGrowth()
	require.GreaterOrEqual(t, before, 0)
	require.Less(t, before, 1<<40, "a heap without a goal was taken for one that grows without end")
}

// A fakeHost is a host or cgroup with its figures.
type fakeHost struct {
	mu    sync.Mutex
	total int
	used  int // and not reclaimable, by the kernel's figures
	files int // page cache
}

func (h *fakeHost) use(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used += n
}

func (h *fakeHost) read(pinnedFiles int) (linux.Headroom, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return linux.Headroom{Available: h.total - h.used - min(pinnedFiles, h.files), Total: h.total, Source: "a fake"}, nil
}

// However many ask at once, and however long pages take to become resident, all of
// them together get no more than they would one after the other.
func TestManyAtOnceGetNoMoreThanOneAfterTheOther(t *testing.T) {
	t.Parallel()
	const size, total = 10 * mib, 1024 * mib
	inTurn := 0
	h := &fakeHost{total: total}
	b := withoutHeap(New(h.read))
	for ; take(b, size) == nil; inTurn++ {
	}
	require.Equal(t, total*9/10/size, inTurn)

	for _, populated := range []string{"late", "at once"} {
		h := &fakeHost{total: total}
		b := withoutHeap(New(h.read))
		var group sync.WaitGroup
		var mu sync.Mutex
		var all []*Reservation
		for range 100 {
			group.Go(func() {
				for range 3 {
					g, err := b.Acquire(t.Context(), Request{Bytes: size})
					if err != nil {
						assert.ErrorIs(t, err, ErrLimit)
						return
					}
					if populated == "at once" {
						h.use(size)
						g.MarkResident()
					}
					mu.Lock()
					all = append(all, g)
					mu.Unlock()
				}
			})
		}
		group.Wait()
		assert.Len(t, all, inTurn, "populated %s", populated)
		for _, g := range all {
			if populated == "at once" {
				h.use(-size)
			}
			g.Release()
		}
		assert.Equal(t, guard{share: DefaultShare, reading: b.guard.reading, readings: b.guard.readings, readAt: b.guard.readAt, since: b.guard.since, reserve: b.guard.reserve},
			b.guard, "nothing stays counted")
	}
}

// Grants come, become resident and go on many goroutines. The host never has less
// left than the guard has to leave it, by what is truly in use.
func TestTheGuardUnderManyGoroutines(t *testing.T) {
	t.Parallel()
	const total = 1000 * mib
	h := &fakeHost{total: total, files: total}
	b := withoutHeap(New(h.read))
	var group sync.WaitGroup
	var mu sync.Mutex
	held, granted, refused := 0, 0, 0
	var ready sync.WaitGroup
	ready.Add(16)
	for i := range 16 {
		group.Go(func() {
			ready.Done()
			ready.Wait()
			random := rand.New(rand.NewPCG(3, uint64(i)))
			for range 300 {
				n := 1 + random.IntN(200*mib)
				g, err := b.Acquire(t.Context(), Request{Bytes: n, File: random.IntN(4) == 0})
				mu.Lock()
				if err != nil {
					refused++
					mu.Unlock()
					assert.ErrorIs(t, err, ErrLimit)
					continue
				}
				granted++
				held += n
				assert.LessOrEqual(t, held, total*9/10)
				mu.Unlock()
				runtime.Gosched() // so that others ask meanwhile, on one processor too
				resident := random.IntN(3) > 0
				if resident {
					if !g.file { // page cache stays among what is available
						h.use(n)
					}
					g.MarkResident()
				}
				mu.Lock()
				held -= n
				mu.Unlock()
				if resident && !g.file {
					h.use(-n)
				}
				g.Release()
			}
		})
	}
	group.Wait()
	assert.Positive(t, granted)
	assert.Positive(t, refused)
	assert.Equal(t, [4]int{}, [4]int{b.guard.taken, b.guard.files, b.guard.arriving, b.guard.unseen})
}

// The kernel counts page cache as available, pinned or not.
func TestPinnedPageCacheIsNotAvailable(t *testing.T) {
	t.Parallel()
	h := &fakeHost{total: 1000 * mib, files: 700 * mib}
	b := withoutHeap(New(h.read))
	file, err := b.Acquire(t.Context(), Request{Bytes: 600 * mib, File: true, InUse: func() int { return 600 * mib }})
	require.NoError(t, err)
	file.MarkResident()
	left, err := b.Headroom()
	require.NoError(t, err)
	assert.Equal(t, 400*mib, left.Available)
	require.ErrorIs(t, take(b, 301*mib), ErrLimit, "nine tenths of all")
	rest := b.mustReserve(t, 299*mib)
	rest.Release()
	file.Release()
	left, err = b.Headroom()
	require.NoError(t, err)
	assert.Equal(t, 1000*mib, left.Available)

	_, err = b.Acquire(t.Context(), Request{Bytes: 950 * mib, File: true, InUse: func() int { return 950 * mib }})
	require.ErrorIs(t, err, ErrLimit, "page cache that is resident is available, until it is pinned")
}

// Memory that is resident already is not available any more: pinning it takes nothing.
func TestMemoryInUseIsNeverRefusedByTheGuard(t *testing.T) {
	t.Parallel()
	h := &fakeHost{total: 1000 * mib, used: 980 * mib}
	b := withoutHeap(New(h.read))
	examined := 0
	request := func(n, inUse int) Request {
		return Request{Bytes: n, InUse: func() int { examined++; return inUse }}
	}
	g, err := b.Acquire(t.Context(), request(900*mib, 900*mib))
	require.NoError(t, err)
	assert.Equal(t, 900*mib, b.Used(), "it counts for the limit")
	g.MarkResident()
	assert.Zero(t, b.guard.taken)
	_, err = b.Acquire(t.Context(), request(60*mib, 50*mib))
	require.ErrorIs(t, err, ErrLimit, "10 MiB have to come from somewhere")
	assert.Equal(t, 900*mib, b.Used(), "what was refused is not counted")
	g.Release()

	h.used, examined = 0, 0
	g, err = b.Acquire(t.Context(), request(10*mib, 10*mib))
	require.NoError(t, err)
	assert.Zero(t, examined, "not asked while there is room")
	g.Release()
}

// Before a request is refused, unused memory is unmapped.
func TestTheGuardHasUnusedMemoryUnmappedBeforeItRefuses(t *testing.T) {
	t.Parallel()
	h := &fakeHost{total: 1000 * mib}
	b := withoutHeap(New(h.read))
	idle := b.mustReserve(t, 800*mib)
	h.use(800 * mib)
	idle.MarkResident()
	calls := 0
	stop := b.Reclaim(func(_ context.Context, need int) int {
		calls++
		assert.Equal(t, 400*mib, need, "500 MiB, of which 100 are left")
		h.use(-800 * mib)
		idle.Release()
		return 800 * mib
	})
	g := b.mustReserve(t, 500*mib)
	assert.Equal(t, 1, calls)
	g.Release()
	stop()
	require.ErrorIs(t, take(b, 901*mib), ErrLimit)
	assert.Equal(t, 1, calls, "stopped")
}
