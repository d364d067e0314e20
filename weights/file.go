package weights

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxHeader is the limit of safetensors for the size of a header in bytes. It
// bounds the memory for any file's header. The largest headers in use have a few
// megabytes.
const maxHeader = 100_000_000

// A Format is a kind of weights file.
type Format string

// The formats that are read.
const (
	Safetensors Format = "safetensors"
	GGUF        Format = "GGUF"
)

// A Tensor describes a tensor and its bytes in a file. It belongs to its File and must not be
// changed.
type Tensor struct {
	Name  string
	DType DType
	// Shape has the outermost dimension first in both formats: elements whose
	// last index differs by one are neighbours. GGUF files store it in the
	// opposite order. It is empty for a scalar.
	Shape []int
	// File is the file that holds the tensor's bytes.
	File *File
	// Offset is the position of the first byte in the file.
	Offset int64
	// Size is the number of bytes. It is 0 if a dimension is 0.
	Size int
}

// compare orders the tensors of one file by their place in it.
func (t *Tensor) compare(u *Tensor) int {
	if t.Offset != u.Offset { // nearly always; cmp.Or would compare the names, too
		return cmp.Compare(t.Offset, u.Offset)
	}
	return cmp.Or(cmp.Compare(t.Size, u.Size), strings.Compare(t.Name, u.Name))
}

// A File is a weights file whose header has been read and checked. It does not
// change, so all of its methods may be called from any goroutine.
type File struct {
	source
	format   Format
	padding  int64 // alignment of tensors in bytes, counted from the start of their data
	tensors  []*Tensor
	byName   map[string]*Tensor
	metadata map[string]any
	owned    io.Closer // the file that was opened for it
}

// OpenFile opens a safetensors or GGUF file and reads its header. It does not
// open the other files of a model; OpenModel does. The file stays open until
// Close. OpenFile takes as long as the file system does.
//
// The error wraps the operating system's if the file cannot be opened or read, and is
// a *FormatError if the file is refused.
func OpenFile(path string) (*File, error) { return openFile(system{}, path) }

func openFile(in fs.FS, path string) (*File, error) {
	opened, size, err := openRegular(in, path)
	if err != nil {
		return nil, err
	}
	f, err := Parse(opened, size, path)
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	f.owned = opened
	return f, nil
}

// Parse reads the header of a safetensors or GGUF file of size bytes through r,
// which may be anything that reads at offsets: memory, or ranges over a
// network. The name serves errors. File.Reader returns r, and File.Close does
// not close it.
//
// Of a safetensors file it reads 9 bytes and the header, of a GGUF file the header in
// pieces of 64 KiB to 4 MiB; a header has at most 100 MB. It returns
// r's error where reading fails or r panics, io.ErrUnexpectedEOF where r has fewer
// than size bytes, and a *FormatError where the file is refused.
func Parse(r io.ReaderAt, size int64, name string) (*File, error) {
	if r == nil {
		return nil, fmt.Errorf("weights: read %s: nil reader", name)
	}
	if size < 0 {
		return nil, fmt.Errorf("weights: read %s: negative size %d", name, size)
	}
	f := &File{
		source:   source{r: r, size: size, name: name},
		padding:  1,
		byName:   map[string]*Tensor{},
		metadata: map[string]any{},
	}
	var start [9]byte
	if size < int64(len(start)) {
		return nil, f.invalid("", "the file has %d bytes, every safetensors or GGUF file has more than %d", size, len(start)-1)
	}
	if err := f.readHeader(start[:], 0); err != nil {
		return nil, err
	}
	var err error
	if string(start[:len(ggufMagic)]) == ggufMagic {
		err = f.parseGGUF()
	} else {
		err = f.parseSafetensors(start[:])
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Close closes the file unless Parse returned it; a second Close then
// returns an error that wraps os.ErrClosed. The tensors' data in memory stays
// valid, reads of the file fail.
func (f *File) Close() error {
	switch {
	case f == nil:
		return errors.New("weights: close: nil file")
	case f.owned == nil:
		return nil
	}
	if err := f.owned.Close(); err != nil {
		return fmt.Errorf("weights: %w", err)
	}
	return nil
}

// orEmpty returns f, or for nil a File without tensors, name and reader.
func (f *File) orEmpty() *File {
	if f == nil {
		return &File{}
	}
	return f
}

// Name returns the name given to OpenFile or Parse.
func (f *File) Name() string { return f.orEmpty().name }

// Size returns the size of the whole file in bytes, as it was when the file was
// opened.
func (f *File) Size() int64 { return f.orEmpty().size }

// Format returns the file's format.
func (f *File) Format() Format { return f.orEmpty().format }

// Reader returns the reader of the file's bytes: the *os.File that OpenFile
// opened, the file of the file system given to OpenModelFS, or the reader given to Parse.
func (f *File) Reader() io.ReaderAt { return f.orEmpty().r }

// Tensors iterates over the file's tensors by ascending offset.
func (f *File) Tensors() iter.Seq[*Tensor] { return slices.Values(f.orEmpty().tensors) }

// Tensor returns the tensor with the name, and whether the file has it.
func (f *File) Tensor(name string) (*Tensor, bool) {
	t, ok := f.orEmpty().byName[name]
	return t, ok
}

// Metadata returns the value of a key, and whether the file has the key. safetensors files have
// __metadata__, whose values are strings; GGUF files have key-value pairs.
//
// A value of GGUF is a bool, a string, or an int8, uint8, ..., int64, uint64,
// float32 or float64, as the file declares it; an array is a slice of one of
// these. Strings are the file's bytes, which for tokens need not be UTF-8.
// Slices are shared, and must not be changed.
func (f *File) Metadata(key string) (any, bool) {
	v, ok := f.orEmpty().metadata[key]
	return v, ok
}

// MetadataKeys returns all keys of the metadata, sorted.
func (f *File) MetadataKeys() []string { return slices.Sorted(maps.Keys(f.orEmpty().metadata)) }

// add adds a tensor. It refuses a second tensor of one name, and names that libraries cannot look
// up. arrange checks the place.
func (f *File) add(t *Tensor) error {
	switch {
	case t.Name == "":
		return f.invalid("", "tensor %d has an empty name", len(f.tensors)+1)
	case !utf8.ValidString(t.Name):
		return f.invalid(t.Name, "its name is not UTF-8")
	case strings.IndexByte(t.Name, 0) >= 0:
		return f.invalid(t.Name, "its name has a zero byte, at which C libraries end it")
	}
	f.byName[t.Name] = t
	f.tensors = append(f.tensors, t)
	if len(f.byName) < len(f.tensors) {
		return f.invalid(t.Name, "the file has two tensors of this name")
	}
	return nil
}

// arrange sorts the tensors by offset, and adds start, the offset of their data in the file. It
// refuses tensors that end beyond the file, that overlap, or that leave bytes between them: each
// starts where the one before it ends, or at the next multiple of the padding. It returns the end of
// the last tensor.
func (f *File) arrange(start int64) (int64, error) {
	slices.SortFunc(f.tensors, (*Tensor).compare)
	end := start
	for i, t := range f.tensors {
		if data := f.size - start; int64(t.Size) > data-t.Offset {
			return 0, f.invalid(t.Name, "its %d bytes at offset %d of the data end beyond the file, which has %d bytes of data", t.Size, t.Offset, max(data, 0))
		}
		t.Offset += start
		gap, padding, before := t.Offset-end, -end&(f.padding-1), "the header"
		if i > 0 && (gap < 0 || gap > padding) {
			before = "tensor " + quote(f.tensors[i-1].Name)
		}
		switch {
		case gap < 0:
			return 0, f.invalid(t.Name, "starts at offset %d, %d bytes before the end of %s: they overlap", t.Offset, -gap, before)
		case gap > padding:
			return 0, f.invalid(t.Name, "starts at offset %d, %d bytes after the end of %s, want offset %d: bytes between tensors belong to none", t.Offset, gap, before, end+padding)
		}
		end = t.Offset + int64(t.Size)
	}
	return end, nil
}
