package weights

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
)

// A tree has the files of a model: those of the operating system, or of an [fs.FS]. Paths are those of package
// filepath.
type tree interface {
	isDir(path string) (bool, error)
	// open opens a regular file, and returns its size.
	open(path string) (readerCloser, int64, error)
	// names returns the names in a directory but those of folders: those that exist, or else those that a model may
	// have, if the tree does not list them. file is the name that the model is opened by, "" for the directory.
	names(dir, file string) ([]string, error)
	// realPath returns the path without symbolic links.
	realPath(path string) (string, error)
	// outside reports whether symbolic links lead from a directory to a folder outside of it.
	outside(dir, folder string) bool
	// opensAtOnce is the number of files that are opened at once.
	opensAtOnce() int
}

type readerCloser interface {
	io.ReaderAt
	io.Closer
}

// system is the tree of the operating system.
type system struct{}

func (system) isDir(path string) (bool, error) {
	info, err := os.Stat(path)
	if err != nil {
		return false, statError(path, err)
	}
	return info.IsDir(), nil
}

// open refuses other files before it opens them, because opening a pipe waits for a writer.
func (system) open(path string) (readerCloser, int64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, statError(path, err)
	}
	if !info.Mode().IsRegular() {
		return nil, 0, notRegular(path, info)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("weights: %w", err)
	}
	if info, err = f.Stat(); err != nil { // the path may name another file by now
		return nil, 0, errors.Join(fmt.Errorf("weights: %w", err), f.Close())
	}
	return f, info.Size(), nil
}

func notRegular(path string, info fs.FileInfo) error {
	return fmt.Errorf("weights: open %s: not a regular file (%v)", path, info.Mode().Type())
}

// statError returns the error for a path that stat refuses. Caches are full of links: a link to
// nothing is not a missing name.
func statError(path string, err error) error {
	if to, linkErr := os.Readlink(path); linkErr == nil && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("weights: %w (it is a symbolic link to %s)", err, to)
	}
	return fmt.Errorf("weights: %w", err)
}

func (system) names(dir, _ string) (names []string, err error) {
	if dir == "" {
		dir = "."
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	for _, entry := range entries {
		folder := entry.IsDir()
		if entry.Type()&os.ModeSymlink != 0 && (weightsName.MatchString(entry.Name()) || indexName.MatchString(entry.Name())) {
			info, err := os.Stat(filepath.Join(dir, entry.Name())) // opening reports a link to nothing
			folder = err == nil && info.IsDir()
		}
		if !folder {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

func (system) realPath(path string) (string, error) { return filepath.EvalSymlinks(path) }

// outside: a link to a file may lead out of the directory: Hugging Face's cache has its files elsewhere. What does not
// exist is reported when the file is opened.
func (system) outside(dir, folder string) bool {
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

func (system) opensAtOnce() int { return 1 }

// An fsTree is the tree of an fs.FS.
type fsTree struct{ fs.FS }

// slashed returns a path in the form of package fs.
func slashed(name string) string { return path.Clean(filepath.ToSlash(name)) }

func (t fsTree) isDir(name string) (bool, error) {
	if slashed(name) == "." {
		return true, nil
	}
	info, err := fs.Stat(t.FS, slashed(name))
	if err != nil {
		return false, fmt.Errorf("weights: %w", err)
	}
	return info.IsDir(), nil
}

func (t fsTree) open(name string) (readerCloser, int64, error) {
	f, err := t.Open(slashed(name))
	if err != nil {
		return nil, 0, fmt.Errorf("weights: %w", err)
	}
	r, ok := f.(readerCloser)
	info, err := f.Stat()
	switch {
	case err != nil:
		err = fmt.Errorf("weights: %w", err)
	case !info.Mode().IsRegular():
		err = notRegular(name, info)
	case !ok:
		err = fmt.Errorf("weights: open %s: %T has no ReadAt: want a file system whose files can be read at offsets", name, f)
	default:
		return r, info.Size(), nil
	}
	return nil, 0, errors.Join(err, f.Close())
}

// errUnlisted is the error of a file system that does not list its files.
var errUnlisted = errors.New("does not list its files")

func (t fsTree) list(dir string) ([]fs.DirEntry, error) {
	if l, ok := t.FS.(fs.ReadDirFS); ok {
		return l.ReadDir(dir)
	}
	f, err := t.Open(dir)
	if err != nil {
		return nil, errUnlisted
	}
	defer f.Close()
	if l, ok := f.(fs.ReadDirFile); ok {
		return l.ReadDir(-1)
	}
	return nil, errUnlisted
}

func (t fsTree) names(dir, file string) (names []string, err error) {
	entries, err := t.list(slashed(dir))
	if errors.Is(err, errUnlisted) || errors.Is(err, errors.ErrUnsupported) {
		return t.likely(dir, file)
	}
	if err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// likely returns the names of a model's files in a directory that is not listed: all parts by the name of one, or the
// usual names of a model.
func (t fsTree) likely(dir, file string) (names []string, err error) {
	if file != "" {
		p := partOf(file)
		return append(p.missing([]part{p}), file), nil
	}
	for _, name := range []string{usualIndex, usualFile} {
		f, err := t.Open(slashed(dir + name))
		if err == nil {
			return []string{name}, f.Close()
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) { // object stores refuse missing names
			return nil, fmt.Errorf("weights: %w", err)
		}
	}
	return nil, fmt.Errorf("weights: open %s: %w: neither %s nor %s, and the file system lists no files: open the model by the name of its index or of a file", slashed(dir), fs.ErrNotExist, usualIndex, usualFile)
}

func (fsTree) realPath(path string) (string, error) { return path, nil }

func (fsTree) outside(_, _ string) bool { return false }

// opensAtOnce: to open a file of a server takes round trips.
func (fsTree) opensAtOnce() int { return 8 }

// opened is the result of opening a file.
type opened struct {
	file *File
	err  error
}

// openAll opens files, several at once if the tree prefers that. What is opened so is returned by open, or closed by
// Close.
func (m *Model) openAll(dir string, names []string) {
	atOnce := min(m.in.opensAtOnce(), len(names))
	if atOnce <= 1 {
		return
	}
	m.ahead = map[string]opened{}
	next := make(chan string)
	var mu sync.Mutex
	var running sync.WaitGroup
	for range atOnce {
		running.Go(func() {
			for path := range next {
				f, err := openFile(m.in, path)
				mu.Lock()
				m.ahead[path] = opened{f, err}
				mu.Unlock()
			}
		})
	}
	for _, name := range names {
		if name = filepath.FromSlash(name); filepath.IsLocal(name) {
			next <- filepath.Join(dir, name)
		}
	}
	close(next)
	running.Wait()
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
