package weights

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"reflect"
	"slices"
	"strings"
)

// A Model is one or several weights files and the tensors in them, each under a
// name of its own. It does not change, so all of its methods may be called from
// any goroutine.
type Model struct {
	files  []*File
	byName map[string]*Tensor
	in     fs.FS             // only while it is opened, as ahead
	ahead  map[string]opened // by path: opened, and not in files yet
}

// NewModel returns a model of files, with all of their tensors. The model's Close
// closes them. It returns an error for a nil file, and a *FormatError if two
// tensors have one name; then the caller closes the files. It does not block.
func NewModel(files ...*File) (*Model, error) {
	m := &Model{files: slices.Clone(files), byName: map[string]*Tensor{}}
	for _, f := range files {
		if f == nil {
			return nil, errors.New("weights: new model: nil file")
		}
		if err := m.addAll(f); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// OpenModel opens all files of a model and reads their headers. The files stay
// open until Close. The path names
//   - an index (.json): the files that it names, in its directory;
//   - a directory: the model in it, which is model.safetensors.index.json if that exists, else
//     model.safetensors, else the only model that is there;
//   - a file: the model that it is a part of, by an index in its directory that names it or by its
//     own name, else the file alone.
//
// Files whose names differ only in the number of name-00001-of-00003.safetensors or .gguf are parts
// of one model, with or without an index or the split.* keys of GGUF. The error names the parts
// that are missing. To open one of them alone, use [OpenFile] and [NewModel]. In a directory, an
// index is a file named *.index.json or *.index.*.json that names safetensors or GGUF files.
// OpenModel ignores folders, other files, and files whose names start with a dot.
//
// The index names the file of each tensor. Other tensors of these files do not belong to the
// model, such as older copies of tensors that another file has; [File.Tensors] has them.
// The sizes in an index are ignored, because they are often wrong.
//
// The error wraps the operating system's if a file cannot be opened or read
// ([io/fs.ErrNotExist] if one is missing), lists the models if a directory has several, and
// is a *FormatError if a file is refused or does not match the others. OpenModel takes as long as
// the file system does.
func OpenModel(path string) (*Model, error) { return openModel(system{}, path) }

// OpenModelFS opens a model of a file system, as [OpenModel] opens one of the operating system. The name is that of an
// index, a directory ("." for the root) or a file, in the form of package fs. The files of fsys are read by their ReadAt
// ([io.ReaderAt]); those that have an OpenRange, as [transfer.RangeOpener] has, are read in long ranges. Files of
// package os, such as those of [os.DirFS], are read as OpenModel's.
//
// fsys need not list its files, as servers do not. Then a file is opened with all parts that its name tells of, an
// index in its directory is not looked for, and a directory's model is model.safetensors.index.json or
// model.safetensors. OpenModelFS opens several files at once. A file without ReadAt is an error; other errors are those
// of fsys and of OpenModel.
func OpenModelFS(fsys fs.FS, name string) (*Model, error) {
	if fsys == nil {
		return nil, fmt.Errorf("weights: open %s: nil file system", name)
	}
	return openModel(fsys, name)
}

func openModel(in fs.FS, path string) (*Model, error) {
	folder, err := isDir(in, path)
	if err != nil {
		return nil, err
	}
	find := modelOf
	if folder {
		find = findModel
	}
	dir, files, err := find(in, path)
	if err != nil {
		return nil, err
	}
	m := &Model{in: in, byName: map[string]*Tensor{}}
	if isIndex(files.name) {
		err = m.openIndexed(dir + files.name)
	} else {
		err = m.openParts(dir, files)
	}
	err = errors.Join(err, m.closeAhead())
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// addAll adds all tensors of a file.
func (m *Model) addAll(f *File) error {
	for _, t := range f.tensors {
		if other := m.byName[t.Name]; other != nil {
			return f.invalid(t.Name, "%s has a tensor of this name too", other.File.name)
		}
		m.byName[t.Name] = t
	}
	return nil
}

// The keys of a GGUF file that is a part of a model.
const (
	splitNumberKey  = "split.no" // from 0
	splitCountKey   = "split.count"
	splitTensorsKey = "split.tensors.count" // of the whole model
)

// openParts opens the files of a model that has no index. They must agree about that.
func (m *Model) openParts(dir string, files modelFiles) error {
	path := dir + files.name
	if n := len(files.missing); n > 0 {
		return fmt.Errorf("weights: open %s: %w: the model lacks %d of its %d parts: %s", path, os.ErrNotExist, n, n+len(files.parts), list(files.missing))
	}
	if p := partOf(files.name); !p.inRange() {
		return &FormatError{File: path, Reason: fmt.Sprintf("its name has the number %d of %d parts, want 1 to %d", p.number, p.count, p.count)}
	}
	m.openAhead(dir, files.parts)
	for _, part := range files.parts {
		f, err := m.open(dir + part)
		if err == nil {
			err = m.addAll(f)
		}
		if err != nil {
			return err
		}
	}
	return cmp.Or(m.checkSplit(), m.checkHyperparameters())
}

// checkSplit compares the keys of a split model, which all parts or none have, with the numbers in the
// names of the parts.
func (m *Model) checkSplit() error {
	counts, want := make([]uint16, len(m.files)), 0
	for i, f := range m.files {
		var err error
		if counts[i], _, err = splitKey[uint16](f, splitCountKey); err != nil {
			return err
		}
		want = max(want, int(counts[i]))
	}
	n := len(m.files)
	if want == 0 || want == 1 && n == 1 {
		return nil
	}
	for i, f := range m.files {
		if n == 1 {
			return f.invalid("", "the file is one of %d parts of a model, want a name that ends in -00001-of-%05d.gguf or the number of another part", want, want)
		}
		number, _, err := splitKey[uint16](f, splitNumberKey)
		if err == nil && (int(number) != i || int(counts[i]) != n) {
			err = f.invalid("", "%s is %d and %s is %d, want %d and %d by the file's name", splitNumberKey, number, splitCountKey, counts[i], i, n)
		}
		if err != nil {
			return err
		}
	}
	first := m.files[0]
	tensors, ok, err := splitKey[int32](first, splitTensorsKey)
	if err == nil && ok && int(tensors) != len(m.byName) {
		err = first.invalid("", "%s is %d, the %d parts have %d tensors", splitTensorsKey, tensors, n, len(m.byName))
	}
	return err
}

// checkHyperparameters returns an error if two parts are of different models by the GGUF metadata that
// both have: their architecture, and the keys that begin with its name.
func (m *Model) checkHyperparameters() error {
	const architectureKey = "general.architecture"
	first := map[string]*File{}
	for _, f := range m.files {
		architecture, _ := f.metadata[architectureKey].(string)
		for _, key := range f.MetadataKeys() {
			if f.format != GGUF || key != architectureKey && !strings.HasPrefix(key, architecture+".") {
				continue
			}
			if other := first[key]; other == nil {
				first[key] = f
			} else if !reflect.DeepEqual(f.metadata[key], other.metadata[key]) {
				return f.invalid("", "%s differs from that of %s: they are parts of different models", quote(key), other.name)
			}
		}
	}
	return nil
}

// splitKey returns the value of a key of the metadata, and whether there is
// one.
func splitKey[T any](f *File, key string) (value T, ok bool, err error) {
	found, ok := f.metadata[key]
	if !ok || f.format != GGUF {
		return value, false, nil
	}
	if value, ok = found.(T); !ok {
		err = f.invalid("", "%s is of type %T, want %T", key, found, value)
	}
	return value, ok, err
}

// Close closes the model's files, but for those of Parse. It returns
// what File.Close does for each, joined.
func (m *Model) Close() error {
	if m == nil {
		return errors.New("weights: close: nil model")
	}
	var errs []error
	for _, f := range m.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// orEmpty returns m, or for nil a Model without files.
func (m *Model) orEmpty() *Model {
	if m == nil {
		return &Model{}
	}
	return m
}

// Files returns the model's files: in the order of NewModel's arguments, by
// name those of an index, by number the parts of a model without one.
func (m *Model) Files() []*File { return slices.Clone(m.orEmpty().files) }

// Tensors iterates over the model's tensors in the order of Files, those of one
// file by ascending offset. That is the order in which reading them is fastest.
func (m *Model) Tensors() iter.Seq[*Tensor] {
	return func(yield func(*Tensor) bool) {
		for _, f := range m.orEmpty().files {
			for _, t := range f.tensors {
				if m.byName[t.Name] == t && !yield(t) {
					return
				}
			}
		}
	}
}

// Tensor returns the tensor with the name, and whether the model has it.
func (m *Model) Tensor(name string) (*Tensor, bool) {
	t, ok := m.orEmpty().byName[name]
	return t, ok
}
