//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// seam lies between the first two chunks.
const seam = 2 * mib

// figures are all that an operation which failed must leave as they were.
type figures struct {
	stats    Stats
	holdings int
}

// theLedger is that of this process. Lost objects of other tests may be found at any
// time, and some numbers only grow.
var theLedger = hostmemtest.Ledger{
	Figures: func() any {
		f := figures{stats: ReadStats(), holdings: len(Outstanding())}
		f.stats.LostObjects, f.stats.LostBytes = 0, 0
		f.stats.Opened, f.stats.Closed, f.stats.Failures, f.stats.PinTime, f.stats.UnpinTime = 0, 0, 0, 0, 0
		f.stats.PeakReservedBytes, f.stats.PeakRegisteredBytes, f.stats.PeakFileBytes = 0, 0, 0
		return f
	},
	Reserved: func() int { return ReadStats().ReservedBytes },
}

// Not parallel, for it looks at the process's ledger.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	hostmemtest.Sweep(t, "hostmem: ", hostmemtest.GPUs, operations(), theLedger, 100, 90)
}

// The same on hosts that pin in other ways, or not.
func TestEveryCallFailsAtEveryPositionOnHostsThatRefuse(t *testing.T) {
	few := cudasim.MaxMapCount()
	few.MaxRegistrations = 1 // of five
	wsl := cudasim.WSL()
	wsl.MaxPinned = 8 * mib
	hosts := map[string]cudasim.Config{
		"confidential computing": cudasim.ConfidentialComputing(),
		"no cudaHostRegister":    cudasim.NoHostRegister(),
		"few registrations":      few,
		"WSL":                    wsl,
		"shared page tables":     cudasim.SharedPageTables(),
	}
	chunks := Options{Chunk: 2 * mib}
	hostmemtest.Sweep(t, "hostmem: ", hosts, []hostmemtest.Operation{
		allocating("alloc small", 5000, func(*hostmemtest.Stage, *Options) {}),
		allocating("alloc in chunks", 5*mib+1, func(_ *hostmemtest.Stage, o *Options) { o.Chunk = 2 * mib }),
		allocating("alloc aligned", 3*mib+1, func(_ *hostmemtest.Stage, o *Options) { o.Align = 64 * mib }),
		allocating("alloc hugetlb", 3*mib, func(_ *hostmemtest.Stage, o *Options) { o.HugePages = HugeTLB }),
		closing("close after a copy", Options{}, func(s *hostmemtest.Stage, b *Buffer) {
			require.NoError(s, b.CopyToDevice(s.Stream, s.Mem, seam-100, 300))
		}),
		copyingToDevice("copy to device", chunks),
		copyingFromDevice("copy from device", chunks),
	}, theLedger, 80, 100)
	hostmemtest.Sweep(t, "hostmem: ", map[string]cudasim.Config{"shared page tables": cudasim.SharedPageTables()}, foreignOperations(), theLedger, 15, 8)
}

func operations() []hostmemtest.Operation {
	ops := []hostmemtest.Operation{
		allocating("alloc small", 5000, func(*hostmemtest.Stage, *Options) {}),
		allocating("alloc with huge pages", 5*mib+1, func(*hostmemtest.Stage, *Options) {}),
		allocating("alloc in chunks", 5*mib+1, func(_ *hostmemtest.Stage, o *Options) { o.Chunk = 2 * mib }),
		allocating("alloc base pages", 5*mib+1, func(_ *hostmemtest.Stage, o *Options) { o.HugePages = HugePagesNever }),
		allocating("alloc hugetlb", 3*mib, func(_ *hostmemtest.Stage, o *Options) { o.HugePages = HugeTLB1G }),
		allocating("alloc aligned", 3*mib+1, func(_ *hostmemtest.Stage, o *Options) { o.Align = 64 * mib }),
		allocating("alloc for forks and dumps", 5000, func(_ *hostmemtest.Stage, o *Options) { o.Fork, o.Dump = true, true }),
		allocating("alloc on a node", 5000, func(s *hostmemtest.Stage, o *Options) { o.Node, s.Sys.Nodes = OnNode(0), []int{0, 1} }),
		allocating("alloc more than one registration takes", 200*mib+1, func(*hostmemtest.Stage, *Options) {}),
	}
	for _, o := range []Options{{}, {Chunk: 2 * mib}} {
		name := fmt.Sprintf("chunk=%d", o.Chunk)
		ops = append(ops,
			closing("close "+name, o, func(*hostmemtest.Stage, *Buffer) {}),
			closing("close after a copy "+name, o, func(s *hostmemtest.Stage, b *Buffer) {
				require.NoError(s, b.CopyToDevice(s.Stream, s.Mem, seam-100, 300))
			}),
			closing("close after a copy on a stream that was closed "+name, o, func(s *hostmemtest.Stage, b *Buffer) {
				stream, err := s.Dev.NewStream(cudart.StreamOptions{})
				require.NoError(s, err)
				require.NoError(s, b.CopyToDevice(stream, s.Mem, seam-100, 300))
				require.NoError(s, stream.Close())
			}),
			copyingToDevice("copy to device "+name, o),
			copyingFromDevice("copy from device "+name, o),
		)
	}
	return slices.Concat(ops, foreignOperations())
}

func allocating(name string, n int, shape func(*hostmemtest.Stage, *Options)) hostmemtest.Operation {
	return hostmemtest.Operation{
		Name: name, Tried: fmt.Sprintf("allocate %d bytes", n),
		Start: func(s *hostmemtest.Stage) hostmemtest.Act {
			o := Options{Workers: 1}
			shape(s, &o)
			var b *Buffer
			return hostmemtest.Act{
				Do: func() (err error) {
					b, err = Alloc(s.Context(), s.Dev, n, o)
					return err
				},
				Check: func() { requireUsable(s, b) },
				End:   func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

// requireUsable copies the first and the last bytes of each span to the device and looks at them.
func requireUsable(s *hostmemtest.Stage, b *Buffer) {
	s.Helper()
	end := 0
	for _, span := range slices.Collect(b.Spans(0, b.Len())) {
		require.Equal(s, end, span.Off, "spans %v", slices.Collect(b.Spans(0, b.Len())))
		end += span.Len
		n := min(64, span.Len)
		for _, off := range []int{span.Off, end - n} {
			fill(b.Bytes()[off:off+n], byte(off))
			require.NoError(s, b.CopyToDevice(s.Stream, s.Mem, off, n))
			s.Synchronize()
			require.Equal(s, filled(n, byte(off)), s.Download(s.Mem, n))
		}
	}
	require.Equal(s, b.Len(), end)
}

// mustAlloc makes a buffer that the act closes.
func mustAlloc(s *hostmemtest.Stage, n int, o Options) *Buffer {
	s.Helper()
	o.Workers = 1
	b, err := Alloc(s.Context(), s.Dev, n, o)
	require.NoError(s, err)
	return b
}

func closing(name string, o Options, prepare func(*hostmemtest.Stage, *Buffer)) hostmemtest.Operation {
	return hostmemtest.Operation{
		Name: name, Tried: "close buffer of 5242881 bytes", Leaves: hostmemtest.InLedger,
		Start: func(s *hostmemtest.Stage) hostmemtest.Act {
			b := mustAlloc(s, 5*mib+1, o)
			prepare(s, b)
			return hostmemtest.Act{
				Do:    b.Close,
				Check: func() { require.Nil(s, b.Bytes()) },
				End:   func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

func copyingToDevice(name string, o Options) hostmemtest.Operation {
	const off, n = seam - 100, 300
	return hostmemtest.Operation{
		Name: name, Tried: "copy to device: buffer of 5242881 bytes",
		Start: func(s *hostmemtest.Stage) hostmemtest.Act {
			b := mustAlloc(s, 5*mib+1, o)
			fill(b.Bytes()[off:off+n], 11)
			return hostmemtest.Act{
				Do: func() error { return b.CopyToDevice(s.Stream, s.Mem, off, n) },
				Check: func() {
					s.Synchronize()
					require.Equal(s, filled(n, 11), s.Download(s.Mem, n))
				},
				End: func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

func copyingFromDevice(name string, o Options) hostmemtest.Operation {
	const off, n = seam - 100, 300
	return hostmemtest.Operation{
		Name: name, Tried: "copy from device: buffer of 5242881 bytes",
		Start: func(s *hostmemtest.Stage) hostmemtest.Act {
			b := mustAlloc(s, 5*mib+1, o)
			content := filled(n, 12)
			s.Upload(s.Mem, content)
			return hostmemtest.Act{
				Do: func() error { return b.CopyFromDevice(s.Stream, s.Mem, off, n) },
				Check: func() {
					s.Synchronize()
					require.Equal(s, content, b.Bytes()[off:off+n])
					require.Zero(s, b.Bytes()[off-1])
					require.Zero(s, b.Bytes()[off+n])
				},
				End: func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

// foreignOperations are those on memory and files that hostmem did not make.
func foreignOperations() []hostmemtest.Operation {
	var ops []hostmemtest.Operation
	for _, chunk := range []int{0, 2 * mib} {
		ops = append(ops,
			hostmemtest.Operation{
				Name: fmt.Sprintf("register chunk=%d", chunk), Tried: "register 4194305 bytes",
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					mem := mapUnaligned(s)
					var r *Buffer
					return hostmemtest.Act{
						Do: func() (err error) {
							r, err = Register(s.Context(), s.Dev, mem, RegisterOptions{Chunk: chunk, Workers: 1})
							return err
						},
						Check: func() {
							fill(mem[:64], 13)
							require.NoError(s, r.CopyToDevice(s.Stream, s.Mem, 0, 64))
							s.Synchronize()
							require.Equal(s, mem[:64], s.Download(s.Mem, 64))
						},
						End: func() {
							require.NoError(s, r.Close())
							require.NoError(s, unix.Munmap(mem[:cap(mem)]))
						},
					}
				},
			},
			hostmemtest.Operation{
				Name: fmt.Sprintf("close a registration chunk=%d", chunk), Tried: "close registration of 4194305 bytes", Leaves: hostmemtest.InLedger,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					mem := mapUnaligned(s)
					r, err := Register(s.Context(), s.Dev, mem, RegisterOptions{Chunk: chunk, Workers: 1})
					require.NoError(s, err)
					require.NoError(s, r.CopyToDevice(s.Stream, s.Mem, seam-100, 300))
					return hostmemtest.Act{
						Do:    r.Close,
						Check: func() { mem[0] = 1 }, // it is not unmapped
						End: func() {
							require.NoError(s, r.Close())
							require.NoError(s, unix.Munmap(mem[:cap(mem)]))
						},
					}
				},
			},
		)
	}
	return append(ops,
		hostmemtest.Operation{
			Name: "map a file", Tried: "file.bin",
			Start: func(s *hostmemtest.Stage) hostmemtest.Act {
				path := newFile(s)
				var f *Buffer
				return hostmemtest.Act{
					Do: func() (err error) {
						f, err = MapFile(s.Context(), s.Dev, path, FileOptions{Workers: 1})
						return err
					},
					Check: func() {
						require.NoError(s, f.CopyToDevice(s.Stream, s.Mem, 0, f.Len()))
						s.Synchronize()
						require.Equal(s, filled(fileSize, 14), s.Download(s.Mem, fileSize))
					},
					End: func() { require.NoError(s, f.Close()) },
				}
			},
		},
		hostmemtest.Operation{
			Name: "close a file", Tried: "close file ", Leaves: hostmemtest.InLedger,
			Start: func(s *hostmemtest.Stage) hostmemtest.Act {
				f, err := MapFile(s.Context(), s.Dev, newFile(s), FileOptions{Workers: 1})
				require.NoError(s, err)
				require.NoError(s, f.CopyToDevice(s.Stream, s.Mem, 0, f.Len()))
				return hostmemtest.Act{
					Do:    f.Close,
					Check: func() { require.Nil(s, f.Bytes()) },
					End:   func() { require.NoError(s, f.Close()) },
				}
			},
		},
	)
}

// mapUnaligned maps 4 MiB + 1 byte.
func mapUnaligned(s *hostmemtest.Stage) []byte {
	mem, err := unix.Mmap(-1, 0, 5*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(s, err)
	return mem[: 4*mib+1 : 5*mib]
}

const fileSize = 50_001

func newFile(s *hostmemtest.Stage) string {
	path := filepath.Join(s.TempDir(), "file.bin")
	require.NoError(s, os.WriteFile(path, filled(fileSize, 14), 0o600))
	return path
}

// Work that cannot be waited for may still use the memory: it stays registered, whichever call
// fails, once or always.
func TestNoFaultTakesMemoryFromUnderACopy(t *testing.T) {
	calls := []string{"cudaStreamQuery", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery"}
	for _, tc := range []struct {
		name string
		take func(s *hostmemtest.Stage, ctx context.Context) (finish func())
	}{
		{"close a buffer", func(s *hostmemtest.Stage, ctx context.Context) func() {
			b := mustAlloc(s, 4096, Options{})
			require.NoError(s, b.CopyToDevice(s.Stream, s.Mem, 0, 4096))
			require.Error(s, b.CloseContext(ctx))
			return func() {
				// The call that was in progress meanwhile may report its failure once.
				if err := b.Close(); err != nil {
					require.NoError(s, b.Close(), "after %v", err)
				}
			}
		}},
	} {
		for _, fn := range calls {
			for _, device := range []string{"", " and cudaDeviceSynchronize too"} {
				for _, times := range []int{1, -1} {
					t.Run(fmt.Sprintf("%s/%s fails %d times%s", tc.name, fn, times, device), func(t *testing.T) {
						s := hostmemtest.NewStage(t, cudasim.Config{}, theLedger)
						start := s.Holding()
						s.Hold()
						s.Sim.Fail(fn, cudasim.Fault{Times: times, Code: cudart.ErrMemoryAllocation})
						if device != "" {
							s.Sim.Fail("cudaDeviceSynchronize", cudasim.Fault{Times: times, Code: cudart.ErrMemoryAllocation})
						}
						ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
						defer cancel()
						finish := tc.take(s, ctx)
						for _, m := range s.Sim.Misuses() {
							t.Error(m)
						}
						s.Sim.ResetFaults()
						s.Sim.Release()
						finish()
						require.Equal(t, start, s.Holding())
					})
				}
			}
		}
	}
}
