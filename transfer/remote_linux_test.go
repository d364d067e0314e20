package transfer

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A slowFile delays reads as a remote file system does: by 30 ms each that does not continue the last one
// of its descriptor.
type slowFile struct {
	mu       sync.Mutex
	ends     map[*os.File]int64 // of the last read by a descriptor
	seeks    int
	backward int // seeks
}

func (s *slowFile) read(d *os.File, off int64, n int) {
	s.mu.Lock()
	end, known := s.ends[d]
	s.ends[d] = off + int64(n)
	if known && off < end {
		s.backward++
	}
	seek := !known || off != end
	if seek {
		s.seeks++
	}
	s.mu.Unlock()
	if seek {
		time.Sleep(30 * time.Millisecond)
	}
}

// A file on a remote file system is read in long sections, each by a descriptor that only one reader has and
// from its first byte to its last.
func TestRemoteFilesAreReadInLongSections(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const off, n = 777, 40*mib + 5
	const sections = 5 // of minMiss or more
	want := bytesOf(1, off+n)
	mem := r.device(n)
	f := temporaryFile(t, want)
	for name, tt := range map[string]struct {
		in         fileSystem
		n, section int // section 0: as lanes returns it
		lanes      int
		seeks      int // at most
	}{
		"remote":            {unix.NFS_SUPER_MAGIC, n, 0, sections, sections},
		"of many sections":  {unix.FUSE_SUPER_MAGIC, n, 2 * mib, sections, n/(2*mib) + 1},
		"short":             {unix.CEPH_SUPER_MAGIC, minMiss, 0, 1, 1},
		"less than a block": {unix.CEPH_SUPER_MAGIC, 100, 0, 1, 1},
	} {
		for _, cached := range []bool{false, true} {
			ranges := rangesOf(f, off, tt.n)
			files, _ := ranges.files(Call{}, 0, tt.n)
			files.list[f].in = tt.in
			slow := slowFile{ends: map[*os.File]int64{}}
			var begun sync.WaitGroup // of all lanes
			begun.Add(tt.lanes)
			lanes, section := files.lanes(tt.n, sectionOf(tt.n, 2*readers), func(own *ownFiles) readFunc {
				one, all := own.readerAt(t.Context()), cached
				return func(to []byte, at, n int) (int, int, error) {
					if !all {
						all = true
						begun.Done()
						begun.Wait()
					}
					got, err := one(f, to[:n], off+int64(at))
					d, _ := own.of(f)
					slow.read(d, off+int64(at), n)
					return 0, got, err
				}
			})
			require.Len(t, lanes, tt.lanes, name)
			if tt.section > 0 {
				section = tt.section
			}
			host := stage.Host(newReadAhead(lanes, section, inOrder(tt.n)))
			if cached { // nothing is
				miss := func([]byte, int, int) (int, int, error) { return 0, 0, stage.ErrNotReady }
				host = newFileFeed(miss, lanes, section, tt.n)
			}
			r.fill(mem, make([]byte, n))
			done, err := r.c.at(tt.n, mem).stage(t.Context(), stage.Copy{N: tt.n, Host: host})
			require.NoError(t, err)
			require.Equal(t, tt.n, done)
			require.True(t, bytes.Equal(want[off:][:tt.n], r.onDevice(mem, tt.n)), name)
			if cached { // workers find out what is not, in any order
				assert.LessOrEqual(t, slow.seeks, tt.seeks+2*readers, name)
			} else {
				assert.LessOrEqual(t, slow.seeks, tt.seeks, name)
				assert.Zero(t, slow.backward, name)
				assert.Len(t, slow.ends, tt.lanes, name)
			}
			if tt.lanes > 1 {
				assert.NotContains(t, slow.ends, f, name)
			}
			files.close()
			for d := range slow.ends {
				_, err := d.Stat()
				assert.Equal(t, d != f, err != nil, "%s: closed", name)
			}
		}
	}
}

// A failure in one section ends the copy there: other readers read what is before it, and no more.
func TestSectionsBeforeAFailureArrive(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n, section, lanes = 24 * mib, 3 * mib, 4
	want := bytesOf(1, n)
	mem := r.device(n)
	random := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		at := random.IntN(n)
		read := readAt(readerAtFunc(func(p []byte, off int64) (int, error) {
			if int(off)+len(p) > at {
				return copy(p, want[min(int(off), at):at]), errFlaky
			}
			return copy(p, want[off:]), nil
		}), 0)
		r.fill(mem, make([]byte, n))
		done, err := r.c.at(n, mem).stage(t.Context(), stage.Copy{N: n, Host: newReadAhead(lanesOf(lanes, read), section, inOrder(n))})
		require.ErrorIs(t, err, errFlaky)
		require.Equal(t, at, done)
		require.True(t, bytes.Equal(want[:at], r.onDevice(mem, at)))
	}
}

// Ranges of several remote files arrive, with and without the page cache, and leave no descriptor open.
func TestRangesOfRemoteFilesArrive(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	all := bytesOf(1, 24*mib)
	sources := []io.ReaderAt{temporaryFile(t, all), temporaryFile(t, all), bytes.NewReader(all)}
	random := rand.New(rand.NewPCG(1, 2))
	rounds := 6
	if testing.Short() {
		rounds = 2 // of many bytes, which the race detector and an emulator copy slowly
	}
	for _, call := range []Call{{}, {DirectIO: true}} {
		for i := range rounds {
			list := []Range{{Reader: sources[0], Off: 5, N: 17*mib + 3}, {Reader: sources[1], Off: 4096, N: 9 * mib}}
			want := slices.Concat(all[5:][:list[0].N], all[4096:][:list[1].N])
			if i > 0 {
				list, want = rangesAtRandom(random, sources, all, 20*mib)
			}
			ranges, err := NewRanges(list)
			require.NoError(t, err)
			n := ranges.Len()
			mem := r.device(n)
			p := r.c.at(n, mem)
			p.call = call
			files, rest := ranges.files(call, 0, n)
			for _, file := range files.list {
				file.in = unix.FUSE_SUPER_MAGIC
			}
			if i%2 == 1 {
				rest = true // then the page cache is not asked
			}
			done, err := p.stageFiles(t.Context(), ranges, files, rest, 0, n)
			files.close()
			require.NoError(t, err)
			require.Equal(t, n, done)
			require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
			for _, own := range files.own {
				require.Empty(t, own.again)
			}
		}
	}
}

// A lane opens no more than some files at once, and none for a copy that has ended.
func TestDescriptorsOfALane(t *testing.T) {
	t.Parallel()
	own := &ownFiles{files: map[*os.File]*rangeFile{}, reopens: true}
	var opened []*os.File
	for range 2*maxOwn + 1 {
		f := temporaryFile(t, []byte("some"))
		own.files[f] = &rangeFile{in: unix.FUSE_SUPER_MAGIC}
		d, direct := own.of(f)
		require.NotSame(t, f, d)
		require.False(t, direct)
		again, _ := own.of(f)
		require.Same(t, d, again)
		opened = append(opened, d)
		require.LessOrEqual(t, len(own.again), maxOwn)
	}
	own.close()
	for _, d := range opened {
		_, err := d.Stat()
		require.ErrorIs(t, err, os.ErrClosed)
	}
	for f := range own.files {
		d, _ := own.of(f)
		require.Same(t, f, d)
	}
}

// The numbers are those of statfs(2) and of the file systems' own headers.
func TestRemoteFileSystems(t *testing.T) {
	t.Parallel()
	for is, magic := range map[bool]map[string]fileSystem{
		true: {
			"FUSE": 0x65735546, "NFS": 0x6969, "SMB": 0x517B, "SMB 2": 0xFE534D42, "CIFS": 0xFF534D42, "9p": 0x01021997,
			"Ceph": 0x00C36400, "Lustre": 0x0BD00BD0, "GPFS": 0x47504653, "BeeGFS": 0x19830326, "AFS": 0x5346414F, "kAFS": 0x6B414653, "Coda": 0x73757245,
		},
		false: {
			"ext4": 0xEF53, "XFS": 0x58465342, "Btrfs": 0x9123683E, "overlay": 0x794C7630, "tmpfs": 0x01021994, "ramfs": 0x858458F6,
			"ZFS": 0x2FC12FC1, "exFAT": 0x2011BAB0, "unknown": 0,
		},
	} {
		for name, fs := range magic {
			assert.Equal(t, is, fs.isRemote(), name)
		}
	}
	assert.Len(t, remote, 13)
	assert.EqualValues(t, unix.TMPFS_MAGIC, fileSystemOf(memfd(t, 0)))
	closed := temporaryFile(t, nil)
	assert.NotZero(t, fileSystemOf(closed))
	dup, err := os.Open(closed.Name())
	require.NoError(t, err)
	require.NoError(t, dup.Close())
	assert.Zero(t, fileSystemOf(dup))
}

// memfd makes a file in memory, which has the test's name in /proc/self/maps.
func memfd(t *testing.T, flags int) *os.File {
	fd, err := unix.MemfdCreate(t.Name(), flags)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "memfd")
	t.Cleanup(func() { _ = f.Close() })
	return f
}
