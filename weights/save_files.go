package weights

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/ntcopy"
)

// stem returns the name of a file of a model without its folder and suffix.
func stem(path string) string { return strings.TrimSuffix(filepath.Base(path), ".safetensors") }

// indexPath returns the path of the index beside the file of a model.
func indexPath(path string) string {
	return filepath.Join(filepath.Dir(path), stem(path)+".safetensors.index.json")
}

// temporary returns a new name for a file that will get the stem's name. The pattern without random is that of all.
func temporary(path, random string) string {
	return filepath.Join(filepath.Dir(path), "."+stem(path)+"."+random+".tmp")
}

// create makes the temporary files, with room for their bytes.
func (s *Saving) create() error {
	s.clean()
	size := int64(0)
	for _, f := range s.files {
		size += f.size
	}
	dir := filepath.Dir(s.path)
	if free, known := freeSpace(dir); known && free < size {
		return fmt.Errorf("%s has %d bytes free, the files have %d: %w", dir, free, size, errNoSpace)
	}
	for _, f := range s.files {
		if err := s.createTemporary(f); err != nil {
			return err
		}
		var err error
		if f.mapped, err = reserve(f.temp, f.size); err != nil {
			return fmt.Errorf("%s: reserve %d bytes: %w", f.temp.Name(), f.size, err)
		}
	}
	return nil
}

// createTemporary makes a file for discard to remove.
func (s *Saving) createTemporary(f *savedFile) error {
	for range 100 {
		file, err := os.OpenFile(temporary(s.path, rand.Text()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if err != nil {
			return err
		}
		if locked := lock(file); locked != isLocked && named(file) {
			f.temp = file
			return s.changed(change{call: "create", path: file.Name()})
		}
		_ = file.Close() // another save took it for one that is left, before it was locked, and removes it
	}
	return errors.New("other processes remove the temporary file again and again")
}

// writeAt writes bytes, by the mapping where there is one, and without the page cache where that was asked for and can
// be done.
func (f *savedFile) writeAt(mem []byte, off int64) (n int, err error) {
	if f.mapped != nil {
		n = len(mem)
		if bounded.Guard(func() error { ntcopy.Copy(f.mapped.Bytes[off:][:n], mem); return nil }) != nil {
			n = 0 // no page is there: writing allocates one, or reports why not
		}
	} else if whole := len(mem) &^ (saveAlign - 1); f.direct != nil && off&(saveAlign-1) == 0 && whole > 0 {
		n, err = f.direct.WriteAt(mem[:whole], off)
		if err != nil && !errors.Is(err, syscall.EINVAL) { // which is an alignment that the device refuses
			return n, err
		}
	}
	more, err := f.temp.WriteAt(mem[n:], off+int64(n))
	return n + more, err
}

// alignedMemory returns memory for O_DIRECT.
func alignedMemory(n int) []byte {
	mem := make([]byte, n+saveAlign)
	return mem[-address(mem)&(saveAlign-1):][:n]
}

func isAligned(mem []byte) bool { return address(mem)&(saveAlign-1) == 0 }

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// named reports whether a file still has its name.
func named(f *os.File) bool {
	a, err := f.Stat()
	b, gone := os.Stat(f.Name())
	return err == nil && gone == nil && os.SameFile(a, b)
}

// clean removes temporary files of saves that were killed: no process has them locked. What cannot be removed stays.
func (s *Saving) clean() {
	left, err := filepath.Glob(temporary(escape.Replace(s.path), "*"))
	if err != nil {
		return
	}
	for _, name := range left {
		file, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if lock(file) == isMine {
			_ = os.Remove(name)
		}
		_ = file.Close()
	}
}

// A locking is the outcome of an attempt to lock a file.
type locking int

const (
	isMine    locking = iota // until it is closed
	isLocked                 // by another process, or by another save of this one
	isUnknown                // the file system has no locks
)

// escape escapes what filepath.Glob takes for a pattern.
var escape = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// publish gives the files, which are on storage, their names. At each moment the path and its directory name the model
// before or the new one.
func (s *Saving) publish() error {
	defer lockDir(filepath.Dir(s.path))()
	before := s.previous()
	if len(s.files) == 1 {
		return s.publishFile(before)
	}
	names, err := s.link()
	if err != nil {
		return err
	}
	if replaced, err := s.writeIndex(names); err != nil {
		if !replaced {
			err = errors.Join(err, removeAll(names))
		}
		return err
	}
	return s.remove(append(before, s.path), names...)
}

// publishFile replaces a model by one file. An index of the model before that names this file would name tensors of
// the new one: it goes first, which leaves the model before if that is this file alone.
func (s *Saving) publishFile(before []string) error {
	index := indexPath(s.path)
	if slices.Contains(before, s.path) {
		if len(before) > 1 {
			return fmt.Errorf("%s names this file among %d of the model before: choose another name", index, len(before))
		}
		if err := s.remove([]string{index}); err != nil {
			return err
		}
	}
	if _, err := s.rename(s.files[0].temp.Name(), s.path); err != nil {
		return err
	}
	if err := s.remove([]string{index}); err != nil {
		return err
	}
	return s.remove(before, s.path)
}

// previous returns the paths of the files beside the index that the index of the model before names.
func (s *Saving) previous() (paths []string) {
	x, err := readIndex(system{}, indexPath(s.path))
	if err != nil {
		return nil // no index exists, or it cannot be loaded
	}
	names, err := x.files()
	if err != nil {
		return nil
	}
	for _, name := range names {
		if name == filepath.Base(name) && strings.HasSuffix(name, ".safetensors") {
			paths = append(paths, filepath.Join(filepath.Dir(s.path), name))
		}
	}
	return paths
}

// link names the files of a model by their numbers, by names that no file has yet.
func (s *Saving) link() (names []string, err error) {
	for generation := 1; ; generation++ {
		name := stem(s.path)
		if generation > 1 {
			name = fmt.Sprintf("%s.%d", name, generation)
		}
		names = nil
		for i, f := range s.files {
			to := filepath.Join(filepath.Dir(s.path), fmt.Sprintf("%s-%05d-of-%05d.safetensors", name, i+1, len(s.files)))
			if err = os.Link(f.temp.Name(), to); err != nil {
				break
			}
			names = append(names, to)
			if err = s.changed(change{"link", to, f.temp.Name()}); err != nil {
				break
			}
		}
		if err == nil {
			err = s.syncDir()
		}
		if err == nil {
			return names, nil
		}
		if failed := removeAll(names); failed != nil || !errors.Is(err, fs.ErrExist) {
			return nil, errors.Join(err, failed)
		}
	}
}

// removeAll removes files that nothing names.
func removeAll(paths []string) error {
	var errs []error
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("left behind: %w", err))
		}
	}
	return errors.Join(errs...)
}

// writeIndex writes the index of files, and reports whether it has replaced the one before.
func (s *Saving) writeIndex(names []string) (replaced bool, err error) {
	files := make(map[string]string)
	for i, f := range s.files {
		for _, t := range f.tensors {
			files[t.Name] = filepath.Base(names[i])
		}
	}
	index, err := json.MarshalIndent(map[string]any{"metadata": map[string]int{"total_size": s.total}, "weight_map": files}, "", "  ")
	if err != nil {
		return false, err
	}
	f := &savedFile{}
	s.files = append(s.files, f)
	if err = s.createTemporary(f); err == nil {
		_, err = f.temp.Write(append(index, '\n'))
	}
	if err == nil {
		err = f.temp.Sync()
	}
	if err == nil {
		err = s.changed(change{call: "fsync", path: f.temp.Name()})
	}
	if err != nil {
		return false, err
	}
	return s.rename(f.temp.Name(), indexPath(s.path))
}

func (s *Saving) rename(from, to string) (renamed bool, err error) {
	if err := os.Rename(from, to); err != nil {
		return false, err
	}
	if err := s.changed(change{"rename", to, from}); err != nil {
		return true, err
	}
	return true, s.syncDir()
}

// remove removes files of the model before, but those that are kept.
func (s *Saving) remove(paths []string, kept ...string) error {
	for _, path := range paths {
		if slices.Contains(kept, path) {
			continue
		}
		err := os.Remove(path)
		if err == nil {
			err = s.changed(change{call: "remove", path: path})
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a file of the model before is left: %w", err)
		}
	}
	return s.syncDir()
}

// syncDir makes the names durable.
func (s *Saving) syncDir() error {
	dir := filepath.Dir(s.path)
	if err := syncDir(dir); err != nil {
		return fmt.Errorf("fsync of %s: %w", dir, err)
	}
	return s.changed(change{call: "fsync", path: dir})
}
