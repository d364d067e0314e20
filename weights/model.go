package weights

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A Model is one or several weights files and the tensors in them, each under a
// name of its own. It does not change, so all of its methods may be called from
// any goroutine.
type Model struct {
	files  []*File
	byName map[string]*Tensor
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

const indexSuffix = ".safetensors.index.json"

// OpenModel opens all files of a model and reads their headers. The files stay
// open until Close. The path names
//   - a .safetensors.index.json: the files that it names beside it;
//   - a GGUF file that is a part of a split model: all parts;
//   - any other safetensors or GGUF file: that file;
//   - a directory: the model in it, which is model.safetensors.index.json if
//     that exists, else model.safetensors, else the only index, file or split
//     model that is there.
//
// The index names the file of each tensor. Other tensors of these files do not belong to the
// model; [File.Tensors] has them. The sizes in an index are ignored, because they are often
// wrong.
//
// The error wraps the operating system's if a file cannot be opened or read
// ([io/fs.ErrNotExist] if one is missing), lists the models if a directory has several, and
// is a *FormatError if a file is refused or does not match the others. OpenModel takes as long as
// the file system does.
func OpenModel(path string) (*Model, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	if info.IsDir() {
		if path, err = findModel(path); err != nil {
			return nil, err
		}
	}
	m := &Model{byName: map[string]*Tensor{}}
	if strings.HasSuffix(path, indexSuffix) {
		err = m.openIndexed(path)
	} else {
		err = m.openParts(path)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// open opens a file of the model.
func (m *Model) open(path string) (*File, error) {
	f, err := OpenFile(path)
	if err == nil {
		m.files = append(m.files, f)
	}
	return f, err
}

func (m *Model) sortFiles() {
	slices.SortFunc(m.files, func(f, g *File) int { return strings.Compare(f.name, g.name) })
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

// findModel returns the path of the model in a directory.
func findModel(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("weights: %w", err)
	}
	var indexes, files, splits []string
	for _, entry := range entries {
		name := entry.Name()
		switch {
		case strings.HasSuffix(name, indexSuffix):
			indexes = append(indexes, name)
		case strings.HasSuffix(name, ".safetensors"):
			files = append(files, name)
		case strings.HasSuffix(name, ".gguf"):
			if part := splitName.FindStringSubmatch(name); part == nil || part[2] == "00001" {
				splits = append(splits, name)
			}
		}
	}
	for _, name := range []string{"model" + indexSuffix, "model.safetensors"} {
		if slices.Contains(indexes, name) || slices.Contains(files, name) {
			return filepath.Join(dir, name), nil
		}
	}
	choices := indexes // whose files the others are
	if len(indexes) == 0 {
		choices = files
	}
	switch choices = append(choices, splits...); len(choices) {
	case 0:
		return "", fmt.Errorf("weights: open %s: %w: no safetensors or GGUF model in this directory", dir, os.ErrNotExist)
	case 1:
		return filepath.Join(dir, choices[0]), nil
	}
	return "", fmt.Errorf("weights: open %s: the directory has %d models (open one by its path: %s)", dir, len(choices), strings.Join(choices[:min(len(choices), 10)], ", "))
}

// openIndexed opens the files that an index names, and takes each tensor from its file.
func (m *Model) openIndexed(path string) error {
	file, size, err := openRegular(path)
	if err != nil {
		return err
	}
	defer file.Close()
	index := source{r: file, size: size, name: path}
	if size > maxHeader {
		return index.invalid("", "the index has %d bytes, want at most %d", size, maxHeader)
	}
	text, err := index.readJSON("the index", 0, size)
	if err != nil {
		return err
	}
	var tensors []byte // the value of weight_map
	j := scan(text)
	for key := j.next(); len(key) > 0; key = j.next() {
		if value := j.next(); string(unquote(key)) == "weight_map" {
			if tensors != nil {
				return index.invalid("", "the index has the key %q twice", "weight_map")
			}
			tensors = value
		}
	}
	if tensors == nil {
		return index.invalid("", "the index has no weight_map")
	}
	if err := index.wantList("", "weight_map", tensors, '{'); err != nil {
		return err
	}
	files := map[string]*File{}
	j = scan(tensors)
	for key := j.next(); len(key) > 0; key = j.next() {
		tensor, value := string(unquote(key)), j.next()
		if m.byName[tensor] != nil {
			return index.invalid("", "weight_map has the key %s twice", quote(tensor))
		}
		if value[0] != '"' {
			return index.invalid("", "the file of tensor %s is %s, want a string", quote(tensor), describe(value))
		}
		name := unquote(value)
		f := files[string(name)]
		if f == nil {
			if f, err = m.openNamed(index, tensor, string(name)); err != nil {
				return err
			}
			files[string(name)] = f
		}
		if m.byName[tensor] = f.byName[tensor]; m.byName[tensor] == nil {
			return f.invalid(tensor, "the file has no such tensor, %s says that it has", path)
		}
	}
	m.sortFiles()
	return nil
}

// openNamed opens the file that an index names for a tensor.
func (m *Model) openNamed(index source, tensor, name string) (*File, error) {
	name = filepath.FromSlash(name)
	if !filepath.IsLocal(name) {
		return nil, index.invalid(tensor, "its file is %s, want a path within the index's directory", quote(name))
	}
	dir := filepath.Dir(index.name)
	path := filepath.Join(dir, name)
	if outside(dir, filepath.Dir(path)) {
		return nil, index.invalid(tensor, "its file is %s, whose folder is a link out of the index's directory", quote(name))
	}
	f, err := m.open(path)
	if err != nil {
		return nil, fmt.Errorf("%w (named by the index %s)", err, index.name)
	}
	return f, nil
}

// outside reports whether symbolic links lead from a directory to a folder outside of it.
// A link to a file may: Hugging Face's cache has its files elsewhere. What does not exist
// is reported when the file is opened.
func outside(dir, folder string) bool {
	var real [2]string
	for i, path := range []string{dir, folder} {
		path, err := filepath.Abs(path)
		if err == nil {
			real[i], err = filepath.EvalSymlinks(path)
		}
		if err != nil {
			return false
		}
	}
	within, err := filepath.Rel(real[0], real[1])
	return err != nil || !filepath.IsLocal(within)
}

// The keys of a GGUF file that is a part of a model, and the name of part 2 of
// 3: x-00002-of-00003.gguf.
const (
	splitNumberKey  = "split.no" // from 0
	splitCountKey   = "split.count"
	splitTensorsKey = "split.tensors.count" // of the whole model
)

var splitName = regexp.MustCompile(`^(.*)-(\d{5})-of-(\d{5})\.gguf$`)

// openParts opens a file and, if it is a part of a split model, the other parts.
func (m *Model) openParts(path string) error {
	f, err := m.open(path)
	if err != nil {
		return err
	}
	count, _, err := splitKey[uint16](f, splitCountKey)
	if err != nil {
		return err
	}
	if count < 2 {
		return m.addAll(f)
	}
	name := splitName.FindStringSubmatch(path)
	if name == nil || name[3] != fmt.Sprintf("%05d", count) || name[2] < "00001" || name[2] > name[3] {
		return f.invalid("", "the file is one of %d parts of a model, want a name that ends in -00001-of-%05d.gguf or the number of another part", count, count)
	}
	for i := range int(count) {
		part := fmt.Sprintf("%s-%05d-of-%05d.gguf", name[1], i+1, count)
		if part != path {
			if _, err := m.open(part); err != nil {
				return fmt.Errorf("%w (part %d of %d of the model)", err, i+1, count)
			}
		}
	}
	m.sortFiles()
	for i, f := range m.files {
		number, _, err1 := splitKey[uint16](f, splitNumberKey)
		of, _, err2 := splitKey[uint16](f, splitCountKey)
		err := cmp.Or(err1, err2)
		if err == nil && (int(number) != i || of != count) {
			err = f.invalid("", "%s is %d and %s is %d, want %d and %d by the file's name", splitNumberKey, number, splitCountKey, of, i, count)
		}
		if err == nil {
			err = m.addAll(f)
		}
		if err != nil {
			return err
		}
	}
	first := m.files[0]
	want, ok, err := splitKey[int32](first, splitTensorsKey)
	if err == nil && ok && int(want) != len(m.byName) {
		err = first.invalid("", "%s is %d, the %d parts have %d tensors", splitTensorsKey, want, count, len(m.byName))
	}
	return err
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

// Close closes the model's files that OpenFile or OpenModel opened. It returns
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
// name those of an index, by number the parts of a split model.
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

// Tensor returns the tensor of that name, and whether there is one.
func (m *Model) Tensor(name string) (*Tensor, bool) {
	t, ok := m.orEmpty().byName[name]
	return t, ok
}
