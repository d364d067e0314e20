package transfer

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// Inspect gets all bytes of a copy, whatever their source or destination is.
func TestInspect(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	for _, n := range []int{1, 5000, 3*mib + 7} {
		want := bytesOf(uint64(n), n)
		mem := r.device(n)
		file, err := os.Create(filepath.Join(t.TempDir(), "file"))
		require.NoError(t, err)
		_, err = file.Write(want)
		require.NoError(t, err)
		pinned, err := hostmem.Alloc(t.Context(), r.c.Device(), n, hostmem.Options{})
		require.NoError(t, err)
		copy(pinned.Bytes(), want)

		var mu sync.Mutex
		var seen []byte
		var times []int
		c := r.c.With(Call{Inspect: func(off int, mem []byte) {
			mu.Lock()
			defer mu.Unlock()
			copy(seen[off:], mem)
			for i := range mem {
				times[off+i]++
			}
		}})
		s, err := r.c.Device().NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		onStream := c.With(Call{Stream: s, Inspect: c.call.Inspect})
		host := make([]byte, n)
		out := func(write func() error) error {
			r.fill(mem, want)
			return write()
		}
		for name, copies := range map[string]func() error{
			"Upload":           func() error { return c.Upload(t.Context(), mem, want) },
			"Upload, pinned":   func() error { return c.Upload(t.Context(), mem, pinned.Bytes()) },
			"Upload, stream":   func() error { return onStream.Upload(t.Context(), mem, want) },
			"UploadFrom":       func() error { _, err := c.UploadFrom(t.Context(), mem, file, 0, n); return err },
			"UploadFrom bytes": func() error { _, err := c.UploadFrom(t.Context(), mem, bytes.NewReader(want), 0, n); return err },
			"UploadReader": func() error {
				_, err := c.UploadReader(t.Context(), mem, io.MultiReader(bytes.NewReader(want)), n)
				return err
			},
			"Download":         func() error { return out(func() error { return c.Download(t.Context(), host, mem) }) },
			"Download, pinned": func() error { return out(func() error { return c.Download(t.Context(), pinned.Bytes(), mem) }) },
			"DownloadTo": func() error {
				return out(func() error { _, err := c.DownloadTo(t.Context(), file, 0, mem, n); return err })
			},
			"DownloadWriter": func() error {
				return out(func() error { _, err := c.DownloadWriter(t.Context(), &bytes.Buffer{}, mem, n); return err })
			},
		} {
			seen, times = make([]byte, n), make([]int, n)
			require.NoError(t, copies(), name)
			require.True(t, bytes.Equal(want, seen), "%s of %d bytes", name, n)
			if name != "UploadFrom" { // bytes that are not in the page cache may come again
				assert.Equal(t, 1, slices.Max(times), name)
			}
		}
		panics := r.c.With(Call{Inspect: func(int, []byte) { panic("no") }})
		require.ErrorContains(t, panics.Upload(t.Context(), mem, want), "no")
		require.ErrorContains(t, panics.Download(t.Context(), host, mem), "no")
		require.NoError(t, s.Close())
		require.NoError(t, file.Close())
		require.NoError(t, pinned.Close())
	}
}
