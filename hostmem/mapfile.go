package hostmem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// FileOptions choose the part of a file to map, and how. The zero value
// maps the whole file.
type FileOptions struct {
	// Offset of the first byte in the file, which need not be the start of a page.
	Offset int64
	// Length in bytes; 0 maps all bytes from Offset on.
	Length int
	// Label is shown by Outstanding and in messages; empty, it is the path.
	Label string
	// Chunk is as Options.Chunk.
	Chunk int
	// Workers is the number of goroutines that read the file, 1024 at most; 0 adapts to
	// the host.
	Workers int
}

// insteadOfMapping is the advice where a file cannot be registered.
const insteadOfMapping = "copy it through pinned memory instead, by package transfer (Copier.UploadFrom)"

// MapFile pins the page cache of a file, or of a part of one, so that the GPU reads it where the
// kernel keeps it, without a copy in between. It maps the file shared and for reading only (mmap),
// reads it into the page cache, and registers that read-only for all devices (cudaHostRegister with
// cudaHostRegisterReadOnly, on dev). Where the GPU uses the host's page tables, nothing is
// registered: see [Method]. If another process writes to the file, the bytes change, even during a
// copy.
//
// The file must not shrink while it is mapped: reading lost bytes through Bytes ends the process
// (SIGBUS), and the GPU still reads the old pages. If the file shrinks during MapFile, MapFile
// returns an error.
//
// Only regular files of at least one byte can be mapped. The error wraps [errors.ErrUnsupported] if
// the host does not register memory, the device does not support the flag (attribute 113), or the
// file system does not map its files. A range outside the file is an error. Other errors, and the
// end of ctx, are handled as by [Alloc].
func MapFile(ctx context.Context, dev *cudart.Device, path string, o FileOptions) (*Buffer, error) {
	b := &Buffer{}
	pin := Options{Label: cmp.Or(o.Label, path), Chunk: o.Chunk, Workers: o.Workers}
	if err := b.open(ctx, dev, "file", pin, func() error { return b.mapFile(ctx, path, o, pin) }); err != nil {
		return nil, fmt.Errorf("hostmem: map file %s: %w", path, err)
	}
	return b, nil
}

func (b *Buffer) mapFile(ctx context.Context, path string, o FileOptions, pin Options) error {
	// Opening a pipe would wait, and opening a device may do anything.
	if info, err := os.Stat(path); err != nil {
		return err
	} else if err := mappable(info); err != nil {
		return err
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() // the mapping does not need it
	if o.Length, err = o.length(file); err != nil {
		return err
	}
	flags, err := b.host.registering(ctx, b.dev, true)
	if err != nil {
		return instead(err)
	}
	region, err := pages.MapFile(pages.SystemOf(ctx), file, o.Offset, o.Length, false)
	if errors.Is(err, syscall.ENODEV) {
		err = fmt.Errorf("its file system does not map files (%w): %w", errors.ErrUnsupported, err)
	}
	if err == nil {
		err = explain(b.pin(ctx, region, flags, pin))
	}
	if err != nil {
		return instead(err)
	}
	// A file that has lost bytes until now is an error; later nothing checks.
	if _, err := o.length(file); err != nil {
		return fmt.Errorf("it shrank meanwhile: %w", err)
	}
	return nil
}

// mappable returns an error for what is not a regular file.
func mappable(info fs.FileInfo) error {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return errors.New("it is a directory")
	case !mode.IsRegular():
		return fmt.Errorf("it is not a regular file (mode %v): %w; %s", mode, errors.ErrUnsupported, insteadOfMapping)
	}
	return nil
}

// length returns how many bytes of the file to map, all of which exist.
func (o FileOptions) length(file *os.File) (int, error) {
	if o.Offset < 0 || o.Length < 0 {
		return 0, fmt.Errorf("FileOptions.Offset of %d, Length of %d: neither can be negative", o.Offset, o.Length)
	}
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	if err := mappable(info); err != nil {
		return 0, err
	}
	remaining := info.Size() - o.Offset
	switch {
	case info.Size() == 0:
		return 0, errors.New("it is empty, or its file system does not report its size")
	case remaining <= 0 || int64(o.Length) > remaining:
		return 0, fmt.Errorf("%d bytes from %d on are not all within the %d that it has", max(o.Length, 1), o.Offset, info.Size())
	case o.Length == 0:
		return int(remaining), nil
	}
	return o.Length, nil
}

// instead adds advice to a refusal by the device, the driver or the file system.
func instead(err error) error {
	var refused *cudart.Error
	if errors.Is(err, errors.ErrUnsupported) || errors.As(err, &refused) {
		return fmt.Errorf("%w; %s", err, insteadOfMapping)
	}
	return err
}
