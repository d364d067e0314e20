package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/transfer"
)

// simulatedBytes is the size of what is copied on a simulated GPU.
const simulatedBytes = mib

// sourceBytes is the size of the source that rows copy from.
const sourceBytes = 2 * gib

// streamOptions are those of all streams here: they do not wait for the default stream.
var streamOptions cudart.StreamOptions

// A fixture has what rows share: the GPUs and large memory, made when a row asks for it and
// kept until the process ends.
type fixture struct {
	ctx context.Context
	sim bool
	// simGPUs is the number of simulated GPUs.
	simGPUs int
	dir     string // for files that both processes read
	// sampleTime replaces the rows' own times of samples if it is not 0.
	sampleTime time.Duration
	// verify asks rows about first calls, which are not prepared, to compare the bytes.
	verify bool

	rt      *cudart.Runtime
	library *cudasim.Sim                     // nil on a real GPU
	wrap    func(*cudasim.Sim) cudart.Source // of tests, to have it misbehave
	host    []byte                           // what rows copy from
	into    []byte                           // what rows copy to
	mems    map[[2]int]memory
	copiers map[int]*transfer.Copier

	patterns   pattern // the last that was used
	coldOffset int     // an offset in host and into: what lies behind it was used long ago
}

// memory is device memory, which closes with the fixture.
type memory struct {
	dev *cudart.Device
	p   cudart.DevPtr
}

func newFixture(ctx context.Context, simGPUs int, dir string) *fixture {
	return &fixture{ctx: ctx, sim: simGPUs > 0, simGPUs: simGPUs, dir: dir, mems: map[[2]int]memory{}, copiers: map[int]*transfer.Copier{}}
}

// open opens the runtime library, or simulates one.
func (f *fixture) open() error {
	var o cudart.Options
	if f.sim {
		library, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, f.simGPUs)})
		if err != nil {
			return err
		}
		f.library, o.Source = library, library
		if f.wrap != nil {
			o.Source = f.wrap(library)
		}
	}
	rt, err := cudart.Open(o)
	if err != nil {
		return err
	}
	if f.rt = rt; rt.DeviceCount() == 0 {
		return errors.New("no GPU")
	}
	return nil
}

// close releases all of it. Of a simulated GPU nothing may be left.
func (f *fixture) close() error {
	var all []error
	for _, c := range f.copiers {
		all = append(all, c.Close())
	}
	for _, m := range f.mems {
		all = append(all, m.dev.Free(m.p))
	}
	if f.rt != nil {
		all = append(all, f.rt.Close())
	}
	if f.library != nil {
		all = append(all, f.library.Check(), f.library.Close())
	}
	return errors.Join(all...)
}

// size returns how much is copied where n bytes are on a real GPU. What is beyond whole pages stays.
func (f *fixture) size(n int) int {
	if f.sim && n > simulatedBytes {
		return simulatedBytes + n%4096
	}
	return n
}

// device returns one of the GPUs.
func (f *fixture) device(i int) (*cudart.Device, error) {
	if i >= f.rt.DeviceCount() {
		return nil, leftOut(fmt.Sprintf("needs %d GPUs", i+1))
	}
	return f.rt.Device(i)
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
		inParallel(f.into, func(part []byte, _ int) { clear(part) })
	}
	return f.into
}

// memory returns device memory as large as the source, of which each device has several under different
// numbers.
func (f *fixture) memory(device, number int) (*cudart.Device, cudart.DevPtr, error) {
	dev, err := f.device(device)
	if err != nil {
		return nil, 0, err
	}
	key := [2]int{device, number}
	if _, ok := f.mems[key]; !ok {
		p, err := dev.Malloc(f.size(sourceBytes))
		if err != nil {
			return nil, 0, err
		}
		f.mems[key] = memory{dev, p}
	}
	return dev, f.mems[key].p, nil
}

// copier returns a copier of a device, which stays open, as programs keep theirs.
func (f *fixture) copier(device int) (*transfer.Copier, error) {
	if c := f.copiers[device]; c != nil {
		return c, nil
	}
	dev, err := f.device(device)
	if err != nil {
		return nil, err
	}
	c, err := transfer.NewCopier(f.ctx, dev, transfer.Options{})
	if err != nil {
		return nil, err
	}
	f.copiers[device] = c
	return c, nil
}

// memoryAndCopier returns the first device with memory and a copier.
func (f *fixture) memoryAndCopier() (*cudart.Device, cudart.DevPtr, *transfer.Copier, error) {
	dev, p, err := f.memory(0, 0)
	if err != nil {
		return nil, 0, nil, err
	}
	c, err := f.copier(0)
	return dev, p, c, err
}

// poison overwrites device memory, so that bytes that were there before are not taken for
// copied ones.
func (f *fixture) poison(dev *cudart.Device, p cudart.DevPtr, n int) error {
	return errors.Join(dev.Memset(p, 0x5a, n), dev.Synchronize(f.ctx))
}

// checkUpload runs op on poisoned memory, and shows that device memory then has the bytes that want
// returns.
func (f *fixture) checkUpload(dev *cudart.Device, p cudart.DevPtr, n int, op func() error, want func() []byte) error {
	if err := f.poison(dev, p, n); err != nil {
		return err
	}
	if err := op(); err != nil {
		return err
	}
	return f.onDevice(dev, p, want())
}

// onDevice returns an error if device memory has other bytes.
func (f *fixture) onDevice(dev *cudart.Device, p cudart.DevPtr, want []byte) error {
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

// putPattern puts n bytes of a pattern that was never used before into device memory, and clears the
// target: nothing on the way of a download has them already.
func (f *fixture) putPattern(dev *cudart.Device, p cudart.DevPtr, n int) (pattern, error) {
	f.patterns++
	f.patterns.fill(f.target()[:n])
	err := f.put(dev, p, f.target()[:n])
	inParallel(f.target(), func(part []byte, _ int) { clear(part) })
	return f.patterns, err
}

// checkDownload runs op, which downloads from device memory, and shows that it got the bytes that are
// there.
func (f *fixture) checkDownload(dev *cudart.Device, p cudart.DevPtr, n int, op func() error, got func() []byte) error {
	want, err := f.putPattern(dev, p, n)
	if err == nil {
		err = op()
	}
	if err != nil {
		return err
	}
	return want.check(got())
}

// put copies bytes to device memory by cudaMemcpy.
func (f *fixture) put(dev *cudart.Device, p cudart.DevPtr, src []byte) error {
	return errors.Join(dev.CopyToDevice(p, pointer(src), len(src)), dev.Synchronize(f.ctx))
}

// sharedFile opens a file of a header and n bytes of the source from an offset on, which the first process that asks for
// it writes. It is on disk by then, so that nothing is written while something is measured.
func (f *fixture) sharedFile(folder, name string, header []byte, from, n int) (*os.File, error) {
	path := filepath.Join(f.folder(folder), name)
	if file, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
		return file, nil
	}
	file, err := f.newFile(folder, n)
	if err != nil {
		return nil, err
	}
	_, err = file.Write(header)
	for at := 0; at < n && err == nil; at += 64 * mib {
		_, err = file.Write(f.source()[from:][at:min(at+64*mib, n)])
	}
	if err = errors.Join(err, file.Sync(), os.Rename(file.Name(), path)); err != nil {
		return nil, errors.Join(err, file.Close(), os.Remove(file.Name()))
	}
	return file, nil
}

// ownFile creates an empty file of this process that has no name any more, and room for n bytes.
func (f *fixture) ownFile(folder string, n int) (*os.File, error) {
	file, err := f.newFile(folder, n)
	if err != nil {
		return nil, err
	}
	return file, os.Remove(file.Name())
}

// newFile creates an empty file with room for n bytes.
func (f *fixture) newFile(folder string, n int) (*os.File, error) {
	path := f.folder(folder)
	switch free, err := freeBytes(path); {
	case err != nil:
		return nil, err
	case free < n+64*mib:
		return nil, leftOut(fmt.Sprintf("%s has room for %d MiB, not %d", filepath.Dir(path), free/mib, n/mib))
	}
	return os.CreateTemp(path, "new")
}

// Folders of files: in the page cache of a disk, and in memory.
const (
	cached = "cached"
	shm    = "shm"
)

// folder is below dir, or in /dev/shm under the same name.
func (f *fixture) folder(which string) string {
	path := f.dir
	if which == shm {
		path = shmFolder(f.dir)
	}
	_ = os.MkdirAll(path, 0o700) // else creating a file there fails
	return path
}

// shmFolder is the folder in memory that belongs to one on disk.
func shmFolder(dir string) string { return filepath.Join("/dev/shm", filepath.Base(dir)) }

// usedMemory returns the bytes in use of each GPU, which for real ones nvidia-smi reports. A simulated GPU uses some
// if there is a context.
func (f *fixture) usedMemory() ([]int, error) {
	used := make([]int, f.rt.DeviceCount())
	if f.library != nil {
		for _, i := range f.library.Contexts() {
			used[i] = gib
		}
		return used, nil
	}
	out, err := exec.CommandContext(f.ctx, "nvidia-smi", "--query-gpu=pci.bus_id,memory.used", "--format=csv,noheader,nounits").Output()
	if err != nil {
		return nil, fmt.Errorf("nvidia-smi: %w", err)
	}
	return used, usedOf(string(out), f.rt.Devices(), used)
}

// usedOf puts the bytes in use of each GPU into used. nvidia-smi has a line for each GPU of the host, in which the domain
// of the address has eight digits, where CUDA's has four.
func usedOf(output string, devices []*cudart.Device, used []int) error {
	for i, dev := range devices {
		found := false
		for line := range strings.Lines(output) {
			address, mebibytes, _ := strings.Cut(strings.TrimSpace(line), ", ")
			if !strings.HasSuffix(strings.ToLower(address), strings.ToLower(dev.PCIBusID())) {
				continue
			}
			n, err := strconv.Atoi(mebibytes)
			if err != nil {
				return fmt.Errorf("nvidia-smi: %w", err)
			}
			used[i], found = n*mib, true
		}
		if !found {
			return fmt.Errorf("nvidia-smi lists no GPU at %s", dev.PCIBusID())
		}
	}
	return nil
}
