// The experiment files times one file on its way to a device: mapped, read, staged, by O_DIRECT, from its
// registered page cache, and to all devices; resident in the page cache or dropped from it before each sample.
//
//   - Clock: the host's, until the bytes are on the device. For copies of memory that is pinned before the
//     sample, two events of the device.
//   - A rate is the file's bytes by that time, however many devices get them. The CPU time is that of the timed part.

package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/transfer"
)

// Ways from a file to a device, as values of the label method.
const (
	fileMapped     = "mmap"                  // mmap, and cudaMemcpy of it
	fileRead       = "read"                  // pread into pinned memory, and a copy of that
	fileStaged     = "staged"                // transfer.Copier.UploadFrom
	fileDirect     = "direct"                // the same, past the page cache (O_DIRECT)
	fileRegistered = "page_cache_registered" // hostmem.MapFile, and a copy
	fileFanout     = "fanout"                // transfer.Fanout.UploadFrom, to all devices
	filePinned     = "pinned"                // no file: pinned memory, which shows the link
)

// Where a file is, as values of the label cache.
const (
	cacheLabel = "cache"
	inCache    = "resident" // in the page cache
	outOfCache = "cold"
)

const (
	fileRate = "file_to_device"
)

var files = measure.Experiment{
	Name:     "files",
	Group:    "Applications:",
	Question: "What is the fastest way from a file to the GPU?",
	Long: `Measures files, in the page cache and on the disk, brought to the GPU through
read and staging, mmap, O_DIRECT and a registered mapping, beside the rate of
the link.`,
	Related: "pincheck explain weights_mapped",
	Views: []result.View{
		{Title: "Cached file to GPU", Series: fileRate, Where: labelled(cacheLabel, inCache), X: result.Method, Lines: []string{result.Size, result.Device}},
		{Title: "Uncached file to GPU", Series: fileRate, Where: labelled(cacheLabel, outOfCache), X: result.Method, Lines: []string{result.Size, result.Device}},
	},
	Plan:    onDevices(planFiles),
	Explain: explainFiles,
}

const (
	fileSize          = 1 << 30
	quickFileSize     = 128 << 20
	simulatedFileSize = 8 << 20

	// writeRate is that of a disk that is not fast, in GB/s, for estimates.
	writeRate = 0.5
	// stillCached is the share of a file above which it was not dropped from the page
	// cache.
	stillCached = 0.05
)

func planFiles(env measure.Env) ([]measure.Group, error) {
	sizes := sizesOf(env, []int{simulatedFileSize}, []int{quickFileSize}, []int{fileSize})
	dir := os.TempDir()
	free, inMemory, err := onDisk(dir)
	if err != nil {
		return nil, err
	}
	var groups []measure.Group
	for _, n := range sizes {
		if n > free {
			return nil, fmt.Errorf("it takes a file of %s, and %s has room for %s: name smaller sizes, or another directory by TMPDIR", units.Bytes(n), dir, units.Bytes(free))
		}
		f := &fileFixture{devices: env.Devices, n: n, dir: dir, inMemory: inMemory}
		groups = append(groups, f.group())
	}
	if env.Devices[0].Runtime().Library().Simulated {
		noted(&groups[0], "copies to the simulated GPU take the time of this host's memory: but for those from pinned memory, which the simulated link times, these rates are none of a link")
	}
	noted(&groups[0], onFirst(env, "but for transfer.Fanout, which brings a file to all")...)
	return groups, nil
}

// A fileFixture has what the ways of one file need.
type fileFixture struct {
	resources // of the first device, the target of single copies
	devices   []*cudart.Device
	n         int // bytes
	dir       string
	inMemory  bool

	file   *os.File
	path   string
	at     []cudart.DevPtr // on each device
	work   *cudart.Stream
	timer  *measure.Span
	buffer *hostmem.Buffer
	copier *transfer.Copier
	fanout *transfer.Fanout
	direct bool

	abandonable
}

func (f *fileFixture) group() measure.Group {
	g := measure.Group{
		Name: "file of " + units.Bytes(f.n), Open: f.open, Close: f.close,
		Footprint: measure.Footprint{Pinned: 2*f.n + ringBytes*len(f.devices), Device: f.n, Disk: f.n},
		Setup:     secondsAt(f.n, writeRate) + secondsAt(f.n, slowPin),
	}
	if f.inMemory {
		g.Footprint.Pageable, g.Footprint.Disk = f.n, 0
	}
	add := func(device, cache, method string, bring fileMethod) {
		var cpu time.Duration
		c := measure.Case{
			CPU: func() time.Duration { return cpu },
			Series: result.Series{Name: fileRate, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: f.n,
				Labels: labelled(result.Device, device, result.Method, method, cacheLabel, cache, result.Size, strconv.Itoa(f.n))},
			Sample: func(ctx context.Context) (float64, error) { return f.sample(ctx, cache, method, device, bring, &cpu) },
			Verify: func(ctx context.Context) error { return f.verify(ctx, device) },
		}
		if cache == inCache {
			c.WarmUp = 1
		} else {
			c.Samples, c.Budget = 3, 3*secondsAt(f.n, writeRate)
		}
		g.Cases = append(g.Cases, c)
	}
	one := strconv.Itoa(f.devices[0].Ordinal())
	add(one, inCache, filePinned, f.fromPinned)
	for _, cache := range []string{inCache, outOfCache} {
		add(one, cache, fileMapped, clocked(f.fromMapping))
		add(one, cache, fileRead, clocked(f.byReading))
		add(one, cache, fileStaged, clocked(f.byStaging))
		add(one, cache, fileRegistered, clocked(f.fromPageCache))
		if cache == outOfCache { // it does not use the page cache
			add(one, cache, fileDirect, clocked(f.directIO))
		}
		if len(f.devices) > 1 {
			add(allDevices, cache, fileFanout, clocked(f.toAll))
		}
	}
	return g
}

// ringBytes is the largest number of bytes that a copier pins.
const ringBytes = 64 << 20

// open writes the file, and allocates the rest.
func (f *fileFixture) open(ctx context.Context) error {
	var err error
	f.at = nil
	if f.file, f.path, err = unlinkedFile(f.dir); err != nil {
		return err
	}
	f.undo.PushClose(f.file.Close)
	if err := f.write(ctx); err != nil {
		return fmt.Errorf("write a file of %s below %s: %w", units.Bytes(f.n), f.dir, err)
	}
	f.direct = opensDirect(f.path)
	for _, d := range f.devices {
		p, err := d.Malloc(f.n)
		if err != nil {
			return err
		}
		f.at = append(f.at, p)
		f.undo.PushClose(func() error { return d.Free(p) })
	}
	f.dev = f.devices[0]
	staging := func() (*transfer.Copier, error) { return f.resources.copier(ctx) }
	err = inTurn(made(f.stream, &f.work), made(f.span, &f.timer), f.pinnedAs(ctx, f.n, &f.buffer), func() error { return f.fill(ctx) }, made(staging, &f.copier))
	if err != nil {
		return err
	}
	if len(f.devices) > 1 {
		if f.fanout, err = transfer.NewFanout(ctx, f.devices, transfer.Options{}); err != nil {
			return err
		}
		f.undo.Push(f.fanout.CloseContext)
	}
	return nil
}

// write writes bytes that do not repeat, and waits until the disk has them: what it does
// not have cannot be dropped from the page cache.
func (f *fileFixture) write(ctx context.Context) error {
	random := rand.NewChaCha8([32]byte{1})
	bytes := make([]byte, min(f.n, piece))
	return pieces(ctx, f.n, func(off, n int) error {
		_, _ = random.Read(bytes[:n]) // never fails
		if _, err := f.file.WriteAt(bytes[:n], int64(off)); err != nil {
			return err
		}
		return f.file.Sync()
	})
}

// fill reads the file into the pinned memory.
func (f *fileFixture) fill(ctx context.Context) error {
	return pieces(ctx, f.n, func(off, n int) error {
		_, err := f.file.ReadAt(f.buffer.Bytes()[off:off+n], int64(off))
		return err
	})
}

func (f *fileFixture) close() error { return f.release(f.resources.close) }

// A fileMethod copies the file to the device. It returns the duration by the clock of the device, or 0:
// then the host's clock counts.
type fileMethod func(context.Context) (time.Duration, error)

// clocked returns a fileMethod that is timed by the host's clock.
func clocked(do func(context.Context) error) fileMethod {
	return func(ctx context.Context) (time.Duration, error) { return 0, do(ctx) }
}

// fileTime has the durations of bringing a file to a device.
type fileTime struct{ time, cpu time.Duration }

// sample brings the file to the device once, and returns GB/s. It adds the CPU time of that to cpu.
func (f *fileFixture) sample(ctx context.Context, cache, method, device string, bring fileMethod, cpu *time.Duration) (float64, error) {
	switch {
	case cache == outOfCache && f.inMemory:
		return 0, fmt.Errorf("the files of %s are in memory (name a directory on a disk by TMPDIR): %w", f.dir, errors.ErrUnsupported)
	case method == fileDirect && !f.direct:
		return 0, fmt.Errorf("the file system of %s has no O_DIRECT: %w", f.dir, errors.ErrUnsupported)
	}
	took, err := once(ctx, &f.abandonable, func() (fileTime, error) { return f.time(ctx, cache, device, bring) })
	*cpu += took.cpu
	return float64(f.n) / float64(took.time.Nanoseconds()), err
}

// time is one sample. What the devices had before is overwritten, so that bytes which do
// not arrive show.
func (f *fileFixture) time(ctx context.Context, cache, device string, bring fileMethod) (took fileTime, err error) {
	for i, d := range f.devices {
		if device == allDevices || i == 0 {
			if err := errors.Join(d.Memset(f.at[i], 0x5a, f.n), d.Synchronize(ctx)); err != nil {
				return took, err
			}
		}
	}
	if cache == outOfCache {
		cached, err := dropCache(f.file, f.n)
		if err != nil {
			return took, err
		}
		if cached > stillCached {
			return took, fmt.Errorf("%s of the file stay in the page cache: %w", units.Share(cached), errors.ErrUnsupported)
		}
	}
	var watch measure.Stopwatch
	watch.Start()
	onDevice, err := bring(ctx)
	took.time = max(cmp.Or(onDevice, watch.Stop()), 1)
	took.cpu = watch.CPU()
	return took, err
}

// fromPinned copies what is in pinned memory already.
func (f *fileFixture) fromPinned(ctx context.Context) (time.Duration, error) {
	return f.timer.Time(ctx, f.work, func() error { return f.buffer.CopyToDevice(f.work, f.at[0], 0, f.n) })
}

// fromMapping maps the file and has CUDA copy it, as loaders of weights do.
func (f *fileFixture) fromMapping(ctx context.Context) error {
	b, unmap, err := mapForReading(f.file, f.n)
	if err != nil {
		return err
	}
	err = pieces(ctx, f.n, func(off, n int) error {
		return f.devices[0].CopyToDevice(f.at[0]+cudart.DevPtr(off), unsafe.Pointer(&b[off]), n)
	})
	// cudaMemcpy of pageable memory returns when it was staged, which may be before it
	// arrived.
	return errors.Join(err, f.devices[0].Synchronize(ctx), unmap())
}

// byReading reads all of the file into pinned memory, with one thread, and copies it.
func (f *fileFixture) byReading(ctx context.Context) error {
	if err := f.fill(ctx); err != nil {
		return err
	}
	_, err := f.fromPinned(ctx)
	return err
}

func (f *fileFixture) byStaging(ctx context.Context) error {
	_, err := f.copier.UploadFrom(ctx, f.at[0], f.file, 0, f.n)
	return err
}

func (f *fileFixture) directIO(ctx context.Context) error {
	_, err := f.copier.With(transfer.Call{DirectIO: true}).UploadFrom(ctx, f.at[0], f.file, 0, f.n)
	return err
}

// fromPageCache registers the page cache, copies it, and unregisters it.
func (f *fileFixture) fromPageCache(ctx context.Context) error {
	m, err := hostmem.MapFile(ctx, f.devices[0], f.path, hostmem.FileOptions{Label: "bench"})
	if err != nil {
		return err
	}
	if err = m.CopyToDevice(f.work, f.at[0], 0, f.n); err == nil {
		err = f.work.Synchronize(ctx)
	}
	return errors.Join(err, m.Close())
}

func (f *fileFixture) toAll(ctx context.Context) error {
	_, err := f.fanout.UploadFrom(ctx, f.at, f.file, 0, f.n)
	return err
}

// verify compares what is on the devices with the file.
func (f *fileFixture) verify(ctx context.Context, device string) error {
	arrived, want := make([]byte, min(f.n, piece)), make([]byte, min(f.n, piece))
	for i, d := range f.devices {
		if device != allDevices && i > 0 {
			break
		}
		err := pieces(ctx, f.n, func(off, n int) error {
			if _, err := f.file.ReadAt(want[:n], int64(off)); err != nil {
				return err
			}
			if err := d.CopyToHost(unsafe.Pointer(&arrived[0]), f.at[i]+cudart.DevPtr(off), n); err != nil {
				return err
			}
			if !bytes.Equal(arrived[:n], want[:n]) {
				return fmt.Errorf("%w: %v has other bytes than the file, between %d and %d", measure.ErrMismatch, d, off, off+n)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// fileWays are the methods with their names in a table.
var fileWays = []struct{ method, name string }{
	{fileStaged, "staged"}, {fileRead, "read"}, {fileMapped, "mmap"}, {fileDirect, "O_DIRECT"}, {fileRegistered, "registered"}, {filePinned, "link"},
}

func explainFiles(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	none := func(*answers) *result.Series { return nil }
	return explained(b, none, func(a *answers) {
		at := a.largest(fileRate, cacheLabel, inCache)
		if at == nil {
			at = a.largest(fileRate)
		}
		of := func(cache, method string) *result.Series {
			return a.other(at, fileRate, result.Device, a.device, cacheLabel, cache, result.Method, method)
		}
		a.faster("A cached file uploads %[2]s as fast %[1]s as %[3]s.", named{"staged", of(inCache, fileStaged)}, named{"through mmap", of(inCache, fileMapped)})
		if at == nil {
			return
		}
		t := result.Table{Title: "at " + units.Bytes(at.Labels.Size())}
		for _, w := range fileWays {
			t.Columns = append(t.Columns, w.name)
		}
		var fastest [2]float64
		for i, c := range []struct{ cache, name string }{{inCache, "cached"}, {outOfCache, "uncached"}} {
			var cells []*result.Quantity
			for _, w := range fileWays {
				s := of(c.cache, w.method)
				if cells = append(cells, s.Quantity()); s != nil && w.method != filePinned {
					fastest[i] = max(fastest[i], s.Median)
				}
			}
			note := ""
			if i == 1 && fastest[1] < fastest[0]/2 {
				note = "limited by the disk"
			}
			t.Add(c.name, note, cells...)
		}
		a.table(t)
		if link := of(inCache, filePinned); link != nil && fastest[0] > 0 {
			a.say("From the page cache a file reaches %s of the rate of pinned memory.", units.Share(fastest[0]/link.Median))
		}
		for _, c := range []struct{ cache, name string }{{inCache, "cached"}, {outOfCache, "uncached"}} {
			if s := a.Find(fileRate, labelled(result.Device, allDevices, cacheLabel, c.cache, result.Method, fileFanout, result.Size, at.Labels.Get(result.Size))...); s != nil {
				a.say("All GPUs together receive one %s file at %s, read once (transfer.Fanout).", c.name, units.Rate(s.Median))
			}
		}
	}, nothingMore)
}
