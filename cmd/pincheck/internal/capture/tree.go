package capture

import (
	"errors"
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
)

// Files is the file system of the host. An fstest.MapFS looks at each of its entries to find that a
// file is missing, which takes a stranger's archive of many devices from milliseconds to a minute.
func (a *Archive) Files() fs.FS {
	t := &tree{files: a.Host, dirs: map[string]fstest.MapFS{".": {}}}
	directory := &fstest.MapFile{Mode: fs.ModeDir | 0o555}
	for name, file := range a.Host {
		for ; name != "."; name, file = path.Dir(name), directory {
			dir, base := path.Dir(name), path.Base(name)
			if t.dirs[dir] == nil {
				t.dirs[dir] = fstest.MapFS{}
			}
			if file != directory || t.dirs[dir][base] == nil {
				t.dirs[dir][base] = file
			}
		}
	}
	return t
}

// A tree is a MapFS for each directory, of what is in it. Paths and links mean what they mean in the MapFS of all files.
type tree struct {
	files fstest.MapFS
	dirs  map[string]fstest.MapFS
}

// find returns the directory of a file whose links are followed, and its name there.
func (t *tree) find(op, name string) (dir, base string, err error) {
	if fs.ValidPath(name) {
		real := name
		for range maxLinks {
			next, link := follow(t.files, real)
			if !link {
				dir, base = path.Dir(real), path.Base(real)
				if real == "." || t.dirs[dir][base] != nil {
					return dir, base, nil
				}
				break
			}
			if next == "" {
				break // out of the host
			}
			real = next
		}
	}
	return "", "", &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
}

// Open implements fs.FS. Directories are read by ReadDir.
func (t *tree) Open(name string) (fs.File, error) {
	dir, base, err := t.find("open", name)
	if err != nil {
		return nil, err
	}
	return t.dirs[dir].Open(base)
}

// ReadDir implements fs.ReadDirFS.
func (t *tree) ReadDir(name string) ([]fs.DirEntry, error) {
	dir, base, err := t.find("readdir", name)
	if err != nil {
		return nil, err
	}
	if file := t.dirs[dir][base]; file != nil && !file.Mode.IsDir() {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errors.New("not a directory")}
	}
	return t.dirs[path.Join(dir, base)].ReadDir(".")
}

// ReadLink implements fs.ReadLinkFS.
func (t *tree) ReadLink(name string) (string, error) {
	dir, base, err := t.findLink("readlink", name)
	if err != nil {
		return "", err
	}
	return t.dirs[dir].ReadLink(base)
}

// Lstat implements fs.ReadLinkFS.
func (t *tree) Lstat(name string) (fs.FileInfo, error) {
	dir, base, err := t.findLink("lstat", name)
	if err != nil {
		return nil, err
	}
	return t.dirs[dir].Lstat(base)
}

// findLink is find, but for a link at the end of the path, which may be missing.
func (t *tree) findLink(op, name string) (dir, base string, err error) {
	dir, base, err = t.find(op, path.Dir(name))
	if err == nil && !fs.ValidPath(name) {
		err = &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return path.Join(dir, base), path.Base(name), err
}

// follow replaces the first link in a path by its target, "" for one that leaves the host.
func follow(host fstest.MapFS, name string) (next string, link bool) {
	for end := range len(name) {
		if end+1 < len(name) && name[end+1] != '/' {
			continue
		}
		at, rest := name[:end+1], name[end+1:]
		if file := host[at]; file != nil && file.Mode&fs.ModeSymlink != 0 {
			next = path.Join(path.Dir(at), string(file.Data)) + rest
			if strings.HasPrefix(string(file.Data), "/") || !fs.ValidPath(next) {
				next = ""
			}
			return next, true
		}
	}
	return "", false
}
