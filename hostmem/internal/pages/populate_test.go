//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// countResident returns how many pages of [from, to) are resident.
func (r *Region) countResident(t testing.TB, from, to int) (n int) {
	t.Helper()
	vec := make([]byte, (to-from)/r.sys.Page)
	require.NoError(t, r.sys.Calls.Resident(unsafe.Add(r.base, from), to-from, vec))
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

func TestPopulateLeavesNothingOutAndChangesNothing(t *testing.T) {
	requireAccount(t)
	for _, noHuge := range []bool{false, true} {
		for _, advice := range []bool{true, false} {
			for _, threads := range []int{0, 1, 2, 7} {
				t.Run(fmt.Sprintf("base pages %t advice %t threads %d", noHuge, advice, threads), func(t *testing.T) {
					sys := hostSystem()
					sys.Calls = sys.Calls.Before(func(call string) error {
						if call == "Advise populate" && !advice {
							return unix.EINVAL // as before Linux 5.14
						}
						return nil
					})
					r := mustMap(t, 9*mib+4097, Options{System: sys, NoHuge: noHuge, Align: 4096})
					r.Bytes()[5*mib+123] = 42
					require.NoError(t, r.Populate(t.Context(), Populate{Threads: threads, Item: 2 * mib}))
					assert.Equal(t, r.Mapped()/4096, r.countResident(t, 0, r.Mapped()))
					assert.Equal(t, byte(42), r.Bytes()[5*mib+123])
					assert.Equal(t, 1, 256-strings.Count(string(r.Bytes()[5*mib:5*mib+256]), "\x00"), "bytes changed")
				})
			}
		}
	}
}

func TestDoneSeesEveryItemOnce(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ n, to, item, threads int }{
		{64*mib + 1, 64*mib + 4096, 16 * mib, 3},
		{64*mib + 1, 64*mib + 4096, 1, 0},
		{10 * mib, 10 * mib, 4 * mib, 2},
		{4096, 4096, 64 * mib, 8},
		{4096, 4096, 0, 0},
	} {
		t.Run(fmt.Sprintf("%+v", tc), func(t *testing.T) {
			t.Parallel()
			sys := hostSystem()
			sys.Calls.Touch = func(unsafe.Pointer, int, int) error { return nil }
			sys.Calls.Advise = func(unsafe.Pointer, int, Advice) error { return nil }
			r := mustMap(t, tc.n, Options{System: sys, NoHuge: true})
			var mu sync.Mutex
			var got []span
			require.NoError(t, r.Populate(t.Context(), Populate{Item: tc.item, Threads: tc.threads, Done: func(off, n int) error {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, span{uintptr(off), n})
				return nil
			}}))
			slices.SortFunc(got, func(a, b span) int { return int(a.base) - int(b.base) })
			at := 0
			for _, s := range got {
				assert.Equal(t, at, int(s.base))
				at += s.n
				if tc.item > 0 {
					assert.LessOrEqual(t, s.n, roundUp(tc.item, 2*mib))
				}
			}
			assert.Equal(t, tc.to, at)
		})
	}
}

func TestDonesErrorEndsPopulating(t *testing.T) {
	t.Parallel()
	for _, threads := range []int{1, 2} {
		r := mustMap(t, 64*mib, Options{System: hostSystem(), NoHuge: true})
		boom := errors.New("boom")
		var calls atomic.Int32
		err := r.Populate(t.Context(), Populate{Item: 2 * mib, Threads: threads, Done: func(off, n int) error {
			if calls.Add(1) == 3 {
				return boom
			}
			return nil
		}})
		require.ErrorIs(t, err, boom)
		assert.NotErrorIs(t, err, context.Canceled)
		if threads == 1 { // another thread goes on until the one with the error runs again
			assert.EqualValues(t, 3, calls.Load())
		}
	}
}

// A thread looks at the context before each block, so that the end of the context
// does not wait for the rest of a large item.
func TestPopulatingEndsWithItsContextWithinAnItem(t *testing.T) {
	t.Parallel()
	why := errors.New("the caller changed its mind")
	for at := range 5 {
		sys := hostSystem()
		ctx, cancel := context.WithCancelCause(t.Context())
		blocks := 0
		sys.Calls.Advise = func(_ unsafe.Pointer, _ int, a Advice) error {
			if a == AdvisePopulate {
				if blocks++; blocks == at {
					cancel(why)
				}
			}
			return nil
		}
		r := mustMap(t, 64*mib, Options{System: sys})
		if at == 0 {
			cancel(why)
		}
		err := r.Populate(ctx, Populate{Threads: 1, Item: 64 * mib})
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, why)
		assert.Equal(t, at, blocks)
		_, err = Map(ctx, 1, Options{System: sys})
		require.ErrorIs(t, err, why)
	}
}

// Huge pages that take 40 ms each, in a bubble's time.
func TestSlowHugePagesAreReplacedByBasePages(t *testing.T) {
	t.Parallel()
	const pages = 128
	for _, tc := range []struct {
		name       string
		threads    int
		slow       func(page int) bool
		compaction bool // the kernel says why
		huge       int  // huge pages until base pages are taken
	}{
		{"always", 1, func(int) bool { return true }, true, 4},
		{"always, several threads", 4, func(int) bool { return true }, true, 9},
		{"from the middle on", 1, func(page int) bool { return page > 64 }, true, 64 + 4},
		{"once in a while, as under a CPU quota", 1, func(page int) bool { return page%10 == 0 }, true, pages},
		{"always, because the host itself has no memory ready", 1, func(int) bool { return true }, false, pages},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				sys := hostSystem()
				sys.THP, sys.Defrag, sys.HugePage = "madvise", "madvise", 2*mib
				var huge, given, stalls atomic.Int32
				sys.files = fsFunc(func(name string) string {
					assert.Equal(t, "proc/vmstat", name)
					return fmt.Sprintf("compact_fail 7\ncompact_stall %d\n", 1000+stalls.Load())
				})
				sys.Calls.Advise = func(p unsafe.Pointer, n int, a Advice) error {
					switch {
					case a == AdviseNoHuge:
						given.Add(1)
						return nil
					case a != AdvisePopulate:
						return nil
					case given.Load() > 0:
						time.Sleep(500 * time.Microsecond)
						return nil
					}
					if !tc.slow(int(huge.Add(1))) {
						time.Sleep(100 * time.Microsecond)
						return nil
					}
					time.Sleep(40 * time.Millisecond)
					if tc.compaction {
						stalls.Add(1)
					}
					return nil
				}
				r, err := mapPopulated(t.Context(), pages*2*mib, Options{System: sys}, Populate{Threads: tc.threads})
				require.NoError(t, err)
				// Threads that were at a page together may each see it to its end.
				assert.InDelta(t, tc.huge, huge.Load(), float64(tc.threads-1))
				if tc.huge < pages {
					assert.Equal(t, int32(1), given.Load())
					require.Len(t, r.Notes(), 1)
					assert.Contains(t, r.Notes()[0], "huge pages come too slowly (the last took 40.0 ms")
				} else {
					assert.Zero(t, given.Load())
					assert.Empty(t, r.Notes())
				}
				require.NoError(t, r.Unmap())
			})
		})
	}
}

// Files in memory get huge pages wherever they are mapped, and small ones where the kernel refuses them or has none left.
func TestFilesInMemoryGetHugePages(t *testing.T) {
	requireAccount(t)
	fd, err := unix.MemfdCreate(t.Name(), unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), t.Name())
	defer f.Close()
	const size = 17 * mib
	for _, part := range [][2]int{{0, size}, {4096, size - 4096}, {777, size - 778}, {2*mib + 4096, 5*mib + 1}, {2 * mib, 4 * mib}, {mib, mib + 5}} {
		for _, works := range []int{0, 1, 1000} { // calls that make huge pages
			for _, threads := range []int{1, 3} {
				what := fmt.Sprint(part, works, threads)
				require.NoError(t, f.Truncate(0), what)
				require.NoError(t, f.Truncate(size), what)
				sys := hostSystem()
				sys.HugePage = 2 * mib
				var calls, failed atomic.Int32
				sys.Calls = sys.Calls.Before(func(call string) error {
					if call == "Advise collapse" && int(calls.Add(1)) > works {
						failed.Add(1)
						return unix.EINVAL // as before Linux 6.1
					}
					return nil
				})
				r, err := MapFile(sys, f, int64(part[0]), part[1], true)
				require.NoError(t, err, what)
				assert.EqualValues(t, part[0]%(2*mib), uintptr(r.base)%(2*mib), what)
				r.Bytes()[part[1]/2] = 42
				require.NoError(t, r.Populate(t.Context(), Populate{Threads: threads}), what)
				assert.LessOrEqual(t, int(failed.Load()), threads, "%s: one refusal is enough for a thread", what)
				first, end := roundUp(part[0], 2*mib), (part[0]+part[1])&^(2*mib-1)
				if huge := max(0, end-first) / (2 * mib); works == 1000 {
					assert.EqualValues(t, huge, calls.Load(), what)
				} else {
					assert.GreaterOrEqual(t, int(calls.Load()), min(huge, 1), what)
				}
				page := os.Getpagesize()
				var s unix.Stat_t
				require.NoError(t, unix.Fstat(fd, &s), what)
				assert.EqualValues(t, roundUp(part[0]+part[1], page)-part[0]&^(page-1), s.Blocks*512, "%s: its pages and no others", what)
				want := make([]byte, part[1])
				want[part[1]/2] = 42
				assert.True(t, bytes.Equal(want, r.Bytes()), what)
				assert.Empty(t, r.Notes(), what)
				require.NoError(t, r.Unmap(), what)
			}
		}
	}
}

// fsFunc is a file system whose files say what the function says.
type fsFunc func(name string) string

func (f fsFunc) Open(name string) (fs.File, error) {
	return fstest.MapFS{name: file(f(name))}.Open(name)
}

func TestAPageThatCannotBeHadIsAnError(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	l := newLedger(sys)
	sys.Calls = sys.Calls.Before(func(call string) error {
		if call == "Touch" || call == "Advise populate" {
			return unix.EFAULT
		}
		return nil
	})
	_, err := mapPopulated(t.Context(), 10*mib, Options{System: sys}, Populate{})
	require.ErrorIs(t, err, unix.EFAULT)
	assert.ErrorContains(t, err, "at offset")
	l.requireNothingLeft(t)
}
