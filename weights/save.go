package weights

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
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
	// Snapshot is a pool of pinned memory. The tensors are copied to it at the speed of the link, and written from
	// there while the caller goes on. If it has less memory than the tensors, Save also waits for writes. Its MaxBytes
	// bounds the memory, 32 MiB at least; the pool keeps it for the next save, until the caller trims or closes it.
	// Without a pool the bytes of devices go through up to 128 MiB of pinned memory, which the next save of the process
	// uses again, and which is unmapped after a minute or two without one. Those of host memory are written from where
	// they are, and Save waits for the file system.
	Snapshot *pool.Pool
	// NoChecksums leaves the checksums out.
	NoChecksums bool
	// Progress is called from time to time with the number of bytes that were written, and the number of all, as
	// [LoadOptions.Progress] is.
	Progress func(done, total int)
	// DirectIO writes without the page cache (O_DIRECT): see [transfer.Call].
	DirectIO bool
	// DropCache removes the pages of the files from the page cache when they are on storage.
	DropCache bool
}

// Save writes tensors of device and host memory to the safetensors file at path, whose name ends in .safetensors, or
// to files name-00001-of-00003.safetensors beside it with an index name.safetensors.index.json. It returns when the
// tensors may change again; [Saving.Wait] returns when the files are on storage.
//
//	s, err := weights.Save(ctx, path, tensors, weights.SaveOptions{})
//	if err == nil {
//		err = s.Wait(ctx)
//	}
//
// Bytes go from all devices at once to pinned memory, and from there to the files by several goroutines: see
// [SaveOptions.Snapshot]. Tensors with larger elements come first, others in the order
// given; neighbours there that are neighbours in device memory are one copy. The data starts at a multiple of 4096
// bytes. The metadata has checksums of all bytes, which the devices compute before the copies where they run kernels,
// and which are compared with those of the bytes that are written: a difference is a *[ChecksumError]. [Verify] and
// [LoadOptions.Checksums] compare them later.
//
// The model at path is replaced as a whole. Files are written under other names, with the permissions that the umask
// leaves, and flushed to storage (fsync) before they are renamed; of several files the index is renamed last, and the
// files of the model before are removed after that. So a process that is killed, or a machine that loses power,
// leaves the model before, or the new one. A save that fails removes what it wrote. Of one that is killed, temporary
// files named .name.*.tmp may remain, which the next save of the path removes, and numbered files that no index names.
// Other processes that have the files open keep what they read.
//
// ctx is that of the whole save. When it ends, no more is copied or written, and the model before stays, but Save and
// Wait take as long as calls of the file system that have begun.
//
// The devices do not use the tensors any more when Save has returned, unless its error wraps [transfer.ErrUnderWay].
//
// Kernels that a save or a load has used, and memory of some KiB for them, are kept for the next one until the runtime is
// closed.
//
// Before anything is written, Save returns an error for a name that is empty, no UTF-8, or there twice; a type that is
// none of safetensors'; a shape that does not fit; memory that is too small, or none of its device's; and for a
// file system without enough space. Later errors name the file and the tensor.
func Save(ctx context.Context, path string, tensors []SavedTensor, o SaveOptions) (*Saving, error) {
	s := &Saving{path: path, o: o, changed: func(change) error { return nil }}
	if err := s.begin(ctx, tensors); err != nil {
		return nil, err
	}
	return s, nil
}

// A Saving is a call of [Save], which goes on until the files are on storage, or the save has failed. Its methods may
// be called from any goroutine.
//
//	field              set by                          | read by
//	files, devices     Save                            | all, after that
//	filled             goroutines that copy            | writers, which end when it is closed
//	ctx                ended by the first error, which | all
//	                   is its cause, and by the caller |
//	err                the goroutine of finish         | Wait, when ended is closed
type Saving struct {
	path  string
	o     SaveOptions
	files []*savedFile
	total int // bytes of all tensors

	// changed is called after each change, by several goroutines after writes: an error ends the save, as one of the
	// change does.
	changed func(change) error

	caller   context.Context
	ctx      context.Context
	cancel   context.CancelCauseFunc
	devices  []*cudart.Device
	pipeline *pipeline // nil before the copies
	reporter *bounded.Reporter
	done     atomic.Int64 // bytes
	// abandoned is an error of a copy that may be under way.
	abandoned atomic.Pointer[error]

	ended chan struct{}
	err   error
}

// A change is what a save does to the file system, in the words of its calls.
type change struct {
	call string // create, write, fsync, link, rename, remove; fsync of a directory makes changes to its names durable
	path string
	from string // of link and rename
}

// Wait waits until the files are on storage under their names, or the save has failed, and returns its error: then the
// model before is there, unless the error says what is left of it. If ctx ends first, Wait returns its error, and the
// save goes on.
func (s *Saving) Wait(ctx context.Context) error {
	if s == nil || s.ended == nil {
		return errors.New("weights: wait for a save: the Saving is nil, or was not made by Save")
	}
	if ctx == nil {
		return s.wrap(errors.New("the context is nil"))
	}
	select {
	case <-s.ended:
		return s.err
	default:
	}
	select {
	case <-s.ended:
		return s.err
	case <-ctx.Done():
		return s.wrap(fmt.Errorf("wait: %w", bounded.Ended(ctx)))
	}
}

func (s *Saving) wrap(err error) error { return fmt.Errorf("weights: save %s: %w", s.path, err) }

// begin copies the tensors, and leaves the rest to finish.
func (s *Saving) begin(ctx context.Context, tensors []SavedTensor) error {
	if err := s.prepare(ctx, tensors); err != nil {
		return s.wrap(err)
	}
	s.caller = ctx
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.ended = make(chan struct{})
	s.reporter = bounded.NewReporter(s.total, s.o.Progress, func(_ int, err error) { s.cancel(err) }, s.ctx.Done())
	err := s.create()
	if err == nil {
		err = s.copy()
	}
	if err != nil {
		s.cancel(err)
		s.finish(err)
		return s.err
	}
	go s.finish(nil)
	return nil
}

// prepare checks the arguments, lays out the files, and waits for the streams.
func (s *Saving) prepare(ctx context.Context, tensors []SavedTensor) error {
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
	return nil
}

// copy copies the tensors to memory for the writers, and waits for these unless the memory is that of a snapshot. Beside
// it the devices compute the checksums, and what earlier calls could not release is tried again.
func (s *Saving) copy() (err error) {
	var beside sync.WaitGroup
	errs := make([]error, len(s.devices))
	for i, dev := range s.devices {
		beside.Go(func() {
			retryUnreleased(s.caller, dev.Runtime())
			if !s.o.NoChecksums {
				errs[i] = s.sumOn(dev)
			}
		})
	}
	if s.pipeline, err = newPipeline(s); err != nil {
		s.cancel(err)
	} else {
		for _, f := range s.files {
			s.pipeline.copyFile(f)
		}
		close(s.pipeline.filled) // the writers end when they have written all pieces
	}
	beside.Wait()
	err = s.pipeline.release()
	s.pipeline.begin() // not before: CUDA and writers that make pages wait for each other's locks
	return errors.Join(s.failure(), err, errors.Join(errs...))
}

// sumOn adds the checksums that a device computes to those of the files. If it cannot, those of the CPU are enough. Its
// error is that of the release.
func (s *Saving) sumOn(dev *cudart.Device) error {
	c, err := takeSummer(s.ctx, dev)
	if err != nil {
		return nil
	}
	var list summing
	for _, f := range s.files {
		for _, r := range f.runs {
			if r.device == dev {
				list.add(f.sums, r.off, r.n, r.ptr)
			}
		}
	}
	if failed, err := list.run(s.ctx, c); err != nil {
		at := slices.IndexFunc(s.files, func(f *savedFile) bool { return f.sums == failed.sums })
		s.fail(s.files[at], failed.blocks[failed.block].off, err)
	}
	return c.keep(s.caller, s.ctx.Err() != nil)
}

// fail ends the save because of an error at an offset of a file.
func (s *Saving) fail(f *savedFile, off int64, err error) {
	err = fmt.Errorf("tensor %s, at offset %d of %s: %w", quote(f.tensorAt(off)), off, f.temp.Name(), err)
	if errors.Is(err, transfer.ErrUnderWay) {
		s.abandoned.Store(&err)
	}
	s.cancel(err)
}

// failure returns why the save has ended, nil while it goes on, and whether the devices may still read tensors.
func (s *Saving) failure() error {
	err := context.Cause(s.ctx)
	if ended := context.Cause(s.caller); ended != nil && errors.Is(err, ended) {
		err = bounded.Ended(s.caller)
	}
	if abandoned := s.abandoned.Load(); abandoned != nil && !errors.Is(err, transfer.ErrUnderWay) {
		err = errors.Join(err, *abandoned)
	}
	return err
}

// report adds bytes that were written to the progress.
func (s *Saving) report(n int) { s.reporter.Set(int(s.done.Add(int64(n)))) }

// finish waits for writers, seals the files and gives them their names, unless there is an error already, and ends the
// save.
func (s *Saving) finish(err error) {
	if s.pipeline != nil {
		s.pipeline.writing.Wait()
	}
	if err == nil {
		err = s.failure()
	}
	for _, f := range s.files {
		if err == nil {
			if err = s.flush(f); err != nil {
				err = fmt.Errorf("%s: %w", f.temp.Name(), err)
			}
		}
	}
	if !s.reporter.Finish() && err == nil {
		err = s.failure()
	}
	if err == nil {
		if err = s.failure(); err == nil {
			err = s.publish()
		}
	}
	if err = errors.Join(err, s.discard()); err != nil {
		s.err = s.wrap(err)
	}
	s.cancel(nil)
	close(s.ended)
}

// flush completes a file on storage.
func (s *Saving) flush(f *savedFile) error {
	if err := f.seal(); err != nil {
		return err
	}
	if _, err := f.temp.WriteAt(f.header, 0); err != nil {
		return err
	}
	if err := s.changed(change{call: "write", path: f.temp.Name()}); err != nil {
		return err
	}
	if err := s.failure(); err != nil {
		return err
	}
	if err := f.temp.Sync(); err != nil {
		return err
	}
	if s.o.DropCache {
		dropCache(f.temp, 0, int(f.size), true)
	}
	return s.changed(change{call: "fsync", path: f.temp.Name()})
}

// discard closes the temporary files, and removes those that are still there.
func (s *Saving) discard() error {
	var errs []error
	for _, f := range s.files {
		if f.temp == nil {
			continue
		}
		_ = f.temp.Close() // of a file that was flushed, or is not used
		if f.direct != nil {
			_ = f.direct.Close()
		}
		if f.mapped != nil {
			errs = append(errs, f.mapped.Unmap())
		}
		if err := os.Remove(f.temp.Name()); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("left behind: %w", err))
		}
	}
	return errors.Join(errs...)
}
