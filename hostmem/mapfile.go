package hostmem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// MapFileOptions say which part of a file is mapped, and how. The zero value
// maps all of it.
type MapFileOptions struct {
	// Offset of the first byte in the file, which need not be a page's begin.
	Offset int64
	// Length in bytes; 0 is all that follows Offset.
	Length int
	// Label is shown where memory is accounted for; empty, it is the path.
	Label string
	// Chunk is as Options.Chunk.
	Chunk int
	// Workers is how many goroutines read the file, 1024 at most; 0 adapts to
	// the host.
	Workers int

	system *pages.System // of tests
}

// A File is a file, or a part of one, whose page cache is pinned, so that the
// GPU reads it where the kernel keeps it, with no copy in between. Its methods
// may be called from any goroutine.
type File struct{ foreign }

// insteadOfMapping is what to do where a file cannot be registered.
const insteadOfMapping = "copy it through pinned memory instead, by package transfer (Copier.UploadFrom)"

// MapFile maps a file shared and for reading only, reads it into the page
// cache, and registers that read-only for all devices (cudaHostRegister with
// cudaHostRegisterReadOnly, on dev). What other processes write to the file
// shows in the File's bytes, and in copies.
//
// The file must not lose bytes while it is mapped: reading the lost ones
// through Bytes ends the process (SIGBUS), and the GPU goes on reading what was
// there. A file that shrinks while MapFile works gives an error.
//
// Only regular files can be mapped, with at least a byte. A device that does
// not know the flag (attribute 113), and file systems that do not map their
// files, give an error that wraps [errors.ErrUnsupported]. After an error
// nothing is mapped or registered; only if unregistering fails on the way back
// the mapping has to stay, and the error says so.
//
// What the host cannot spare, or [SetLimits] forbids, is [ErrLimit]. When ctx
// ends while MapFile waits for a limit or reads the file, it undoes its work and
// returns ctx's error.
func MapFile(ctx context.Context, dev *cudart.Device, path string, o MapFileOptions) (*File, error) {
	f, err := mapFile(ctx, dev, path, o)
	if err != nil {
		account.failures.Add(1)
		return nil, fmt.Errorf("hostmem: map file %s: %w", path, err)
	}
	return f, nil
}

func mapFile(ctx context.Context, dev *cudart.Device, path string, o MapFileOptions) (*File, error) {
	start := time.Now()
	if err := checkArguments(ctx, dev); err != nil {
		return nil, err
	}
	pin := Options{Label: o.Label, Chunk: o.Chunk, Workers: o.Workers, system: o.system}
	if pin.Label == "" {
		pin.Label = path
	}
	if err := pin.Validate(); err != nil {
		return nil, err
	}
	// Opening a pipe would wait, and opening a device may do anything.
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if err := mappable(info); err != nil {
		return nil, err
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close() // the mapping needs it no more
	n, err := o.length(file)
	if err != nil {
		return nil, err
	}
	flags, notes, err := askDevice(dev, true)
	if err != nil {
		return nil, instead(err)
	}
	region, err := pages.MapFile(pin.host(), file, o.Offset, n)
	if errors.Is(err, syscall.ENODEV) {
		err = fmt.Errorf("its file system does not map files (%w): %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, instead(err)
	}
	f := &File{foreign{region: region, notes: notes}}
	if err := f.pin(ctx, dev, region, "file", flags, pin); err != nil {
		return nil, instead(err)
	}
	// A byte that went missing until now is found here; later nobody looks.
	o.Length = n
	if _, err := o.length(file); err != nil {
		return nil, giveUp(f.pinned, region, f.grant, fmt.Errorf("it shrank meanwhile: %w", err))
	}
	f.enter(&account.files, f.n, start)
	return f, nil
}

// mappable refuses what is no regular file.
func mappable(info fs.FileInfo) error {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return errors.New("it is a directory")
	case !mode.IsRegular():
		return fmt.Errorf("it is no regular file (mode %v): %w; %s", mode, errors.ErrUnsupported, insteadOfMapping)
	}
	return nil
}

// length returns how many bytes of the file are meant, all of which are there.
func (o MapFileOptions) length(file *os.File) (int, error) {
	if o.Offset < 0 || o.Length < 0 {
		return 0, fmt.Errorf("bytes from %d on, %d of them: neither can be negative", o.Offset, o.Length)
	}
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	if err := mappable(info); err != nil {
		return 0, err
	}
	left := info.Size() - o.Offset
	switch {
	case info.Size() == 0:
		return 0, errors.New("it is empty, or its file system does not tell its size")
	case left <= 0 || int64(o.Length) > left:
		return 0, fmt.Errorf("%d bytes from %d on are not all within the %d that it has", max(o.Length, 1), o.Offset, info.Size())
	case o.Length == 0:
		return int(left), nil
	}
	return o.Length, nil
}

// instead adds what to do about a refusal by the device, the driver or the
// file system.
func instead(err error) error {
	var refused *cudart.Error
	if errors.Is(err, errors.ErrUnsupported) || errors.As(err, &refused) {
		return fmt.Errorf("%w; %s", err, insteadOfMapping)
	}
	return err
}
