package capture

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing/fstest"
)

// Files is the file system of the host. An fstest.MapFS looks at each of its entries to find that a
// file is missing, which takes a stranger's archive of many devices from milliseconds to a minute.
func (a *Archive) Files() fs.FS {
	t := &tree{files: a.Host, dirs: map[string][]string{".": nil}}
	for name := range a.Host {
		for name != "." {
			dir := path.Dir(name)
			_, known := t.dirs[dir]
			t.dirs[dir] = append(t.dirs[dir], path.Base(name))
			if known {
				break
			}
			name = dir
		}
	}
	for dir, names := range t.dirs {
		slices.Sort(names)
		t.dirs[dir] = slices.Compact(names)
	}
	return t
}

// A tree is a MapFS with the names in each directory. Paths and links mean what they mean there.
type tree struct {
	files fstest.MapFS
	dirs  map[string][]string
}

// find returns a file by its path without links; nil is a directory without an entry of its own.
func (t *tree) find(op, name string) (file *fstest.MapFile, real string, err error) {
	if fs.ValidPath(name) {
		real = name
		for range maxLinks {
			next, link := follow(t.files, real)
			if !link {
				file = t.files[real]
				if _, isDir := t.dirs[real]; file != nil || isDir {
					return file, real, nil
				}
				break
			}
			if next == "" {
				break // out of the host
			}
			real = next
		}
	}
	return nil, "", &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
}

// alone returns a file system of one file, or of one directory without its files.
func alone(file *fstest.MapFile, real string) fstest.MapFS {
	if file == nil {
		file = &fstest.MapFile{Mode: fs.ModeDir | 0o555}
	}
	return fstest.MapFS{real: file}
}

// Open implements fs.FS. Directories are read by ReadDir.
func (t *tree) Open(name string) (fs.File, error) {
	file, real, err := t.find("open", name)
	if err != nil {
		return nil, err
	}
	return alone(file, real).Open(real)
}

// Stat implements fs.StatFS.
func (t *tree) Stat(name string) (fs.FileInfo, error) {
	file, real, err := t.find("stat", name)
	if err != nil {
		return nil, err
	}
	return alone(file, real).Stat(real)
}

// ReadDir implements fs.ReadDirFS.
func (t *tree) ReadDir(name string) ([]fs.DirEntry, error) {
	file, real, err := t.find("readdir", name)
	if err != nil {
		return nil, err
	}
	if file != nil && !file.Mode.IsDir() {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errors.New("not a directory")}
	}
	entries := make([]fs.DirEntry, 0, len(t.dirs[real]))
	for _, base := range t.dirs[real] {
		below := path.Join(real, base)
		info, err := alone(t.files[below], below).Lstat(below)
		if err != nil {
			return nil, err
		}
		entries = append(entries, fs.FileInfoToDirEntry(info))
	}
	return entries, nil
}

// ReadLink implements fs.ReadLinkFS.
func (t *tree) ReadLink(name string) (string, error) {
	file, _, err := t.findLink("readlink", name)
	if err != nil {
		return "", err
	}
	if file == nil || file.Mode&fs.ModeSymlink == 0 {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return string(file.Data), nil
}

// Lstat implements fs.ReadLinkFS.
func (t *tree) Lstat(name string) (fs.FileInfo, error) {
	file, real, err := t.findLink("lstat", name)
	if err != nil {
		return nil, err
	}
	return alone(file, real).Lstat(real)
}

// findLink is find, but for a link at the end of the path.
func (t *tree) findLink(op, name string) (file *fstest.MapFile, real string, err error) {
	_, dir, err := t.find(op, path.Dir(name))
	if err == nil {
		real = path.Join(dir, path.Base(name))
		if file = t.files[real]; file != nil && file.Mode&fs.ModeSymlink != 0 {
			return file, real, nil
		}
	}
	return t.find(op, name)
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
