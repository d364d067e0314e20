package weights

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// An index has the file of each tensor of a model.
type index struct {
	source
	tensors []byte // the value of weight_map, an object
}

func readIndex(in fs.FS, path string) (x index, err error) {
	file, size, err := openRegular(in, path)
	if err != nil {
		return x, err
	}
	defer file.Close()
	x.source = source{r: file, size: size, name: path}
	if size > maxHeader {
		return x, x.invalid("", "the index has %d bytes, want at most %d", size, maxHeader)
	}
	text, err := x.readJSON("the index", 0, size)
	if err != nil {
		return x, err
	}
	j := scan(text)
	for key := j.next(); len(key) > 0; key = j.next() {
		if value := j.next(); string(unquote(key)) == "weight_map" {
			if x.tensors != nil {
				return x, x.invalid("", "the index has the key %q twice", "weight_map")
			}
			x.tensors = value
		}
	}
	if x.tensors == nil {
		return x, x.invalid("", "the index has no weight_map")
	}
	return x, x.wantList("", "weight_map", x.tensors, '{')
}

// each calls do with the tensors and their files, until it returns an error.
func (x index) each(do func(tensor, file string) error) error {
	j := scan(x.tensors)
	for key := j.next(); len(key) > 0; key = j.next() {
		tensor, value := string(unquote(key)), j.next()
		if value[0] != '"' {
			return x.invalid("", "the file of tensor %s is %s, want a string", quote(tensor), describe(value))
		}
		if err := do(tensor, string(unquote(value))); err != nil {
			return err
		}
	}
	return nil
}

// files returns the names of the files.
func (x index) files() ([]string, error) {
	names := map[string]bool{}
	err := x.each(func(_, file string) error {
		names[path.Clean(file)] = true
		return nil
	})
	return slices.Sorted(maps.Keys(names)), err
}

// modelFiles returns the names of the files, or an error if they are only some parts of a model.
func (x index) modelFiles() ([]string, error) {
	names, err := x.files()
	if err == nil && len(names) == 0 {
		err = x.invalid("", "weight_map has no tensor")
	}
	for _, m := range groupFiles(names, nil) {
		if n := len(m.missing); n > 0 && err == nil {
			err = x.invalid("", "weight_map has no tensor of %d of the %d parts of the model: %s", n, n+len(m.parts), list(m.missing))
		}
	}
	return names, err
}

// openIndexed opens the files that an index names, and takes each tensor from its file.
func (m *Model) openIndexed(path string) error {
	x, err := readIndex(m.in, path)
	if err != nil {
		return err
	}
	names, err := x.modelFiles()
	if err != nil {
		return err
	}
	m.openAhead(filepath.Dir(path), names)
	files := map[string]*File{}
	err = x.each(func(tensor, name string) (err error) {
		if m.byName[tensor] != nil {
			return x.invalid("", "weight_map has the key %s twice", quote(tensor))
		}
		f := files[name]
		if f == nil {
			if f, err = m.openNamed(x.source, tensor, name); err != nil {
				return err
			}
			files[name] = f
		}
		if m.byName[tensor] = f.byName[tensor]; m.byName[tensor] == nil {
			return f.invalid(tensor, "the file has no such tensor, %s says that it has", path)
		}
		return nil
	})
	slices.SortFunc(m.files, func(f, g *File) int { return strings.Compare(f.name, g.name) })
	return err
}

// openNamed opens the file that an index names for a tensor.
func (m *Model) openNamed(index source, tensor, name string) (*File, error) {
	name = filepath.FromSlash(name)
	if !filepath.IsLocal(name) {
		return nil, index.invalid(tensor, "its file is %s, want a path within the index's directory", quote(name))
	}
	dir := filepath.Dir(index.name)
	path := filepath.Join(dir, name)
	if outsideOf(m.in, dir, filepath.Dir(path)) {
		return nil, index.invalid(tensor, "its file is %s, whose folder is a link out of the index's directory", quote(name))
	}
	f, err := m.open(path)
	if err != nil {
		return nil, fmt.Errorf("%w (named by the index %s)", err, index.name)
	}
	return f, nil
}
