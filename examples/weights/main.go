// Weights loads models onto GPUs at the speed of the link, and prints how long that took, with
// the allocation of device memory. A model is a safetensors or GGUF file, an index of several, or a directory: a path,
// or a URL of a server that supports ranges.
// Its tensors are split evenly over the devices.
//
//	go run ./examples/weights [-devices 0,1] [-verify] [-checksums] [-drop-cache] [-direct] [-sim] MODEL...
//	go run ./examples/weights -save FILE [-snapshot] [-devices 0,1] [-direct] [-sim] MODEL
//	go run ./examples/weights -make SIZE FILE
//	go run ./examples/weights -serve
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
	"github.com/gopinned/pinned/weights/httpfs"
)

type options struct {
	devices  string
	verify   bool
	load     weights.LoadOptions
	sim      bool
	save     string // the file to save the model to, "" for none
	snapshot bool   // save from a copy in pinned memory
	size     string // of the file to write, "" to load
	serve    bool   // save what another process has in shared memory
}

const usage = `usage: weights [-devices 0,1] [-verify] [-checksums] [-drop-cache] [-direct] [-sim] MODEL...
       weights -save FILE [-snapshot] [-devices 0,1] [-direct] [-sim] MODEL
       weights -make SIZE FILE
       weights -serve

MODEL is a safetensors or GGUF file, the index of several files (.safetensors.index.json),
or a directory with a model. For a part, such as x-00001-of-00003.gguf, all parts are loaded.
It may be a URL of HTTP or HTTPS: the environment variable WEIGHTS_TOKEN is sent as a bearer token.

`

// newFlags returns the flags, whose help names the arguments, too.
func newFlags(o *options) *flag.FlagSet {
	f := flag.NewFlagSet("weights", flag.ExitOnError)
	f.Usage = func() {
		fmt.Fprint(f.Output(), usage)
		f.PrintDefaults()
	}
	f.StringVar(&o.devices, "devices", "", "CUDA's `NUMBERS` of the devices to load onto, such as 0,1 (default all)")
	f.BoolVar(&o.verify, "verify", false, "read the tensors back and compare them with the files, and the files with their checksums if -save wrote them")
	f.BoolVar(&o.load.DropCache, "drop-cache", false, "remove what was read from the page cache")
	f.BoolVar(&o.load.Checksums, "checksums", false, "compare the bytes with the checksums that -save wrote, or a server has, while they are loaded")
	f.BoolVar(&o.load.DirectIO, "direct", false, "read past the page cache")
	f.StringVar(&o.save, "save", "", "save the model from the devices to a `FILE` whose name ends in .safetensors")
	f.BoolVar(&o.snapshot, "snapshot", false, "save from a copy in pinned memory, while the devices go on")
	f.BoolVar(&o.sim, "sim", false, "use simulated GPUs")
	f.StringVar(&o.size, "make", "", "write a safetensors file of this `SIZE`, such as 64MiB or 8GB, and load nothing")
	f.BoolVar(&o.serve, "serve", false, "save tensors that another process puts into shared memory, as the lines of standard input say: see examples/pytorch/save.py")
	return f
}

func main() {
	var o options
	f := newFlags(&o)
	_ = f.Parse(os.Args[1:]) // which exits
	device.Main(func(ctx context.Context) error {
		switch {
		case o.serve && f.NArg() == 0:
			return serve(ctx, os.Stdin, os.Stdout)
		case o.size != "" && f.NArg() == 1:
			return write(o.size, f.Arg(0))
		case o.size == "" && !o.serve && (f.NArg() == 1 || f.NArg() > 0 && o.save == ""):
			return run(ctx, f.Args(), o, os.Stdout)
		}
		f.Usage()
		os.Exit(2)
		return nil
	})
}

// run loads each model, and keeps all of them until the end.
func run(ctx context.Context, paths []string, o options, out io.Writer) (err error) {
	rt, devices, err := open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	onto := "device"
	if o.sim {
		onto = "simulated device"
	}

	// What stays open keeps the devices' pinned memory from one model to the next.
	copiers := make([]*transfer.Copier, len(devices))
	for i, dev := range devices {
		if copiers[i], err = transfer.NewCopier(ctx, dev, transfer.Options{}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, copiers[i].Close()) }()
	}
	total, took := 0, time.Duration(0)
	for _, path := range paths {
		m, from, err := openModel(ctx, path, o.load.Checksums)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.Close(), from.Close()) }()
		plan, n, err := planEvenly(m, len(devices))
		if err != nil {
			return err
		}
		start := time.Now()
		how := o.load
		how.Checksums = how.Checksums && (from == nil || hasChecksums(m))
		loaded, err := plan.LoadNew(ctx, devices, how)
		if err != nil {
			return err
		}
		defer loaded.Close()
		d := time.Since(start)
		total, took = total+n, took+d
		fmt.Fprintf(out, "%s: %d bytes onto %s in %v, %s\n", path, n, count(len(plan.Devices), onto), d.Round(time.Microsecond), rate(n, d))
		if from != nil && o.load.Checksums {
			if err := compare(ctx, m, from, out); err != nil {
				return err
			}
		}
		if o.verify {
			tensors, err := verify(ctx, loaded, copiers)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%s: the same bytes: SHA-256 of %s\n", path, count(tensors, "tensor"))
			if err := checksums(ctx, path, m, n, out); err != nil && !errors.Is(err, weights.ErrNoChecksums) {
				return err
			}
		}
		if o.save != "" {
			if err := save(ctx, loaded, n, o, out); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(out, "total: %d bytes in %v, %s\n", total, took.Round(time.Microsecond), rate(total, took))
	return nil
}

func isURL(path string) bool {
	return strings.HasPrefix(path, "http://") || strings.HasPrefix(path, "https://")
}

// openModel opens a model on disk, or behind HTTP, whose file system it returns.
func openModel(ctx context.Context, path string, checksums bool) (m *weights.Model, from *httpfs.FS, err error) {
	if !isURL(path) {
		m, err = weights.OpenModel(path)
		return m, nil, err
	}
	o := httpfs.Options{Checksums: checksums}
	if token := os.Getenv("WEIGHTS_TOKEN"); token != "" {
		o.Header = http.Header{"Authorization": {"Bearer " + token}}
	}
	from, name, err := httpfs.New(ctx, path, o)
	if err != nil {
		return nil, nil, err
	}
	if m, err = weights.OpenModelFS(from, name); err != nil {
		return nil, nil, errors.Join(err, from.Close())
	}
	return m, from, nil
}

// save saves a model of n bytes from the memory of its devices, and compares the file with its checksums.
func save(ctx context.Context, loaded *weights.Loaded, n int, o options, out io.Writer) (err error) {
	var tensors []weights.SavedTensor
	for p := range loaded.All() {
		at, err := p.Ptr()
		if err != nil {
			return err
		}
		tensors = append(tensors, weights.SavedTensor{
			Name: p.Tensor.Name, DType: p.Tensor.DType, Shape: p.Tensor.Shape,
			Memory: weights.Memory{Device: p.Memory.Device(), Ptr: at, Bytes: p.Size},
		})
	}
	options := weights.SaveOptions{
		Metadata: map[string]string{"format": "pt"}, DirectIO: o.load.DirectIO, DropCache: o.load.DropCache,
	}
	if o.snapshot && len(tensors) > 0 {
		if options.Snapshot, err = pool.New(tensors[0].Memory.Device, pool.Options{}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, options.Snapshot.Close()) }()
	}
	start := time.Now()
	saving, err := weights.Save(ctx, o.save, tensors, options)
	if err != nil {
		return err
	}
	copied := time.Since(start)
	if err := saving.Wait(ctx); err != nil {
		return err
	}
	d := time.Since(start)
	fmt.Fprintf(out, "%s: %d bytes on storage in %v, %s; the tensors could change after %v\n", o.save, n, d.Round(time.Microsecond), rate(n, d), copied.Round(time.Microsecond))
	m, err := weights.OpenModel(o.save)
	if err != nil {
		return err
	}
	return errors.Join(checksums(ctx, o.save, m, n, out), m.Close())
}

// hasChecksums reports whether the files of a model have the checksums of -save.
func hasChecksums(m *weights.Model) bool {
	return !slices.ContainsFunc(m.Files(), func(f *weights.File) bool {
		_, ok := f.Metadata("pinned.crc32c")
		return !ok
	})
}

// compare compares the files of a model with the checksums that the server has. What the load has read is not read again.
func compare(ctx context.Context, m *weights.Model, from *httpfs.FS, out io.Writer) error {
	for _, f := range m.Files() {
		switch err := from.Verify(ctx, f.Name()); {
		case errors.Is(err, errors.ErrUnsupported):
			fmt.Fprintf(out, "%s: not compared: the server has no checksum\n", f.Name())
		case err != nil:
			return err
		default:
			fmt.Fprintf(out, "%s: the checksum that the server has\n", f.Name())
		}
	}
	return nil
}

// checksums compares a model of n bytes with the checksums in its files.
func checksums(ctx context.Context, path string, m *weights.Model, n int, out io.Writer) error {
	start := time.Now()
	if err := m.Verify(ctx); err != nil {
		return err
	}
	d := time.Since(start)
	fmt.Fprintf(out, "%s: the checksums that were saved, in %v, %s\n", path, d.Round(time.Microsecond), rate(n, d))
	return nil
}

// open returns the devices, of one Runtime.
func open(ctx context.Context, o options) (rt *cudart.Runtime, devices []*cudart.Device, err error) {
	var numbers []int
	for _, s := range strings.FieldsFunc(o.devices, func(r rune) bool { return r == ',' }) {
		i, err := strconv.Atoi(s)
		if err != nil {
			return nil, nil, fmt.Errorf("-devices %s: %w", o.devices, err)
		}
		numbers = append(numbers, i)
	}
	cfg := cudasim.Config{Devices: make([]cudasim.DeviceConfig, max(len(numbers), 1))}
	if rt, err = device.Open(ctx, o.sim, cfg); err != nil {
		return nil, nil, err
	}
	if len(numbers) == 0 {
		return rt, rt.Devices(), nil
	}
	for _, i := range numbers {
		dev, err := rt.Device(i)
		if err != nil {
			return nil, nil, errors.Join(err, rt.Close())
		}
		devices = append(devices, dev)
	}
	return rt, devices, nil
}

// count returns a number of things, such as "1 device".
func count(n int, of string) string {
	if n != 1 {
		of += "s"
	}
	return fmt.Sprintf("%d %s", n, of)
}

// rate returns the speed of n bytes in a time.
func rate(n int, took time.Duration) string {
	perSecond := float64(n) / took.Seconds()
	if perSecond < 1e9 {
		return fmt.Sprintf("%.3g MB/s", perSecond/1e6)
	}
	return fmt.Sprintf("%.1f GB/s", perSecond/1e9)
}

// planEvenly gives each of so many devices the same share of a model's bytes, as near
// as its tensors allow, and returns how many bytes there are.
func planEvenly(m *weights.Model, devices int) (plan *weights.Plan, n int, err error) {
	for t := range m.Tensors() {
		n += t.Size
	}
	before := 0
	plan, err = weights.NewPlan(m.Tensors(), func(t *weights.Tensor) int {
		middle := before + t.Size/2
		before += t.Size
		return int(float64(middle) / float64(n+1) * float64(devices))
	}, weights.PlanOptions{})
	return plan, n, err
}

// verify compares the checksums of all tensors, in their files and on the devices, and
// returns how many it compared.
func verify(ctx context.Context, loaded *weights.Loaded, copiers []*transfer.Copier) (tensors int, err error) {
	parts := slices.Collect(loaded.All())
	errs := make([]error, len(parts))
	var running sync.WaitGroup
	cores := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, p := range parts {
		cores <- struct{}{}
		running.Go(func() {
			defer func() { <-cores }()
			at := slices.IndexFunc(copiers, func(c *transfer.Copier) bool { return c.Device() == p.Memory.Device() })
			errs[i] = same(ctx, p, copiers[at])
		})
	}
	running.Wait()
	return len(parts), errors.Join(errs...)
}

// same returns an error unless a tensor's bytes on a device are those of its file.
func same(ctx context.Context, p weights.Placed, c *transfer.Copier) error {
	t := p.Tensor
	at, err := p.Ptr()
	if err != nil {
		return err
	}
	want, got := sha256.New(), sha256.New()
	if _, err := io.Copy(want, io.NewSectionReader(t.File.Reader(), t.Offset, int64(t.Size))); err != nil {
		return err
	}
	if _, err := c.DownloadWriter(ctx, got, at, t.Size); err != nil {
		return err
	}
	if !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		return fmt.Errorf("%s: tensor %q: the bytes on %v are not those of the file", t.File.Name(), t.Name, c.Device())
	}
	return nil
}
