//go:build linux

package benchmarks

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// BenchmarkGPUs is two, four and eight GPUs at once. The rates of copies, each GPU with memory of its own, are sums;
// those of one source onto all are of the source. contexts is the number of GPUs on which a process has a context
// that worked on another one alone; it should be 0.
func BenchmarkGPUs(b *testing.B) { bench(b, "GPUs") }

var _ = func() bool {
	for _, n := range []int{2, 4, 8} {
		for _, way := range []string{"upload", "download", "both-ways"} {
			add("GPUs",
				row{name: fmt.Sprintf("%d/%s/1GiB", n, way), gpus: n, cpu: true, quick: way == "upload", prepare: ownCopies(n, way, false)},
				row{name: fmt.Sprintf("%d/pinned/%s/1GiB", n, way), gpus: n, prepare: ownCopies(n, way, true)})
		}
		add("GPUs",
			row{name: fmt.Sprintf("%d/16-goroutines/1MiB", n), gpus: n, cpu: true, prepare: parallelUploads(n)},
			row{name: fmt.Sprintf("%d/fanout/2GiB", n), gpus: n, cpu: true, quick: true, prepare: fanout(n, false)},
			row{name: fmt.Sprintf("%d/fanout-file/2GiB", n), gpus: n, cpu: true, prepare: fanout(n, true)})
	}
	return add("GPUs", childRow("GPUs", row{name: "contexts-on-others"}, contextsOnOthers))
}()

// ownCopies copies 1 GiB to each of the GPUs, from each, or both.
func ownCopies(gpus int, way string, pinned bool) func(*fixture) task {
	return func(f *fixture) task {
		n, up, down := f.size(gib), way != "download", way != "upload"
		type own struct {
			dev      *cudart.Device
			to, from cudart.DevPtr
			src, dst []byte
			want     pattern // of dst
		}
		memory := func(dev *cudart.Device) []byte {
			if pinned {
				return f.pinned(dev, n)
			}
			mem := must(mapped(n))(f)
			f.later(func() error { return unmap(mem) })
			zero(mem) // which makes it resident
			return mem
		}
		all := make([]*own, gpus)
		var calls []func() error
		for i := range all {
			o, c := &own{}, f.copier(i)
			all[i] = o
			o.dev, o.to = f.memory(i, 0)
			if up {
				o.src = memory(o.dev)
				f.newPattern().fill(o.src)
				calls = append(calls, func() error { return c.Upload(ctx, o.to, o.src) })
			}
			if down {
				_, o.from = f.memory(i, 1)
				o.dst = memory(o.dev)
				calls = append(calls, func() error { return c.Download(ctx, o.dst, o.from) })
			}
		}
		op := func() error { return together(calls...) }
		return task{bytes: len(calls) * n, op: op, verify: func(op func() error) error {
			for _, o := range all {
				if up {
					if err := poison(o.dev, o.to, n); err != nil {
						return err
					}
				}
				if down {
					o.want = f.newPattern()
					o.want.fill(o.dst)
					if err := put(o.dev, o.from, o.dst); err != nil {
						return err
					}
					zero(o.dst)
				}
			}
			if err := op(); err != nil {
				return err
			}
			return onEach(gpus, func(i int) error {
				o := all[i]
				if up {
					if err := onDevice(o.dev, o.to, o.src); err != nil {
						return err
					}
				}
				return o.want.check(o.dst)
			})
		}}
	}
}

// fanout is one source onto several GPUs.
func fanout(gpus int, fromFile bool) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(2 * gib)
		src, devs, dsts := f.source()[:n], make([]*cudart.Device, gpus), make([]cudart.DevPtr, gpus)
		for i := range devs {
			devs[i], dsts[i] = f.memory(i, 0)
		}
		fan := must(transfer.NewFanout(ctx, devs, transfer.Options{}))(f)
		f.later(fan.Close)
		op := func() error { return fan.Upload(ctx, dsts, src) }
		if fromFile {
			file := f.sharedFile(cached, "source", nil, 0, n)
			op = func() error { _, err := fan.UploadFrom(ctx, dsts, file, 0, n); return err }
		}
		return task{bytes: n, op: op, verify: func(op func() error) error {
			err := onEach(gpus, func(i int) error { return poison(devs[i], dsts[i], n) })
			if err == nil {
				err = op()
			}
			if err != nil {
				return err
			}
			return onEach(gpus, func(i int) error { return onDevice(devs[i], dsts[i], src) })
		}}
	}
}

// contextsOnOthers counts the other GPUs on which this process has a context after it copied to the last one and back,
// from many threads, and from memory of all kinds. CUDA does not report contexts, since a call for the free memory makes one.
func contextsOnOthers(f *fixture, b *testing.B) {
	f.open() // which makes no context
	last := f.rt.DeviceCount() - 1
	if last == 0 {
		f.Skip("needs 2 GPUs")
	}
	before := f.usedMemory()
	dev, p := f.memory(last, 0)
	c, n := f.copier(last), f.size(64*mib)
	buf, src, dst := f.pinned(dev, n), make([]byte, n), make([]byte, n)
	pattern(1).fill(src)
	f.check(onEach(16, func(int) error { return c.Upload(ctx, p, src) }))
	for _, to := range [][]byte{dst, buf} {
		f.check(c.Download(ctx, to, p))
		f.check(equal(to, src))
	}
	const least = 64 * mib // of a context, which takes hundreds
	others := 0
	for i, used := range f.usedMemory() {
		used -= before[i]
		switch {
		case i == last && used < least:
			f.Fatalf("%d MiB more are in use on the GPU that worked: this process is not seen", used/mib)
		case i != last && used >= least:
			others++
		}
	}
	b.ReportMetric(float64(others), "contexts")
}

// usedMemory returns the bytes in use of each GPU, which for real ones nvidia-smi reports. A simulated GPU uses some
// if there is a context.
func (f *fixture) usedMemory() []int {
	used := make([]int, f.rt.DeviceCount())
	if f.library != nil {
		for _, i := range f.library.Contexts() {
			used[i] = gib
		}
		return used
	}
	out := must(exec.Command("nvidia-smi", "--query-gpu=pci.bus_id,memory.used", "--format=csv,noheader,nounits").Output())(f)
	f.check(usedOf(string(out), f.rt.Devices(), used))
	return used
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
