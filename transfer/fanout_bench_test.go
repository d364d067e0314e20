//go:build unix

package transfer

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// pageCached returns a file with these bytes, in the page cache.
func pageCached(b *testing.B, src []byte) *os.File {
	b.Helper()
	f, err := os.Create(filepath.Join(b.TempDir(), "source"))
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, f.Close()) })
	_, err = f.Write(src)
	require.NoError(b, err)
	return f
}

// BenchmarkFanout copies bytes, and a file in the page cache, onto 1, 2, 4 and 8 of
// the devices there are: GB/s are of the source.
//
// testdata/baseline/fanout.c measures it and BenchmarkTwoDevices in C, under the names of internal/benchmarks.
func BenchmarkFanout(b *testing.B) {
	all := devicesOf(b, 8)
	n := benchSize(4 << 30)
	src := bytesOf(1, n)
	file := pageCached(b, src)
	for count := 1; count <= len(all); count *= 2 {
		b.Run(fmt.Sprintf("%d", count), func(b *testing.B) {
			r := newFanFixture(b, all[:count], Options{})
			mems := r.devices(n)
			for _, bench := range []struct {
				name string
				one  func() error
			}{
				{"bytes", func() error { return r.f.Upload(b.Context(), mems, src) }},
				{"file", func() error { _, err := r.f.UploadFrom(b.Context(), mems, file, 0, n); return err }},
			} {
				b.Run(bench.name+"/"+benchName(n), func(b *testing.B) {
					r.forget(mems, n)
					rate(b, n, func() { require.NoError(b, bench.one()) })
					b.StopTimer()
					for i, dev := range r.devs {
						got := (&fixture{TB: b, dev: dev}).onDevice(mems[i], n)
						require.True(b, bytes.Equal(src, got), "%v", dev)
					}
				})
			}
		})
	}
}

// BenchmarkTwoDevices is an upload to each of two devices at once, by a Copier each:
// the sum of both.
func BenchmarkTwoDevices(b *testing.B) {
	devs := devicesOf(b, 2)
	if len(devs) < 2 {
		b.Skip("needs two GPUs")
	}
	n := benchSize(2 << 30)
	var rigs [2]*fixture
	var mems [2]cudart.DevPtr
	var srcs [2][]byte
	for i, dev := range devs {
		rigs[i] = fixtureOn(b, dev, Options{})
		mems[i], srcs[i] = rigs[i].device(n), bytesOf(uint64(i), n)
	}
	b.Run("pageable/"+benchName(n), func(b *testing.B) {
		rate(b, 2*n, func() {
			var group sync.WaitGroup
			for i, r := range rigs {
				group.Go(func() { assert.NoError(b, r.c.Upload(b.Context(), mems[i], srcs[i])) })
			}
			group.Wait()
		})
		b.StopTimer()
		for i, r := range rigs {
			require.True(b, bytes.Equal(srcs[i], r.onDevice(mems[i], n)))
		}
	})
}
