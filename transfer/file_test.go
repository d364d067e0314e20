package transfer

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// directories of a disk's file system and, where there is one, of memory's.
func directories(t *testing.T) map[string]string {
	all := map[string]string{"disk": t.TempDir()}
	if shm, err := os.MkdirTemp("/dev/shm", "pinned-test-"); err == nil {
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(shm)) })
		all["memory"] = shm
	}
	return all
}

func TestFilesArrive(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	for where, dir := range directories(t) {
		for _, direct := range []bool{false, true} {
			for _, n := range sizes {
				for _, off := range []int{0, 4096, 777} {
					t.Run(fmt.Sprintf("%s/direct=%t/%d at %d", where, direct, n, off), func(t *testing.T) {
						c := r.c.With(Call{DirectIO: direct})
						want := bytesOf(uint64(n), n)
						name := filepath.Join(dir, "from")
						require.NoError(t, os.WriteFile(name, append(make([]byte, off), want...), 0o600))
						from, err := os.Open(name)
						require.NoError(t, err)
						defer from.Close()
						dst := r.device(n)
						done, err := c.UploadFrom(t.Context(), dst, from, int64(off), n)
						require.NoError(t, err)
						require.Equal(t, n, done)
						require.True(t, bytes.Equal(want, r.onDevice(dst, n)), "bytes on the device")

						to, err := os.Create(filepath.Join(dir, "to"))
						require.NoError(t, err)
						defer to.Close()
						done, err = c.DownloadTo(t.Context(), to, int64(off), dst, n)
						require.NoError(t, err)
						require.Equal(t, n, done)
						got, err := os.ReadFile(to.Name())
						require.NoError(t, err)
						if n == 0 {
							require.Empty(t, got)
							return
						}
						require.Len(t, got, off+n)
						require.Equal(t, make([]byte, off), got[:off], "before the bytes")
						require.True(t, bytes.Equal(want, got[off:]), "bytes in the file")
					})
				}
			}
		}
	}
}

func TestReadersAndWriters(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	for _, n := range sizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			want := bytesOf(uint64(n), n+10)
			from := bytes.NewReader(want)
			dst := r.device(n)
			done, err := r.c.UploadReader(t.Context(), dst, from, n)
			require.NoError(t, err)
			require.Equal(t, n, done)
			require.Equal(t, 10, from.Len(), "no more than n bytes are read")
			require.True(t, bytes.Equal(want[:n], r.onDevice(dst, n)))
			var to bytes.Buffer
			done, err = r.c.DownloadWriter(t.Context(), &to, dst, n)
			require.NoError(t, err)
			require.Equal(t, n, done)
			require.True(t, bytes.Equal(want[:n], to.Bytes()))
		})
	}
}

func TestReadersThatEndEarly(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	const n = 5*mib + 3
	want := bytesOf(1, n)
	for _, has := range []int{0, 1, mib - 1, mib, 3*mib + 5, n - 1} {
		dst := r.device(n)
		for how, upload := range map[string]func() (int, error){
			"reader":   func() (int, error) { return r.c.UploadReader(t.Context(), dst, bytes.NewReader(want[:has]), n) },
			"readerAt": func() (int, error) { return r.c.UploadFrom(t.Context(), dst, bytes.NewReader(want[:has]), 0, n) },
		} {
			r.fill(dst, make([]byte, n))
			done, err := upload()
			require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%s of %d", how, has)
			require.ErrorContains(t, err, fmt.Sprintf("at byte %d of %d", has, n))
			require.Equal(t, has, done, "%s of %d", how, has)
			require.True(t, bytes.Equal(want[:has], r.onDevice(dst, has)), "%s of %d", how, has)
		}
	}
}

// What is in the page cache is read by workers, and what is not by others: in any mix,
// all arrives.
func TestFilesThatAreCachedInPart(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = 40*mib + 777
	want := bytesOf(1, n)
	mem := r.device(n)
	random := rand.New(rand.NewPCG(1, 2))
	for _, misses := range []int{0, 1, 10, 100} { // of 100
		for range max(1, 3/hosttest.Stride()) {
			hit := make([]bool, n/mib+1)
			for i := range hit {
				hit[i] = random.IntN(100) >= misses
			}
			readNow := func(to []byte, off, n int) (int, int, error) {
				for at := off; at < off+len(to); at += mib {
					if !hit[at/mib] {
						return 0, 0, stage.ErrNotReady
					}
				}
				return 0, copy(to, want[off:]), nil
			}
			r.fill(mem, make([]byte, n))
			feed := newFileFeed(readNow, lanesOf(readers, readAt(bytes.NewReader(want), 0)), scratchBytes, n)
			done, err := r.c.at(n, mem).stage(t.Context(), stage.Copy{N: n, Host: feed})
			require.NoError(t, err)
			require.Equal(t, n, done)
			require.True(t, bytes.Equal(want, r.onDevice(mem, n)), "%d %%", misses)
		}
	}
}

// Readers of several goroutines that fail: what is before the failure arrives, also if
// that is read last.
func TestReadersThatFailBehindOthers(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n, at = 12 * mib, 5*mib + 3
	want := bytesOf(1, n)
	mem := r.device(n)
	failed := make(chan struct{})
	done, err := r.c.UploadFrom(t.Context(), mem, readerAtFunc(func(p []byte, off int64) (int, error) {
		switch {
		case off <= at && at < off+int64(len(p)):
			defer close(failed)
			return copy(p, want[off:at]), errFlaky
		case off == 0:
			<-failed
		}
		return copy(p, want[off:]), nil
	}), 0, n)
	require.ErrorIs(t, err, errFlaky)
	require.Equal(t, at, done)
	require.True(t, bytes.Equal(want[:at], r.onDevice(mem, at)))
}

type readerAtFunc func(p []byte, off int64) (int, error)

func (f readerAtFunc) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }
