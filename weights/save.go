package weights

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer"
)

// A SavedTensor is a tensor for [Save], with its bytes in row-major order.
type SavedTensor struct {
	Name  string
	DType DType // one of safetensors'
	Shape []int
	// Memory has the bytes, and Host has them instead if Memory.Device is nil. Each may have more bytes
	// than the tensor.
	Memory Memory
	Host   []byte
}

// SaveOptions shape a save. The zero value writes one file.
type SaveOptions struct {
	// Metadata is written to the header of each file. Transformers requires "format": "pt".
	Metadata map[string]string
	// ShardBytes is the number of bytes of tensors in a file, if all of them are more; a larger tensor has a file
	// of its own. 0 writes one file.
	ShardBytes int
	// Streams are streams whose queued work writes the tensors: the save begins when that work is done.
	Streams []*cudart.Stream
	// Progress is called from time to time with the number of bytes that were written, and the number of all, as
	// [LoadOptions.Progress] is.
	Progress func(done, total int)
	// DirectIO writes without the page cache (O_DIRECT): see [transfer.Call].
	DirectIO bool
	// DropCache removes the pages of the files from the page cache when they are on storage.
	DropCache bool
}

// Save writes tensors of device and host memory to the safetensors file at path, whose name ends in .safetensors, or
// to files name-00001-of-00003.safetensors beside it with an index name.safetensors.index.json. Bytes go from the
// device to the file through the rings of pinned memory that Copiers share, from all devices at once, and are never
// in memory as a whole. Tensors with larger elements come first, others in the order given; neighbours there that
// are neighbours in device memory are one copy. The data starts at a multiple of 4096 bytes.
//
// The model at path is replaced as a whole. Files are written under other names, with the permissions that the umask
// leaves, and flushed to storage (fsync) before they are renamed; of several files the index is renamed last, and the
// files of the model before are removed after that. So a process that is killed, or a machine that loses power,
// leaves the model before, or the new one. A save that fails removes what it wrote. Of one that is killed, temporary
// files named .name.*.tmp may remain, which the next save of the path removes, and numbered files that no index names. Other processes that have the files
// open keep what they read.
//
// The tensors must not change until Save returns. It takes as long as the file system does, also after ctx has ended:
// then no more is copied, and the model before stays.
//
// Before anything is written, Save returns an error for a name that is empty, no UTF-8, or there twice; a type that is
// none of safetensors'; a shape that does not fit; memory that is too small, or none of its device's; and for a
// file system without enough space. Later errors name the file and the tensor.
func Save(ctx context.Context, path string, tensors []SavedTensor, o SaveOptions) error {
	s := saving{path: path, o: o, changed: func(change) error { return nil }}
	if err := s.save(ctx, tensors); err != nil {
		return fmt.Errorf("weights: save %s: %w", path, err)
	}
	return nil
}

// A saving is one call of Save.
type saving struct {
	path  string
	o     SaveOptions
	files []*savedFile
	total int // bytes of all tensors

	changed func(change) error // called after each change: an error ends the save, as one of the change does

	copiers  map[*cudart.Device]*transfer.Copier
	reporter *bounded.Reporter
	done     atomic.Int64 // bytes
}

// A change is what a save does to the file system, in the words of its calls.
type change struct {
	call string // create, fsync, link, rename, remove; fsync of a directory makes changes to its names durable
	path string
	from string // of link and rename
}

func (s *saving) save(ctx context.Context, tensors []SavedTensor) (err error) {
	if ctx == nil {
		return errors.New("the context is nil")
	}
	if err := s.layOut(tensors); err != nil {
		return err
	}
	if err := s.checkMemory(ctx); err != nil {
		return err
	}
	for i, stream := range s.o.Streams {
		if err := stream.Synchronize(ctx); err != nil {
			return fmt.Errorf("stream %d: %w", i, err)
		}
	}
	defer func() {
		if failed := s.discard(); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	if err := s.create(); err != nil {
		return err
	}
	if err := s.write(ctx); err != nil {
		return err
	}
	return s.publish()
}

// write writes the files and flushes them.
func (s *saving) write(caller context.Context) (err error) {
	ctx, cancel := context.WithCancelCause(caller)
	defer cancel(nil)
	s.reporter = bounded.NewReporter(s.total, s.o.Progress, func(_ int, err error) { cancel(err) }, ctx.Done())
	defer func() {
		if s.reporter != nil && !s.reporter.Finish() && err == nil {
			err = bounded.Ended(ctx)
		}
	}()
	s.copiers = map[*cudart.Device]*transfer.Copier{}
	defer func() {
		for dev, c := range s.copiers {
			if failed := release(caller, dev.Runtime(), c); failed != nil {
				err = errors.Join(err, fmt.Errorf("after the save: %w", cause(failed)))
			}
		}
	}()
	for _, f := range s.files {
		if err := s.writeFile(ctx, f); err != nil {
			return fmt.Errorf("%s: %w", f.temp.Name(), err)
		}
	}
	return nil
}

func (s *saving) writeFile(ctx context.Context, f *savedFile) error {
	if _, err := f.temp.WriteAt(f.header, 0); err != nil {
		return err
	}
	of := map[*cudart.Device][]savedRun{}
	for _, r := range f.runs {
		if err := s.copier(ctx, r.device); err != nil {
			return err
		}
		of[r.device] = append(of[r.device], r)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	for _, runs := range of {
		running.Go(func() {
			for group := range groups(runs) {
				if n, err := s.copyGroup(ctx, f, group); err != nil {
					cancel(fmt.Errorf("tensor %s: %w", quote(f.tensorAt(group[0].off+int64(n))), cause(err)))
					return
				}
			}
		})
	}
	running.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := f.temp.Sync(); err != nil {
		return err
	}
	if s.o.DropCache {
		dropCache(f.temp, 0, int(f.size), true)
	}
	return s.changed(change{call: "fsync", path: f.temp.Name()})
}

// copier makes the copier of a device, unless it is there.
func (s *saving) copier(ctx context.Context, dev *cudart.Device) error {
	if dev == nil || s.copiers[dev] != nil {
		return nil
	}
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err == nil {
		s.copiers[dev] = c
	}
	return err
}

// copyGroup writes neighbours in the file, and returns how many bytes from the first on were written.
func (s *saving) copyGroup(ctx context.Context, f *savedFile, group []savedRun) (int, error) {
	if len(group) == 1 {
		return s.copy(ctx, f, group[0])
	}
	last := group[len(group)-1]
	gathered := make([]byte, int(last.off-group[0].off)+last.n)
	parts := make([]transfer.Part, len(group))
	for i, r := range group {
		at := int(r.off - group[0].off)
		parts[i] = transfer.Part{Device: r.ptr, Host: gathered[at : at+r.n]}
	}
	if err := s.copiers[last.device].DownloadAll(ctx, parts); err != nil {
		return 0, err
	}
	n, err := f.temp.WriteAt(gathered, group[0].off)
	s.reporter.Set(int(s.done.Add(int64(n))))
	return n, err
}

// hostPiece is how much host memory is written at a time.
const hostPiece = 8 << 20

// copy writes neighbours, and returns how many bytes from the first on were written.
func (s *saving) copy(ctx context.Context, f *savedFile, r savedRun) (int, error) {
	reported := 0
	report := func(now int) {
		s.reporter.Set(int(s.done.Add(int64(now - reported))))
		reported = now
	}
	if r.device != nil {
		call := transfer.Call{DirectIO: s.o.DirectIO}
		if s.reporter != nil {
			call.Progress = func(now, _ int) { report(now) }
		}
		n, err := s.copiers[r.device].With(call).DownloadTo(ctx, f.temp, r.off, r.ptr, r.n)
		if err == nil {
			report(n)
		}
		return n, err
	}
	done := 0
	for done < r.n {
		if err := bounded.Ended(ctx); err != nil {
			return done, err
		}
		n, err := f.temp.WriteAt(r.host[done:min(done+hostPiece, r.n)], r.off+int64(done))
		done += n
		report(done)
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// discard closes the temporary files, and removes those that are still there.
func (s *saving) discard() error {
	var errs []error
	for _, f := range s.files {
		if f.temp == nil {
			continue
		}
		_ = f.temp.Close() // of a file that was flushed, or is not used
		if err := os.Remove(f.temp.Name()); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("left behind: %w", err))
		}
	}
	return errors.Join(errs...)
}
