//go:build linux

package benchmarks

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30

	// sourceBytes is the size of the source that rows copy from, simulatedBytes that on a simulated GPU.
	sourceBytes    = 2 * gib
	simulatedBytes = mib
)

// ctx cannot end: calls with it take the way of those that cannot be cancelled.
var ctx = context.Background()

// A fixture is what a row needs while it runs: what all rows share, and the benchmark's cleanups.
type fixture struct {
	testing.TB
	*shared
}

// shared has the GPUs and large memory, made when a row asks for it and kept until the process ends.
type shared struct {
	rt      *cudart.Runtime
	library *cudasim.Sim // nil on a real GPU
	host    []byte       // what rows copy from
	into    []byte       // what rows copy to
	mems    map[[2]int]memory
	copiers map[int]*transfer.Copier
	ownDir  string // if dirEnv is not set

	patterns   pattern // the last that was used
	coldOffset int     // an offset in host and into: what lies behind it was used long ago
}

type memory struct {
	dev *cudart.Device
	p   cudart.DevPtr
}

var process = &shared{mems: map[[2]int]memory{}, copiers: map[int]*transfer.Copier{}}

// close releases all of it. Of a simulated GPU nothing may be left.
func (s *shared) close() error {
	var all []error
	for _, c := range s.copiers {
		all = append(all, c.Close())
	}
	for _, m := range s.mems {
		all = append(all, m.dev.Free(m.p))
	}
	if s.rt != nil {
		all = append(all, s.rt.Close())
	}
	if s.library != nil {
		all = append(all, s.library.Check(), s.library.Close())
	}
	if s.ownDir != "" {
		all = append(all, os.RemoveAll(s.ownDir), os.RemoveAll(shmFolder(s.ownDir)))
	}
	return errors.Join(all...)
}

// check fails the benchmark if there is an error.
func (f *fixture) check(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// must returns v, or fails the benchmark.
func must[T any](v T, err error) func(f *fixture) T {
	return func(f *fixture) T {
		f.Helper()
		f.check(err)
		return v
	}
}

// later calls do when the benchmark ends, before what was deferred earlier.
func (f *fixture) later(do func() error) {
	f.Cleanup(func() {
		if err := do(); err != nil {
			f.Error(err)
		}
	})
}

// open opens the runtime library, or simulates one with eight GPUs.
func (f *fixture) open() {
	if f.rt != nil {
		return
	}
	var o cudart.Options
	if !testgpu.Real() {
		library, err := cudasim.New(testgpu.Config(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 8)}))
		if errors.Is(err, errors.ErrUnsupported) {
			f.Skip(err)
		}
		f.check(err)
		f.library, o.Source = library, library
	}
	f.rt = must(cudart.Open(context.Background(), o))(f)
	if f.rt.DeviceCount() == 0 {
		f.Fatal("no GPU")
	}
}

// size returns the size that is copied where n bytes are on a real GPU. What is beyond whole pages stays.
func (f *fixture) size(n int) int {
	if !testgpu.Real() && n > simulatedBytes {
		return simulatedBytes + n%4096
	}
	return n
}

// times returns how often something is repeated in an operation on a real GPU, and few times on a simulated one.
func times(n int) int {
	if !testgpu.Real() {
		return min(n, 10)
	}
	return n
}

// device returns one of the GPUs. Without it the benchmark is skipped.
func (f *fixture) device(i int) *cudart.Device {
	f.open()
	if i >= f.rt.DeviceCount() {
		f.Skipf("needs %d GPUs", i+1)
	}
	return must(f.rt.Device(i))(f)
}

// source returns memory of the Go heap, with pattern 0.
func (f *fixture) source() []byte {
	if f.host == nil {
		f.host = make([]byte, f.size(sourceBytes))
		pattern(0).fill(f.host)
	}
	return f.host
}

// target returns resident memory of the Go heap to copy to.
func (f *fixture) target() []byte {
	if f.into == nil {
		f.into = make([]byte, f.size(sourceBytes))
		zero(f.into)
	}
	return f.into
}

// memory returns device memory as large as the source. Each device has several, by number.
func (f *fixture) memory(device, number int) (*cudart.Device, cudart.DevPtr) {
	dev, key := f.device(device), [2]int{device, number}
	if _, ok := f.mems[key]; !ok {
		f.mems[key] = memory{dev, must(dev.Malloc(f.size(sourceBytes)))(f)}
	}
	return dev, f.mems[key].p
}

// copier returns a copier of a device, which stays open, as programs keep theirs.
func (f *fixture) copier(device int) *transfer.Copier {
	if f.copiers[device] == nil {
		f.copiers[device] = must(transfer.NewCopier(ctx, f.device(device), transfer.Options{}))(f)
	}
	return f.copiers[device]
}

// memoryAndCopier returns the first device with memory and a copier.
func (f *fixture) memoryAndCopier() (*cudart.Device, cudart.DevPtr, *transfer.Copier) {
	dev, p := f.memory(0, 0)
	return dev, p, f.copier(0)
}

// stream returns a stream of a device that does not wait for the default stream.
func (f *fixture) stream(dev *cudart.Device) *cudart.Stream {
	s := must(dev.NewStream(cudart.StreamOptions{}))(f)
	f.later(s.Close)
	return s
}

// pinned returns n bytes of pinned memory.
func (f *fixture) pinned(dev *cudart.Device, n int) []byte {
	buf := must(hostmem.Alloc(ctx, dev, n, hostmem.Options{}))(f)
	f.later(buf.Close)
	return buf.Bytes()
}

// poison overwrites device memory, so that bytes that were there before are not taken for
// copied ones.
func poison(dev *cudart.Device, p cudart.DevPtr, n int) error {
	return errors.Join(dev.Memset(p, 0x5a, n), dev.Synchronize(ctx))
}

// put copies bytes to device memory by cudaMemcpy.
func put(dev *cudart.Device, p cudart.DevPtr, src []byte) error {
	return errors.Join(dev.CopyToDevice(p, pointer(src), len(src)), dev.Synchronize(ctx))
}

// uploaded returns the verification of an upload: it runs op on poisoned memory, and compares device memory with the
// bytes that want returns.
func uploaded(dev *cudart.Device, p cudart.DevPtr, n int, want func() []byte) func(op func() error) error {
	return func(op func() error) error {
		if err := poison(dev, p, n); err != nil {
			return err
		}
		if err := op(); err != nil {
			return err
		}
		return onDevice(dev, p, want())
	}
}

// onDevice returns an error if device memory has other bytes.
func onDevice(dev *cudart.Device, p cudart.DevPtr, want []byte) error {
	got := make([]byte, min(len(want), 64*mib))
	for at := 0; at < len(want); at += len(got) {
		part := want[at:min(at+len(got), len(want))]
		if err := dev.CopyToHost(pointer(got), p+cudart.DevPtr(at), len(part)); err != nil {
			return err
		}
		if err := equal(got[:len(part)], part); err != nil {
			return fmt.Errorf("%v, from byte %d of %d on: %w", dev, at, len(want), err)
		}
	}
	return nil
}

// newPattern returns a pattern that was never used before.
func (f *fixture) newPattern() pattern {
	f.patterns++
	return f.patterns
}

// putPattern puts n bytes of a new pattern into device memory, and clears the target: nothing on the way of a download
// has them already.
func (f *fixture) putPattern(dev *cudart.Device, p cudart.DevPtr, n int) (pattern, error) {
	want := f.newPattern()
	want.fill(f.target()[:n])
	err := put(dev, p, f.target()[:n])
	zero(f.target())
	return want, err
}

// downloaded returns the verification of a download from device memory into the bytes that got returns.
func (f *fixture) downloaded(dev *cudart.Device, p cudart.DevPtr, n int, got func() ([]byte, error)) func(op func() error) error {
	return func(op func() error) error {
		want, err := f.putPattern(dev, p, n)
		if err == nil {
			err = op()
		}
		if err != nil {
			return err
		}
		mem, err := got()
		if err != nil {
			return err
		}
		return want.check(mem)
	}
}

// Folders of files: in the page cache of a disk, and in memory.
const (
	cached = "cached"
	shm    = "shm"
)

// dir returns the directory of files.
func (f *fixture) dir() string {
	if dir := os.Getenv(dirEnv); dir != "" {
		return dir
	}
	if f.ownDir == "" {
		f.ownDir = must(os.MkdirTemp("", "pinned-bench-"))(f)
	}
	return f.ownDir
}

func (f *fixture) folder(which string) string {
	path := f.dir()
	if which == shm {
		path = shmFolder(path)
	}
	f.check(os.MkdirAll(path, 0o700))
	return path
}

// shmFolder is the folder in memory that belongs to one on disk.
func shmFolder(dir string) string { return filepath.Join("/dev/shm", filepath.Base(dir)) }

// sharedFile opens a file of a header and n bytes of the source from an offset on. The first process writes it. It is
// on disk by then, so that nothing is written while something is measured.
func (f *fixture) sharedFile(folder, name string, header []byte, from, n int) *os.File {
	path := filepath.Join(f.folder(folder), name)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		file = f.newFile(folder, n)
		_, err = file.Write(header)
		for at := 0; at < n && err == nil; at += 64 * mib {
			_, err = file.Write(f.source()[from:][at:min(at+64*mib, n)])
		}
		f.check(errors.Join(err, file.Sync(), os.Rename(file.Name(), path)))
	}
	f.later(file.Close)
	return file
}

// ownFile creates an empty file of this process that has no name any more, and room for n bytes.
func (f *fixture) ownFile(folder string, n int) *os.File {
	file := f.newFile(folder, n)
	f.later(file.Close)
	f.check(os.Remove(file.Name()))
	return file
}

func (f *fixture) newFile(folder string, n int) *os.File {
	path := f.folder(folder)
	var s unix.Statfs_t
	f.check(unix.Statfs(path, &s))
	if free := int(s.Bavail) * int(s.Bsize); free < n+64*mib {
		f.Skipf("%s has room for %d MiB, not %d", path, free/mib, n/mib)
	}
	return must(os.CreateTemp(path, "new"))(f)
}

// mapped maps n bytes that no page has been allocated for.
func mapped(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

func unmap(mem []byte) error { return unix.Munmap(mem) }

func bytesAt(p unsafe.Pointer, n int) []byte { return unsafe.Slice((*byte)(p), n) }

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// onEach calls do with each of n numbers at once.
func onEach(n int, do func(i int) error) error {
	all := make([]func() error, n)
	for i := range all {
		all[i] = func() error { return do(i) }
	}
	return together(all...)
}

// together runs functions at once.
func together(all ...func() error) error {
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, f := range all {
		group.Go(func() { errs[i] = f() })
	}
	group.Wait()
	return errors.Join(errs...)
}

// A pattern is bytes that are different at each place and in each other pattern.
type pattern uint64

// word returns the eight bytes at an offset.
func (p pattern) word(at int) uint64 { return (uint64(at) + 1 + uint64(p)<<40) * 0x9e3779b97f4a7c15 }

func (p pattern) fill(mem []byte) {
	inParallel(mem, func(part []byte, at int) {
		i := 0
		for ; i+8 <= len(part); i += 8 {
			binary.LittleEndian.PutUint64(part[i:], p.word(at+i))
		}
		copy(part[i:], binary.LittleEndian.AppendUint64(nil, p.word(at+i)))
	})
}

// check returns an error if mem has other bytes.
func (p pattern) check(mem []byte) error {
	var mismatch atomic.Pointer[error]
	inParallel(mem, func(part []byte, at int) {
		for i := 0; i < len(part); i += 8 {
			var want [8]byte
			binary.LittleEndian.PutUint64(want[:], p.word(at+i))
			got := part[i:min(i+8, len(part))]
			if !bytes.Equal(got, want[:len(got)]) {
				err := fmt.Errorf("bytes %x at offset %d, want %x", got, at+i, want[:len(got)])
				mismatch.Store(&err)
				return
			}
		}
	})
	if err := mismatch.Load(); err != nil {
		return *err
	}
	return nil
}

// equal returns an error if the bytes are not those wanted.
func equal(got, want []byte) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, want %d", len(got), len(want))
	}
	var mismatch atomic.Int64 // offset of a part, counted from 1
	inParallel(got, func(part []byte, at int) {
		if !bytes.Equal(part, want[at:at+len(part)]) {
			mismatch.Store(int64(at) + 1)
		}
	})
	if at := mismatch.Load(); at > 0 {
		for at--; got[at] == want[at]; {
			at++
		}
		return fmt.Errorf("byte %d is %#x, want %#x", at, got[at], want[at])
	}
	return nil
}

func zero(mem []byte) { inParallel(mem, func(part []byte, _ int) { clear(part) }) }

// inParallel calls do for parts of mem, each from its offset on, which is a multiple of 4096 bytes.
func inParallel(mem []byte, do func(part []byte, at int)) {
	workers := runtime.GOMAXPROCS(0)
	size := (len(mem)/workers/4096 + 1) * 4096
	var all sync.WaitGroup
	for at := 0; at < len(mem); at += size {
		all.Go(func() { do(mem[at:min(at+size, len(mem))], at) })
	}
	all.Wait()
}
