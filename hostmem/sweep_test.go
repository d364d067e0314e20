//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// An operation is something that can fail halfway. A new one is a row in operations.
type operation struct {
	name   string
	tried  string // which its errors tell
	start  func(s *stage) act
	leaves leaves
	once   bool // what failed cannot be tried again
}

// leaves is what an operation that failed leaves.
type leaves int

const (
	everything leaves = iota // as it was
	books                    // as they were, but memory may be registered no more
	less                     // than there was, but what is mapped is on the books
)

// An act is an operation prepared.
type act struct {
	do    func() error // what is to fail
	check func()       // that it did all it should, after it succeeded
	end   func()       // gives everything back
}

// A stage is where operations act: a simulated GPU, this host's system calls, and faults in both.
type stage struct {
	*rig
	sys    *pages.System
	mapped *atomic.Int64
	mem    cudart.DevPtr // of stageMem bytes

	mu       sync.Mutex
	sysCalls []string // made while recording, or armed
	sysNth   int      // which of them fails, from 1 on; 0 is none
	errno    unix.Errno
	record   bool
	calls    []string       // of CUDA, while recording
	owed     map[int]string // threads with an error pending, and whose it is
	left     []string       // errors that were left pending
}

const (
	stageMem = 64 * kib
	seam     = 2 * mib // between the first two chunks
)

func newStage(t *testing.T, cfg cudasim.Config) *stage {
	sim := newSimRig(t, cfg)
	if len(cfg.Devices) > 1 {
		dev, err := sim.dev.Runtime().Device(1) // not the one that fresh threads have
		require.NoError(t, err)
		sim.dev = dev
		sim.withStream()
	}
	s := &stage{rig: sim, owed: make(map[int]string)}
	s.mem = s.device(stageMem)
	s.sys, s.mapped = watchedSystem()
	s.sys.THP, s.sys.HugePage = "madvise", 2*mib // whatever this host has
	// Pages come when they are touched: a sweep makes thousands of buffers.
	advise := s.sys.Calls.Advise
	s.sys.Calls.Advise = func(p unsafe.Pointer, n int, a pages.Advice) error {
		if a == pages.AdvisePopulate {
			return nil
		}
		return advise(p, n, a)
	}
	s.sys.Calls = s.sys.Calls.Before(s.beforeSystemCall)
	s.sim.OnCall(s.onCall)
	return s
}

func (s *stage) options() Options { return Options{Threads: 1, system: s.sys} }

func (s *stage) beforeSystemCall(call string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.record && s.sysNth == 0 {
		return nil
	}
	s.sysCalls = append(s.sysCalls, call)
	if len(s.sysCalls) == s.sysNth {
		return s.errno
	}
	return nil
}

// onCall runs at the begin of each CUDA call, on its thread. After a failure the next call there
// must be the one that takes the error away: otherwise somebody else's call would report it.
func (s *stage) onCall(fn string, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	thread := unix.Gettid()
	if who, owes := s.owed[thread]; owes {
		delete(s.owed, thread)
		if fn != "cudaGetLastError" {
			s.left = append(s.left, fmt.Sprintf("%s was called with the error of %s pending", fn, who))
		}
	}
	if s.record && fn != "cudaGetLastError" {
		s.calls = append(s.calls, fn)
	}
}

// requireNoPendingError requires that all errors of CUDA were taken away.
func (s *stage) requireNoPendingError() {
	s.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(s, s.left)
	require.Empty(s, s.owed, "threads with an error pending")
}

// learn makes an act with no fault, and returns which calls it made.
func (s *stage) learn(op operation) (cuda, system []string) {
	a := op.start(s)
	s.mu.Lock()
	s.record, s.calls, s.sysCalls = true, nil, nil
	s.mu.Unlock()
	err := a.do()
	s.mu.Lock()
	s.record = false
	cuda, system = slices.Clone(s.calls), slices.Clone(s.sysCalls)
	s.mu.Unlock()
	require.NoError(s, err, "without any fault")
	a.check()
	a.end()
	return cuda, system
}

// A fault makes one call fail: of CUDA, or of the system.
type fault struct {
	name string
	want error
	arm  func(s *stage)
	met  func(s *stage) bool
}

func cudaFault(fn string, nth int, code cudart.Code) fault {
	var met atomic.Bool
	return fault{
		name: fmt.Sprintf("%s #%d: %s", fn, nth, code.Name()),
		want: code,
		arm: func(s *stage) {
			s.sim.Fail(fn, cudasim.Fault{Nth: nth, Code: code, After: func() {
				met.Store(true)
				s.mu.Lock()
				defer s.mu.Unlock()
				s.owed[unix.Gettid()] = fn
			}})
		},
		met: func(*stage) bool { return met.Load() },
	}
}

func systemFault(call string, nth int, errno unix.Errno) fault {
	return fault{
		name: fmt.Sprintf("system call %d, %s: %s", nth, call, unix.ErrnoName(errno)),
		want: errno,
		arm: func(s *stage) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.sysNth, s.errno, s.sysCalls = nth, errno, nil
		},
		met: func(s *stage) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.sysCalls) >= nth
		},
	}
}

func (s *stage) disarm() {
	s.sim.ResetFaults()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sysNth = 0
}

// holding is everything that is held and counted.
type holding struct {
	cuda     cudasim.Outstanding
	mapped   int64
	stats    Stats
	holdings int
	room     int // of the limits
}

func (s *stage) holding() holding {
	h := holding{cuda: s.sim.Outstanding(), mapped: s.mapped.Load(), stats: ReadStats(), holdings: len(Outstanding()), room: limits.bytes.room()}
	h.cuda.PendingOps, h.cuda.Events = 0, 0       // a runtime keeps events for the next wait
	h.stats.LostObjects, h.stats.LostBytes = 0, 0 // other tests' are found at any time
	// These only grow.
	h.stats.Opened, h.stats.Closed, h.stats.Failures, h.stats.PinTime, h.stats.UnpinTime = 0, 0, 0, 0, 0
	h.stats.PeakKeptBytes, h.stats.PeakRegisteredBytes, h.stats.PeakFileBytes = 0, 0, 0
	return h
}

// outcome counts what became of faults.
type outcome struct{ met, failed, absorbed int }

// suffer makes an act under one fault.
func (s *stage) suffer(op operation, f fault, o *outcome) {
	s.Helper()
	start := s.holding()
	a := op.start(s)
	before := s.holding()
	f.arm(s)
	err := a.do()
	met := f.met(s)
	s.disarm()
	s.requireNoPendingError()
	if met {
		o.met++
	}
	if err != nil {
		o.failed++
		require.True(s, met, "failed without the fault: %v", err)
		require.ErrorIs(s, err, f.want)
		require.True(s, strings.HasPrefix(err.Error(), "hostmem: "), "%v", err)
		require.ErrorContains(s, err, op.tried)
		after := s.holding()
		switch op.leaves {
		case books:
			before.cuda.Registrations, before.cuda.RegisteredBytes = after.cuda.Registrations, after.cuda.RegisteredBytes
			fallthrough
		case everything:
			require.Equal(s, before, after, "not rolled back: %v", err)
		case less:
			require.Equal(s, after.stats.KeptBytes-start.stats.KeptBytes, int(after.mapped-start.mapped), "what is mapped and what is said of it")
		}
		if !op.once {
			require.NoError(s, a.do(), "the next try")
		}
	} else if met {
		o.absorbed++
	}
	if err == nil || !op.once {
		a.check()
	}
	a.end()
	require.Equal(s, start, s.holding(), "not given back")
	require.Empty(s, s.sim.Misuses())
}

// maxQuestions bounds how many of the calls that ask again and again fail.
const maxQuestions = 3

var (
	sweepCodes  = []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrInvalidValue, cudart.ErrNotSupported}
	sweepErrnos = []unix.Errno{unix.ENOMEM, unix.EAGAIN, unix.EINVAL, unix.ENOSYS}
)

// Every call of CUDA and of the system fails, at every position, for every operation. Whatever
// comes of it: a clear error and everything as before, or all that was asked for. Not parallel,
// for it looks at the process's account.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	codes, errnos := sweepCodes, sweepErrnos
	if emulated(t) { // slow there, and it makes no difference to our side
		codes, errnos = codes[:1], errnos[:1]
	}
	var cuda, system outcome
	for _, host := range []struct {
		name string
		cfg  cudasim.Config
	}{
		{"one GPU", cudasim.Config{}},
		{"two GPUs", cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}},
	} {
		for _, op := range operations() {
			t.Run(host.name+"/"+op.name, func(t *testing.T) {
				s := newStage(t, host.cfg)
				calls, sysCalls := s.learn(op)
				counts := make(map[string]int)
				for _, fn := range calls {
					counts[fn]++
					if counts[fn] > maxQuestions && strings.HasSuffix(fn, "Query") {
						continue
					}
					for _, code := range codes {
						f := cudaFault(fn, counts[fn], code)
						if !t.Run(f.name, func(t *testing.T) { s.on(t).suffer(op, f, &cuda) }) {
							return
						}
					}
				}
				if len(host.cfg.Devices) > 1 {
					return // the system calls are the same
				}
				for i, call := range sysCalls {
					for _, errno := range errnos {
						f := systemFault(call, i+1, errno)
						if !t.Run(f.name, func(t *testing.T) { s.on(t).suffer(op, f, &system) }) {
							return
						}
					}
				}
			})
		}
	}
	t.Logf("%d faults of CUDA calls: %d operations failed and were rolled back, %d worked all the same", cuda.met, cuda.failed, cuda.absorbed)
	t.Logf("%d faults of system calls: %d operations failed and were rolled back, %d worked all the same", system.met, system.failed, system.absorbed)
	assert.Greater(t, cuda.met/len(codes), 150)
	assert.Greater(t, system.met/len(errnos), 100)
	assert.Equal(t, cuda.met, cuda.failed+cuda.absorbed)
}

// on lets a subtest speak for the stage.
func (s *stage) on(t *testing.T) *stage {
	outer := s.TB
	s.TB = t
	t.Cleanup(func() { s.TB = outer })
	return s
}

func operations() []operation {
	ops := []operation{
		allocating("alloc small", 5000, func(*stage, *Options) {}),
		allocating("alloc with huge pages", 5*mib+1, func(*stage, *Options) {}),
		allocating("alloc in chunks", 5*mib+1, func(_ *stage, o *Options) { o.Chunk = 2 * mib }),
		allocating("alloc base pages", 5*mib+1, func(_ *stage, o *Options) { o.HugePages = HugePagesNever }),
		allocating("alloc hugetlb", 3*mib, func(_ *stage, o *Options) { o.HugePages = HugeTLB1G }),
		allocating("alloc aligned", 3*mib+1, func(_ *stage, o *Options) { o.Align = 64 * mib }),
		allocating("alloc for forks and dumps", 5000, func(_ *stage, o *Options) { o.Fork, o.Dump = true, true }),
		allocating("alloc on a node", 5000, func(s *stage, o *Options) { o.Node, s.sys.Nodes = OnNode(0), []int{0, 1} }),
		allocating("alloc more than one registration takes", 200*mib+1, func(*stage, *Options) {}),
	}
	for _, o := range []Options{{}, {Chunk: 2 * mib}} {
		name := fmt.Sprintf("chunk=%d", o.Chunk)
		ops = append(ops,
			closing("close "+name, o, func(*stage, *Buffer) {}),
			closing("close after a copy "+name, o, func(s *stage, b *Buffer) {
				require.NoError(s, b.CopyToDevice(s.stream, s.mem, seam-100, 300))
			}),
			closing("close after a copy on a stream that was closed "+name, o, func(s *stage, b *Buffer) {
				stream, err := s.dev.NewStream(cudart.StreamOptions{})
				require.NoError(s, err)
				require.NoError(s, b.CopyToDevice(stream, s.mem, seam-100, 300))
				require.NoError(s, stream.Close())
			}),
			copyingToDevice("copy to device "+name, o),
			copyingFromDevice("copy from device "+name, o),
		)
	}
	return slices.Concat(ops, foreignOperations(), poolOperations())
}

func allocating(name string, n int, shape func(*stage, *Options)) operation {
	return operation{
		name: name, tried: fmt.Sprintf("allocate %d bytes", n),
		start: func(s *stage) act {
			o := s.options()
			shape(s, &o)
			var b *Buffer
			return act{
				do: func() (err error) {
					b, err = Alloc(s.Context(), s.dev, n, o)
					return err
				},
				check: func() { s.requireUsable(b) },
				end:   func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

// requireUsable copies the first and the last bytes of each span to the device and looks at them.
func (s *stage) requireUsable(b *Buffer) {
	s.Helper()
	end := 0
	for _, span := range b.Spans() {
		require.Equal(s, end, span.Off, "spans %v", b.Spans())
		end += span.Len
		n := min(64, span.Len)
		for _, off := range []int{span.Off, end - n} {
			fill(b.Bytes()[off:off+n], byte(off))
			require.NoError(s, b.CopyToDevice(s.stream, s.mem, off, n))
			s.synchronize()
			require.Equal(s, filled(n, byte(off)), s.download(s.mem, n))
		}
	}
	require.Equal(s, b.Len(), end)
}

// mustAlloc makes a buffer that the act closes.
func (s *stage) mustAlloc(n int, o Options) *Buffer {
	s.Helper()
	o.Threads, o.system = 1, s.sys
	b, err := Alloc(s.Context(), s.dev, n, o)
	require.NoError(s, err)
	return b
}

func closing(name string, o Options, prepare func(*stage, *Buffer)) operation {
	return operation{
		name: name, tried: "close buffer of 5242881 bytes", leaves: books,
		start: func(s *stage) act {
			b := s.mustAlloc(5*mib+1, o)
			prepare(s, b)
			return act{
				do:    b.Close,
				check: func() { require.Nil(s, b.Bytes()) },
				end:   func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

func copyingToDevice(name string, o Options) operation {
	const off, n = seam - 100, 300
	return operation{
		name: name, tried: "copy to device: buffer of 5242881 bytes",
		start: func(s *stage) act {
			b := s.mustAlloc(5*mib+1, o)
			fill(b.Bytes()[off:off+n], 11)
			return act{
				do: func() error { return b.CopyToDevice(s.stream, s.mem, off, n) },
				check: func() {
					s.synchronize()
					require.Equal(s, filled(n, 11), s.download(s.mem, n))
				},
				end: func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

func copyingFromDevice(name string, o Options) operation {
	const off, n = seam - 100, 300
	return operation{
		name: name, tried: "copy from device: buffer of 5242881 bytes",
		start: func(s *stage) act {
			b := s.mustAlloc(5*mib+1, o)
			content := filled(n, 12)
			require.NoError(s, s.dev.CopyToDevice(s.mem, unsafe.Pointer(unsafe.SliceData(content)), n))
			return act{
				do: func() error { return b.CopyFromDevice(s.stream, off, s.mem, n) },
				check: func() {
					s.synchronize()
					require.Equal(s, content, b.Bytes()[off:off+n])
					require.Zero(s, b.Bytes()[off-1])
					require.Zero(s, b.Bytes()[off+n])
				},
				end: func() { require.NoError(s, b.Close()) },
			}
		},
	}
}

// foreignOperations are those on memory and files that hostmem did not make.
func foreignOperations() []operation {
	var ops []operation
	for _, chunk := range []int{0, 2 * mib} {
		ops = append(ops,
			operation{
				name: fmt.Sprintf("register chunk=%d", chunk), tried: "register 4194305 bytes",
				start: func(s *stage) act {
					mem := s.mmap()
					var r *Registration
					return act{
						do: func() (err error) {
							r, err = Register(s.Context(), s.dev, mem, RegisterOptions{Chunk: chunk, Threads: 1, system: s.sys})
							return err
						},
						check: func() {
							fill(mem[:64], 13)
							require.NoError(s, r.CopyToDevice(s.stream, s.mem, 0, 64))
							s.synchronize()
							require.Equal(s, mem[:64], s.download(s.mem, 64))
						},
						end: func() {
							require.NoError(s, r.Close())
							require.NoError(s, unix.Munmap(mem[:cap(mem)]))
						},
					}
				},
			},
			operation{
				name: fmt.Sprintf("close a registration chunk=%d", chunk), tried: "close registration of 4194305 bytes", leaves: books,
				start: func(s *stage) act {
					mem := s.mmap()
					r, err := Register(s.Context(), s.dev, mem, RegisterOptions{Chunk: chunk, Threads: 1, system: s.sys})
					require.NoError(s, err)
					require.NoError(s, r.CopyToDevice(s.stream, s.mem, seam-100, 300))
					return act{
						do:    r.Close,
						check: func() { mem[0] = 1 }, // it is not unmapped
						end: func() {
							require.NoError(s, r.Close())
							require.NoError(s, unix.Munmap(mem[:cap(mem)]))
						},
					}
				},
			},
		)
	}
	return append(ops,
		operation{
			name: "map a file", tried: "file.bin",
			start: func(s *stage) act {
				path := s.file()
				var f *File
				return act{
					do: func() (err error) {
						f, err = MapFile(s.Context(), s.dev, path, MapFileOptions{Threads: 1, system: s.sys})
						return err
					},
					check: func() {
						require.NoError(s, f.CopyToDevice(s.stream, s.mem, 0, f.Len()))
						s.synchronize()
						require.Equal(s, filled(fileSize, 14), s.download(s.mem, fileSize))
					},
					end: func() { require.NoError(s, f.Close()) },
				}
			},
		},
		operation{
			name: "close a file", tried: "close file ", leaves: books,
			start: func(s *stage) act {
				f, err := MapFile(s.Context(), s.dev, s.file(), MapFileOptions{Threads: 1, system: s.sys})
				require.NoError(s, err)
				require.NoError(s, f.CopyToDevice(s.stream, s.mem, 0, f.Len()))
				return act{
					do:    f.Close,
					check: func() { require.Nil(s, f.Bytes()) },
					end:   func() { require.NoError(s, f.Close()) },
				}
			},
		},
	)
}

// mmap maps 4 MiB + 1 byte, not where a page begins.
func (s *stage) mmap() []byte {
	mem, err := unix.Mmap(-1, 0, 5*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(s, err)
	return mem[: 4*mib+1 : 5*mib]
}

const fileSize = 50_001

func (s *stage) file() string {
	path := filepath.Join(s.TempDir(), "file.bin")
	require.NoError(s, os.WriteFile(path, filled(fileSize, 14), 0o600))
	return path
}

// poolOperations are those on pools.
func poolOperations() []operation {
	var ops []operation
	for _, n := range []int{1000, 3*mib + 1} {
		ops = append(ops,
			operation{
				name: fmt.Sprintf("pool get %d", n), tried: fmt.Sprintf("get %d bytes from pool \"pool\"", n),
				start: func(s *stage) act {
					p := s.pool(0)
					var l Lease
					return act{
						do: func() (err error) {
							l, err = p.Get(s.Context(), n)
							return err
						},
						check: func() { s.requireLent(l) },
						end: func() {
							require.NoError(s, l.Release())
							require.NoError(s, p.Close())
						},
					}
				},
			},
			operation{
				// The limit has room for one block, which the GPU may be using.
				name: fmt.Sprintf("pool get %d at the limit", n), tried: fmt.Sprintf("get %d bytes from pool \"pool\"", n),
				start: func(s *stage) act {
					p := s.pool(max(2*mib, roundUp(n, s.sys.Page)))
					first, err := p.Get(s.Context(), n)
					require.NoError(s, err)
					require.NoError(s, first.CopyToDevice(s.stream, s.mem, 0, 500))
					require.NoError(s, first.Release())
					var l Lease
					return act{
						do: func() (err error) {
							l, err = p.Get(s.Context(), n)
							return err
						},
						check: func() { s.requireLent(l) },
						end: func() {
							require.NoError(s, l.Release())
							require.NoError(s, p.Close())
						},
					}
				},
			},
			operation{
				name: fmt.Sprintf("pool get %d in place of other sizes", n), tried: fmt.Sprintf("get %d bytes from pool \"pool\"", n), leaves: less,
				start: func(s *stage) act {
					p := s.pool(4*mib + 2*s.sys.Page)
					require.NoError(s, s.lease(p, 4*mib).Release())
					var l Lease
					return act{
						do: func() (err error) {
							l, err = p.Get(s.Context(), n)
							return err
						},
						check: func() { s.requireLent(l) },
						end: func() {
							require.NoError(s, l.Release())
							require.NoError(s, p.Close())
						},
					}
				},
			},
			operation{
				name: fmt.Sprintf("release %d after a copy", n), tried: "release to pool \"pool\"", once: true,
				start: func(s *stage) act {
					p := s.pool(0)
					l := s.lease(p, n)
					fill(l.Bytes()[:500], 15)
					require.NoError(s, l.CopyToDevice(s.stream, s.mem, 0, 500))
					return act{
						do:    func() error { return l.Release() },
						check: func() { require.Nil(s, l.Bytes()) },
						end: func() {
							require.ErrorIs(s, l.Release(), ErrReleased)
							again := s.lease(p, n) // the same block, when the copy is done
							require.NoError(s, again.Release())
							require.NoError(s, p.Close())
							require.Equal(s, filled(500, 15), s.download(s.mem, 500))
						},
					}
				},
			},
			operation{
				name: fmt.Sprintf("copy a lease of %d", n), tried: fmt.Sprintf("copy to device: lease of %d bytes", n),
				start: func(s *stage) act {
					p := s.pool(0)
					l := s.lease(p, n)
					fill(l.Bytes()[:500], 16)
					return act{
						do: func() error { return l.CopyToDevice(s.stream, s.mem, 0, 500) },
						check: func() {
							s.synchronize()
							require.Equal(s, filled(500, 16), s.download(s.mem, 500))
						},
						end: func() {
							require.NoError(s, l.Release())
							require.NoError(s, p.Close())
						},
					}
				},
			},
		)
	}
	for _, give := range []struct {
		name string
		do   func(*Pool) error
	}{
		{"trim", func(p *Pool) error {
			_, err := p.Trim(0)
			return err
		}},
		{"close", (*Pool).Close},
	} {
		ops = append(ops, operation{
			name: "pool " + give.name, tried: give.name + " pool \"pool\"", leaves: less,
			start: func(s *stage) act {
				p := s.pool(0)
				small, large, larger := s.lease(p, 1000), s.lease(p, 2*mib), s.lease(p, 4*mib)
				require.NoError(s, small.Release())
				require.NoError(s, large.Release())
				require.NoError(s, larger.Release())
				return act{
					do:    func() error { return give.do(p) },
					check: func() { require.Zero(s, p.Stats().KeptBytes) },
					end:   func() { require.NoError(s, p.Close()) },
				}
			},
		})
	}
	return append(ops, operation{
		name: "pool close with copies under way", tried: "close pool \"pool\"", leaves: less,
		start: func(s *stage) act {
			p := s.pool(0)
			for _, n := range []int{1000, 4 * mib} {
				l := s.lease(p, n)
				require.NoError(s, l.CopyToDevice(s.stream, s.mem, 0, 500))
				require.NoError(s, l.Release())
			}
			return act{
				do:    p.Close,
				check: func() { require.Zero(s, p.Stats().KeptBytes) },
				end:   func() { require.NoError(s, p.Close()) },
			}
		},
	})
}

// pool makes a pool that the act closes.
func (s *stage) pool(most int) *Pool {
	s.Helper()
	p, err := NewPool(s.dev, PoolOptions{MaxBytes: most, IdleTime: -1, Buffer: s.options()})
	require.NoError(s, err)
	return p
}

func (s *stage) lease(p *Pool, n int) Lease {
	s.Helper()
	l, err := p.Get(s.Context(), n)
	require.NoError(s, err)
	return l
}

func (s *stage) requireLent(l Lease) {
	s.Helper()
	n := min(64, l.Len())
	fill(l.Bytes()[l.Len()-n:], 17)
	require.NoError(s, l.CopyToDevice(s.stream, s.mem, l.Len()-n, n))
	s.synchronize()
	require.Equal(s, filled(n, 17), s.download(s.mem, n))
}

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// Work that cannot be waited for may still use the memory: nobody else may get it, and it stays
// registered, whatever call fails, once or always.
func TestNoFaultTakesMemoryFromUnderACopy(t *testing.T) {
	calls := []string{"cudaStreamQuery", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery"}
	for _, tc := range []struct {
		name string
		take func(s *stage, ctx context.Context) (settle func())
	}{
		{"close a buffer", func(s *stage, ctx context.Context) func() {
			b := s.mustAlloc(4096, Options{})
			require.NoError(s, b.CopyToDevice(s.stream, s.mem, 0, 4096))
			require.Error(s, b.CloseContext(ctx))
			return func() { require.NoError(s, b.Close()) }
		}},
		{"get from a pool", func(s *stage, ctx context.Context) func() {
			p := s.pool(2 * mib)
			l := s.lease(p, 2*mib)
			require.NoError(s, l.CopyToDevice(s.stream, s.mem, 0, 4096))
			_ = l.Release() // says so if no mark could be made
			_, err := p.Get(ctx, 2*mib)
			require.Error(s, err)
			return func() { require.NoError(s, p.Close()) }
		}},
		{"trim a pool", func(s *stage, _ context.Context) func() {
			p := s.pool(2 * mib)
			l := s.lease(p, 2*mib)
			require.NoError(s, l.CopyToDevice(s.stream, s.mem, 0, 4096))
			_ = l.Release()
			freed, err := p.Trim(0)
			require.NoError(s, err)
			require.Zero(s, freed)
			return func() { require.NoError(s, p.Close()) }
		}},
		{"close a pool", func(s *stage, ctx context.Context) func() {
			p := s.pool(2 * mib)
			l := s.lease(p, 2*mib)
			require.NoError(s, l.CopyToDevice(s.stream, s.mem, 0, 4096))
			_ = l.Release()
			require.Error(s, p.CloseContext(ctx))
			return func() { require.NoError(s, p.Close()) }
		}},
	} {
		for _, fn := range calls {
			for _, device := range []string{"", " and the device cannot tell"} {
				for _, times := range []int{1, -1} {
					t.Run(fmt.Sprintf("%s/%s fails %d times%s", tc.name, fn, times, device), func(t *testing.T) {
						s := newStage(t, cudasim.Config{})
						start := s.holding()
						s.hold()
						s.sim.Fail(fn, cudasim.Fault{Times: times, Code: cudart.ErrMemoryAllocation})
						if device != "" {
							s.sim.Fail("cudaDeviceSynchronize", cudasim.Fault{Times: times, Code: cudart.ErrMemoryAllocation})
						}
						ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
						defer cancel()
						settle := tc.take(s, ctx)
						for _, m := range s.sim.Misuses() {
							t.Error(m)
						}
						s.disarm()
						s.sim.Release()
						settle()
						require.Equal(t, start, s.holding())
					})
				}
			}
		}
	}
}
