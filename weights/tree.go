package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/gopinned/pinned/internal/bounded"
)

// system is the file system of the operating system. Its paths are those of package filepath, as all paths here are;
// pathIn converts them for other file systems.
type system struct{}

// Open refuses all but regular files before it opens them, because opening a pipe waits for a writer.
func (in system) Open(path string) (fs.File, error) {
	info, err := in.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, notRegular(path, info)
	}
	return os.Open(path)
}

// Stat names the target of a symbolic link to nothing, which is not a missing name: caches are full of links.
func (system) Stat(path string) (fs.FileInfo, error) {
	info, err := os.Stat(path)
	if to, linkErr := os.Readlink(path); linkErr == nil && errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%w (it is a symbolic link to %s)", err, to)
	}
	return info, err
}

func (system) ReadDir(dir string) ([]fs.DirEntry, error) { return os.ReadDir(cmp.Or(dir, ".")) }

func isSystem(in fs.FS) bool {
	_, ok := in.(system)
	return ok
}

func pathIn(in fs.FS, name string) string {
	if isSystem(in) {
		return name
	}
	return path.Clean(filepath.ToSlash(name))
}

func isDir(in fs.FS, name string) (bool, error) {
	if name = pathIn(in, name); name == "." {
		return true, nil
	}
	info, err := fs.Stat(in, name)
	if err != nil {
		return false, fmt.Errorf("weights: %w", err)
	}
	return info.IsDir(), nil
}

type readerCloser interface {
	io.ReaderAt
	io.Closer
}

// openRegular opens a regular file, and returns its size.
func openRegular(in fs.FS, name string) (readerCloser, int64, error) {
	var f fs.File
	err := bounded.Guard(func() (err error) {
		f, err = in.Open(pathIn(in, name))
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("weights: %w", err)
	}
	r, ok := f.(readerCloser)
	info, err := f.Stat() // the path may name another file by now
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = notRegular(name, info)
	case !ok:
		err = fmt.Errorf("open %s: %T has no ReadAt: want a file system whose files can be read at offsets", name, f)
	default:
		return r, info.Size(), nil
	}
	return nil, 0, errors.Join(fmt.Errorf("weights: %w", err), f.Close())
}

func notRegular(path string, info fs.FileInfo) error {
	return fmt.Errorf("open %s: not a regular file (%v)", path, info.Mode().Type())
}

// outsideOf reports whether symbolic links lead from a directory to a folder outside of it. A link to a file may lead out
// of the directory: Hugging Face's cache has its files elsewhere. A path that does not exist is reported when the file is
// opened.
func outsideOf(in fs.FS, dir, folder string) bool {
	if !isSystem(in) {
		return false
	}
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

// errUnlisted is the error of a file system that does not list its files.
var errUnlisted = errors.New("does not list its files")

func entriesOf(in fs.FS, dir string) ([]fs.DirEntry, error) {
	if l, ok := in.(fs.ReadDirFS); ok {
		return l.ReadDir(dir)
	}
	f, err := in.Open(dir)
	if err != nil {
		return nil, errUnlisted
	}
	defer f.Close()
	if l, ok := f.(fs.ReadDirFile); ok {
		return l.ReadDir(-1)
	}
	return nil, errUnlisted
}

// namesIn returns the names in a directory but those of folders: those that exist, or else those that a model may
// have, if the file system does not list them. file is the name that the model is opened by, "" for the directory.
func namesIn(in fs.FS, dir, file string) (names []string, err error) {
	entries, err := entriesOf(in, pathIn(in, dir))
	if errors.Is(err, errUnlisted) || errors.Is(err, errors.ErrUnsupported) {
		return likelyNames(in, dir, file)
	}
	if err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	for _, entry := range entries {
		folder, name := entry.IsDir(), entry.Name()
		if entry.Type()&fs.ModeSymlink != 0 && (weightsName.MatchString(name) || indexName.MatchString(name)) {
			info, err := fs.Stat(in, pathIn(in, filepath.Join(dir, name))) // opening reports a link to nothing
			folder = err == nil && info.IsDir()
		}
		if !folder {
			names = append(names, name)
		}
	}
	return names, nil
}

// likelyNames returns the names of a model's files in a directory that is not listed: all parts by the name of one, or
// the usual names of a model.
func likelyNames(in fs.FS, dir, file string) (names []string, err error) {
	if file != "" {
		p := partOf(file)
		return append(p.missing([]part{p}), file), nil
	}
	for _, name := range []string{usualIndex, usualFile} {
		f, err := in.Open(pathIn(in, dir+name))
		if err == nil {
			return []string{name}, f.Close()
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) { // object stores refuse missing names
			return nil, fmt.Errorf("weights: %w", err)
		}
	}
	return nil, fmt.Errorf("weights: open %s: %w: neither %s nor %s, and the file system lists no files: open the model by the name of its index or of a file", pathIn(in, dir), fs.ErrNotExist, usualIndex, usualFile)
}

// opened is the result of opening a file.
type opened struct {
	path string
	file *File
	err  error
}

// opensAtOnce is the number of files that are opened at once where that may take round trips to a server.
const opensAtOnce = 8

// openAhead opens files of other file systems than the operating system's, several at once. open returns them, or
// closeAhead closes them.
func (m *Model) openAhead(dir string, names []string) {
	if isSystem(m.in) || len(names) <= 1 {
		return
	}
	all := make([]opened, len(names))
	_ = bounded.ForEach(context.Background(), len(names), 1, opensAtOnce, func(_ context.Context, i, _ int) error {
		if name := filepath.FromSlash(names[i]); filepath.IsLocal(name) {
			all[i].path = filepath.Join(dir, name)
			all[i].file, all[i].err = openFile(m.in, all[i].path)
		}
		return all[i].err // no more are opened: an index may name a million files that are missing
	})
	m.ahead = map[string]opened{}
	for _, o := range all {
		if o.file != nil || o.err != nil {
			m.ahead[o.path] = o
		}
	}
}

// open opens a file of the model.
func (m *Model) open(path string) (*File, error) {
	o, ok := m.ahead[filepath.Clean(path)]
	if ok {
		delete(m.ahead, filepath.Clean(path))
	} else {
		o.file, o.err = openFile(m.in, path)
	}
	if o.err == nil {
		m.files = append(m.files, o.file)
	}
	return o.file, o.err
}

// closeAhead closes files that were opened and not used.
func (m *Model) closeAhead() (err error) {
	for _, o := range m.ahead {
		if o.file != nil {
			err = errors.Join(err, o.file.Close())
		}
	}
	m.ahead = nil
	return err
}
