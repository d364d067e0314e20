package main

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
)

// checkFile returns the error that writeFile would have now, where the directory does not
// exist or may not be written. It leaves nothing, and does not open a pipe: when that is closed, its
// reader has reached the end.
func checkFile(path string) error {
	if special(path) {
		if info, err := os.Stat(path); err == nil && info.Mode().Type() == fs.ModeNamedPipe {
			return nil
		}
		f, err := openSpecial(path)
		if err != nil {
			return err
		}
		return f.Close()
	}
	f, err := beside(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// writeFile writes a file that appears whole or not at all: data is written to a new file
// beside it, which then takes its name. A file of that name is replaced, with its
// permissions; a symbolic link is followed. Devices and pipes are written directly; a pipe that no
// program reads is an error.
func writeFile(path string, data []byte) error {
	if special(path) {
		f, err := openSpecial(path)
		if err != nil {
			return err
		}
		_, err = f.Write(data)
		return errors.Join(err, f.Close())
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	f, err := beside(path)
	if err != nil {
		return err
	}
	if old, statErr := os.Stat(path); statErr == nil {
		err = f.Chmod(old.Mode().Perm())
	}
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// special reports whether path exists and cannot be replaced by renaming: a device, a pipe
// or a socket.
func special(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.Mode().IsRegular() && !info.IsDir()
}

// openSpecial opens what special reports. Without O_NONBLOCK, opening a pipe would wait for a reader, and
// no signal would end the program.
func openSpecial(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) {
		err = fmt.Errorf("%s is a pipe or a socket that no program reads", path)
	}
	return f, err
}

// beside creates a new file in the directory of path, with the permissions that the umask
// leaves.
func beside(path string) (*os.File, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil, fmt.Errorf("%s is a directory", path)
	}
	dir, name := filepath.Split(path)
	for range 100 {
		f, err := os.OpenFile(fmt.Sprintf("%s.%s.%08x.tmp", dir, name, rand.Uint32()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if failed := (*fs.PathError)(nil); errors.As(err, &failed) {
			failed.Path = path // the name that the caller knows
		}
		if !errors.Is(err, fs.ErrExist) {
			return f, err
		}
	}
	return nil, fmt.Errorf("no free name beside %s", path)
}
