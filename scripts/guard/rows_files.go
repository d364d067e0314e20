package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Files in the page cache, in memory and on disk, to a GPU and back.
func init() {
	const n = 2 * gib
	for _, folder := range []string{cached, shm} {
		up, down := inC("transfer Files/cached/upload/2GiB/"), inC("")
		if folder == shm {
			up, down = inC("transfer Files/shm/upload/2GiB/"), inC("transfer Files/shm/download/2GiB/")
		}
		quick := folder == cached
		register(
			row{name: "files/" + folder + "/upload/2GiB", unit: "GB/s", cpu: true, quick: quick, twoCores: quick, target: 80 * time.Millisecond, c: up,
				prepare: uploadFile(folder, n, readAt)},
			row{name: "files/" + folder + "/upload-reader/2GiB", unit: "GB/s", cpu: true, target: 80 * time.Millisecond, prepare: uploadFile(folder, n, reader)},
			row{name: "files/" + folder + "/download/2GiB", unit: "GB/s", cpu: true, target: 80 * time.Millisecond, c: down, prepare: downloadFile(folder, n)},
		)
	}
	register(
		row{name: "files/cached/upload-opaque-reader/256MiB", unit: "GB/s", prepare: uploadFile(cached, 256*mib, opaqueReader)},
		row{name: "files/on-disk/upload/256MiB", unit: "GB/s", prepare: uploadFromDisk(256 * mib)},
	)
}

// A fileMethod is a method of reading a file.
type fileMethod int

const (
	readAt       fileMethod = iota // at offsets, by several goroutines
	reader                         // as an io.Reader, which is a file
	opaqueReader                   // as an io.Reader of which nothing more is known
)

// uploadOf is a task that copies n bytes of a file to the first GPU.
func uploadOf(f *fixture, file *os.File, n int, method fileMethod) (*task, error) {
	dev, dst, c, err := f.memoryAndCopier()
	if err != nil {
		return nil, err
	}
	op := func() error { _, err := c.UploadFrom(f.ctx, dst, file, 0, n); return err }
	if method != readAt {
		op = func() error {
			if _, err := file.Seek(0, io.SeekStart); err != nil {
				return err
			}
			var r io.Reader = file
			if method == opaqueReader {
				r = struct{ io.Reader }{file}
			}
			_, err := c.UploadReader(f.ctx, dst, r, n)
			return err
		}
	}
	return &task{bytes: n, op: op, close: file.Close, verify: func() error {
		return f.checkUpload(dev, dst, n, op, func() []byte { return f.source()[:n] })
	}}, nil
}

func uploadFile(folder string, n int, method fileMethod) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		file, err := f.sharedFile(folder, "source", nil, 0, f.size(2*gib))
		if err != nil {
			return nil, err
		}
		t, err := uploadOf(f, file, f.size(n), method)
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		return t, nil
	}
}

// uploadFromDisk copies a file whose pages were removed from the page cache. The file is not that of
// other rows.
func uploadFromDisk(n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		file, err := f.sharedFile(cached, "dropped", nil, 0, n)
		if err != nil {
			return nil, err
		}
		t, err := uploadOf(f, file, n, readAt)
		if err == nil {
			t.before = func() error {
				stay, err := dropPages(file, n)
				if err == nil && stay > 0 {
					err = leftOut(fmt.Sprintf("the file system of %s keeps %d pages of a file in memory", f.dir, stay))
				}
				return err
			}
			err = t.before()
		}
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		return t, nil
	}
}

func downloadFile(folder string, n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		file, err := f.ownFile(folder, n)
		if err != nil {
			return nil, err
		}
		t, err := downloadOf(f, file, n)
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		return t, nil
	}
}

func downloadOf(f *fixture, file *os.File, n int) (*task, error) {
	dev, src, c, err := f.memoryAndCopier()
	if err != nil {
		return nil, err
	}
	op := func() error { _, err := c.DownloadTo(f.ctx, file, 0, src, n); return err }
	return &task{bytes: n, op: op, close: file.Close, verify: func() error {
		want, err := f.putPattern(dev, src, n)
		if err == nil {
			err = op()
		}
		if err != nil {
			return err
		}
		got := f.target()[:n]
		if _, err := file.ReadAt(got, 0); err != nil {
			return err
		}
		return want.check(got)
	}}, nil
}
