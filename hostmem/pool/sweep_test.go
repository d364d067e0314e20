//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// theLedger is hostmem's of this process: what buffers have and count. Lost objects of
// other tests may be found at any time.
var theLedger = hostmemtest.Ledger{
	Figures: func() any {
		st := hostmem.ReadStats()
		return [4]int{st.RequestedBytes, st.ReservedBytes, st.PinnedBytes, len(hostmem.Outstanding())}
	},
	Reserved: func() int { return hostmem.ReadStats().ReservedBytes },
}

// Not parallel, for it looks at the process's ledger.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	hostmemtest.Sweep(t, "pool: ", hostmemtest.GPUs, operations(), theLedger, 60, 35)
}

// The same where registering is refused, and where it is not needed.
func TestEveryCallFailsAtEveryPositionOnHostsThatRefuse(t *testing.T) {
	hosts := map[string]cudasim.Config{
		"confidential computing": cudasim.ConfidentialComputing(),
		"shared page tables":     cudasim.SharedPageTables(),
	}
	hostmemtest.Sweep(t, "pool: ", hosts, operations(), theLedger, 40, 35)
}

// operations are those on pools.
func operations() []hostmemtest.Operation {
	var ops []hostmemtest.Operation
	for _, n := range []int{1000, 3*mib + 1} {
		tried := fmt.Sprintf(`get %d bytes from "pool"`, n)
		getting := func(s *hostmemtest.Stage, p *Pool) hostmemtest.Act {
			var l Lease
			return hostmemtest.Act{
				Do: func() (err error) {
					l, err = p.Get(s.Context(), n)
					return err
				},
				Check: func() { requireUsable(s, l) },
				End: func() {
					require.NoError(s, l.Release())
					require.NoError(s, p.Close())
				},
			}
		}
		ops = append(ops,
			hostmemtest.Operation{
				Name: fmt.Sprintf("get %d", n), Tried: tried,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act { return getting(s, newPool(s, 0)) },
			},
			hostmemtest.Operation{
				// The limit allows one block, which the GPU may be using.
				Name: fmt.Sprintf("get %d at the limit", n), Tried: tried,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, max(2*mib, (n+s.Sys.Page-1)/s.Sys.Page*s.Sys.Page))
					first := lease(s, p, n)
					require.NoError(s, first.CopyToDevice(s.Stream, s.Mem, 0, 500))
					require.NoError(s, first.Release())
					return getting(s, p)
				},
			},
			hostmemtest.Operation{
				Name: fmt.Sprintf("get %d instead of other sizes", n), Tried: tried, Leaves: hostmemtest.Less,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, 4*mib+2*s.Sys.Page)
					require.NoError(s, lease(s, p, 4*mib).Release())
					return getting(s, p)
				},
			},
			hostmemtest.Operation{
				Name: fmt.Sprintf("release %d after a copy", n), Tried: "release", Once: true,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, 0)
					l := lease(s, p, n)
					fill(l.Bytes()[:500], 15)
					require.NoError(s, l.CopyToDevice(s.Stream, s.Mem, 0, 500))
					return hostmemtest.Act{
						Do:    func() error { return l.Release() },
						Check: func() { require.Nil(s, l.Bytes()) },
						End: func() {
							require.ErrorIs(s, l.Release(), errReleased)
							require.NoError(s, lease(s, p, n).Release()) // the same block, when the copy is done
							require.NoError(s, p.Close())
							require.Equal(s, hostmemtest.Filled(500, 15), s.Download(s.Mem, 500))
						},
					}
				},
			},
			hostmemtest.Operation{
				Name: fmt.Sprintf("copy a lease of %d", n), Tried: fmt.Sprintf("copy to device: lease of %d bytes", n),
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, 0)
					l := lease(s, p, n)
					fill(l.Bytes()[:500], 16)
					return hostmemtest.Act{
						Do: func() error { return l.CopyToDevice(s.Stream, s.Mem, 0, 500) },
						Check: func() {
							s.Synchronize()
							require.Equal(s, hostmemtest.Filled(500, 16), s.Download(s.Mem, 500))
						},
						End: func() {
							require.NoError(s, l.Release())
							require.NoError(s, p.Close())
						},
					}
				},
			},
		)
	}
	for _, unmap := range []struct {
		name string
		do   func(*Pool) error
	}{
		{"trim", func(p *Pool) error {
			_, err := p.Trim(context.Background(), 0)
			return err
		}},
		{"close", (*Pool).Close},
	} {
		ops = append(ops,
			hostmemtest.Operation{
				Name: unmap.name, Tried: unmap.name + ` "pool"`, Leaves: hostmemtest.Less,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, 0)
					small, large, larger := lease(s, p, 1000), lease(s, p, 2*mib), lease(s, p, 4*mib)
					require.NoError(s, small.Release())
					require.NoError(s, large.Release())
					require.NoError(s, larger.Release())
					return unmapping(s, p, unmap.do)
				},
			},
			hostmemtest.Operation{
				Name: unmap.name + " with copies that are not done", Tried: unmap.name + ` "pool"`, Leaves: hostmemtest.Less,
				Start: func(s *hostmemtest.Stage) hostmemtest.Act {
					p := newPool(s, 0)
					for _, n := range []int{1000, 4 * mib} {
						l := lease(s, p, n)
						require.NoError(s, l.CopyToDevice(s.Stream, s.Mem, 0, 500))
						require.NoError(s, l.Release())
					}
					return unmapping(s, p, unmap.do)
				},
			})
	}
	return ops
}

func unmapping(s *hostmemtest.Stage, p *Pool, do func(*Pool) error) hostmemtest.Act {
	return hostmemtest.Act{
		Do: func() error { return do(p) },
		Check: func() {
			s.Synchronize()
			_, err := p.Trim(context.Background(), 0) // what the GPU was not done with
			require.NoError(s, err)
			require.Zero(s, p.Stats().ReservedBytes)
		},
		End: func() { require.NoError(s, p.Close()) },
	}
}

// newPool makes a pool that the act closes.
func newPool(s *hostmemtest.Stage, maxBytes int) *Pool {
	s.Helper()
	p, err := New(s.Dev, Options{MaxBytes: maxBytes, IdleTime: -1, Buffer: hostmem.Options{Workers: 1}})
	require.NoError(s, err)
	return p
}

func lease(s *hostmemtest.Stage, p *Pool, n int) Lease {
	s.Helper()
	l, err := p.Get(s.Context(), n)
	require.NoError(s, err)
	return l
}

func requireUsable(s *hostmemtest.Stage, l Lease) {
	s.Helper()
	n := min(64, l.Len())
	fill(l.Bytes()[l.Len()-n:], 17)
	require.NoError(s, l.CopyToDevice(s.Stream, s.Mem, l.Len()-n, n))
	s.Synchronize()
	require.Equal(s, hostmemtest.Filled(n, 17), s.Download(s.Mem, n))
}

// Work that cannot be waited for may still use the memory: it is not reused, and stays
// registered, whichever call fails, once or always.
func TestNoFaultTakesMemoryFromUnderACopy(t *testing.T) {
	calls := []string{"cudaStreamQuery", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery"}
	for _, tc := range []struct {
		name string
		take func(s *hostmemtest.Stage, p *Pool, ctx context.Context)
	}{
		{"get", func(s *hostmemtest.Stage, p *Pool, ctx context.Context) {
			_, err := p.Get(ctx, 2*mib)
			require.Error(s, err)
		}},
		{"trim", func(s *hostmemtest.Stage, p *Pool, _ context.Context) {
			freed, err := p.Trim(context.Background(), 0)
			require.NoError(s, err)
			require.Zero(s, freed)
		}},
		{"tick", func(s *hostmemtest.Stage, p *Pool, _ context.Context) {
			for range idleTicks {
				p.core.tick()
			}
			require.Zero(s, p.Stats().TrimmedBytes)
		}},
		{"reclaim", func(s *hostmemtest.Stage, p *Pool, _ context.Context) {
			require.Zero(s, p.core.reclaim(context.Background(), mib))
		}},
		{"close", func(s *hostmemtest.Stage, p *Pool, ctx context.Context) {
			require.Error(s, p.CloseContext(ctx))
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
						ctx, cancel := context.WithTimeout(s.Context(), 3*time.Millisecond)
						defer cancel()
						p := newPool(s, 2*mib)
						l := lease(s, p, 2*mib)
						require.NoError(s, l.CopyToDevice(s.Stream, s.Mem, 0, 4096))
						require.NoError(s, l.Release())
						tc.take(s, p, ctx)
						require.Equal(s, 1, s.Registrations())
						for _, m := range s.Sim.Misuses() {
							t.Error(m)
						}
						s.Sim.ResetFaults()
						s.Sim.Release()
						if err := p.Close(); err != nil { // a result of an earlier query
							require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
							require.NoError(t, p.Close())
						}
						require.Equal(t, start, s.Holding())
					})
				}
			}
		}
	}
}
