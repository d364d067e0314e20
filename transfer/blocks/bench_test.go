//go:build unix

package blocks

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// BenchmarkBlocks copies random blocks of a pool of pinned memory, each way and by each method, and
// a copy each beside it: GB/s and CPU seconds a GB from the call to the end. Grid has few blocks of several sizes, Odd sizes that are not
// multiples of 16, Latency is that of few blocks in µs, BothWays the sum of both directions, RowBothWays that with blocks that go to the device
// from one after the other in host memory, Requests many small ones. On a real GPU:
//
//	PINNED_TEST_GPU=1 go test ./transfer/blocks -run XXX -bench Blocks -benchtime 7x
//
// A simulated one has no times of its own.
func BenchmarkBlocks(b *testing.B) {
	poolBytes, most := 64<<20, 1000
	if testgpu.Real() {
		poolBytes, most = 4<<30, 100_000
	}
	dev := testgpu.Device(b)
	host, err := hostmem.Alloc(b.Context(), dev, poolBytes, hostmem.Options{})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, host.Close()) })
	deviceBytes := min(512<<20, poolBytes)
	p, err := dev.Malloc(2 * deviceBytes)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dev.Free(p)) })
	var streams [2]*cudart.Stream
	for i := range streams {
		s, err := dev.NewStream(cudart.StreamOptions{})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close()) })
		streams[i] = s
	}
	s := streams[0]

	// random is count blocks at random in the pool, in order on the device.
	random := func(size, count int) Copy {
		blocks := poolBytes / size
		list, seen := make([]uint32, 0, count), make(map[uint32]bool)
		for r := rand.New(rand.NewPCG(1, uint64(size))); len(list) < count; {
			if at := uint32(r.IntN(blocks)); !seen[at] {
				seen[at] = true
				list = append(list, at)
			}
		}
		return Copy{Host: host.Bytes(), Device: p, DeviceLen: deviceBytes, HostIndex: list, Size: size, Count: count}
	}
	type variant struct {
		name string
		copy func(s *cudart.Stream, c Copy, down bool) error
	}
	each := variant{"each", func(s *cudart.Stream, c Copy, down bool) error {
		for i := range c.Count {
			at, p := unsafe.Pointer(&c.Host[int(c.HostIndex[i])*c.Size]), c.Device+cudart.DevPtr(i*c.Size)
			err := error(nil)
			if down {
				err = s.CopyToHost(at, p, c.Size)
			} else {
				err = s.CopyToDevice(p, at, c.Size)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}}
	variants := []variant{each}
	var requests *Copier
	for _, w := range []struct {
		name string
		o    Options
	}{{"quickest", Options{}}, {"engine", Options{Method: ByEngine}}, {"kernel", Options{Method: ByKernel}}, {"kernel8", Options{Method: ByKernel, Processors: 8}}} {
		blocks, err := New(b.Context(), dev, w.o)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, blocks.Close()) })
		if w.name == "kernel" {
			requests = blocks
		}
		variants = append(variants, variant{w.name, func(s *cudart.Stream, c Copy, down bool) error {
			// Called as a function value, it would allocate the slice of copies.
			if down {
				_, err := blocks.CopyToHost(b.Context(), s, c)
				return err
			}
			_, err := blocks.CopyToDevice(b.Context(), s, c)
			return err
		}})
	}
	run := func(name string, bytes int, f func() error) {
		b.Run(name, func(b *testing.B) {
			require.NoError(b, f()) // what a first run costs
			began := hostos.CPUTime()
			for b.Loop() {
				require.NoError(b, f())
			}
			gb := float64(b.N) * float64(bytes) / 1e9
			b.ReportMetric(gb/b.Elapsed().Seconds(), "GB/s")
			b.ReportMetric((hostos.CPUTime()-began).Seconds()/gb, "cpu-s/GB")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/float64(b.N), "µs")
			b.ReportMetric(0, "ns/op")
		})
	}
	for _, w := range variants {
		for i, direction := range []string{"up", "down"} {
			for _, size := range []int{16, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
				c := random(size, min(most, deviceBytes/size, poolBytes/size/2))
				run(fmt.Sprintf("%s/%s/%dx%dB", w.name, direction, c.Count, size), c.Count*size, func() error {
					if err := w.copy(s, c, i == 1); err != nil {
						return err
					}
					return s.SynchronizeBlocking()
				})
			}
		}
		for i, direction := range []string{"up", "down"} {
			for _, size := range []int{64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} {
				for count := 1; count <= 1024 && count*size <= min(64<<20, poolBytes/2); count *= 4 {
					c := random(size, count)
					run(fmt.Sprintf("%s/Grid/%s/%dx%dB", w.name, direction, count, size), count*size, func() error {
						if err := w.copy(s, c, i == 1); err != nil {
							return err
						}
						return s.SynchronizeBlocking()
					})
				}
			}
		}
		for _, size := range []int{40, 41, 508, 1026, 4097, 4098, 4100} {
			for i, direction := range []string{"up", "down"} {
				c := random(size, min(most, deviceBytes/size, poolBytes/size/2))
				run(fmt.Sprintf("%s/Odd/%s/%dx%dB", w.name, direction, c.Count, size), c.Count*size, func() error {
					if err := w.copy(s, c, i == 1); err != nil {
						return err
					}
					return s.SynchronizeBlocking()
				})
			}
		}
		for _, count := range []int{1, 16, 1024, 10_000} {
			c := random(4<<10, min(count, poolBytes/(8<<10)))
			run(fmt.Sprintf("%s/Latency/%dx4096B", w.name, c.Count), c.Count*c.Size, func() error {
				if err := w.copy(s, c, false); err != nil {
					return err
				}
				return s.SynchronizeBlocking()
			})
		}
		up := random(4<<10, min(most, deviceBytes/(4<<10), poolBytes/(16<<10)))
		down := up
		up.HostIndex, down.HostIndex = up.HostIndex[:up.Count/2], up.HostIndex[up.Count/2:2*(up.Count/2)]
		up.Count, down.Count = up.Count/2, up.Count/2
		down.Device += cudart.DevPtr(deviceBytes)
		row := up // one block after the other in host memory, at random on the device
		row.HostIndex = nil
		for _, at := range rand.New(rand.NewPCG(1, 1)).Perm(up.Count) {
			row.DeviceIndex = append(row.DeviceIndex, uint32(at))
		}
		for _, of := range []struct {
			name string
			up   Copy
		}{{"BothWays", up}, {"RowBothWays", row}} {
			if w.name == each.name && of.up.HostIndex == nil {
				continue
			}
			run(w.name+"/"+of.name+"/4096B", 2*up.Count*up.Size, func() error {
				if err := w.copy(streams[0], of.up, false); err != nil {
					return err
				}
				if err := w.copy(streams[1], down, true); err != nil {
					return err
				}
				if err := streams[0].SynchronizeBlocking(); err != nil {
					return err
				}
				return streams[1].SynchronizeBlocking()
			})
		}
	}
	// A hundred requests of 16 blocks, as of sequences of a cache.
	all := random(4<<10, min(1600, poolBytes/(8<<10)))
	apart := make([]Copy, 100)
	for i := range apart {
		n := all.Count / len(apart)
		apart[i] = all
		apart[i].Count, apart[i].HostIndex = n, all.HostIndex[i*n:][:n]
		apart[i].DeviceIndex = make([]uint32, n)
		for j := range n {
			apart[i].DeviceIndex[j] = uint32(i*n + j)
		}
	}
	run("Requests/apart", all.Count*all.Size, func() error {
		for _, c := range apart {
			if _, err := requests.CopyToDevice(b.Context(), s, c); err != nil {
				return err
			}
		}
		return s.SynchronizeBlocking()
	})
	run("Requests/joined", all.Count*all.Size, func() error {
		if _, err := requests.CopyToDevice(b.Context(), s, apart...); err != nil {
			return err
		}
		return s.SynchronizeBlocking()
	})
}
