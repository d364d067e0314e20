//go:build linux

package benchmarks

import (
	"errors"
	"io"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// BenchmarkFiles is files in the page cache, in memory and on disk, to a GPU and back.
func BenchmarkFiles(b *testing.B) { bench(b, "Files") }

var _ = func() bool {
	const n = 2 * gib
	for _, folder := range []string{cached, shm} {
		quick := folder == cached
		add("Files",
			row{name: folder + "/upload/2GiB", cpu: true, quick: quick, twoCores: quick, prepare: uploadFile(folder, n, readAt)},
			row{name: folder + "/upload-reader/2GiB", cpu: true, prepare: uploadFile(folder, n, reader)},
			row{name: folder + "/download/2GiB", cpu: true, prepare: downloadFile(folder, n)})
	}
	return add("Files",
		row{name: "shm/download-new/2GiB", cpu: true, prepare: downloadNewFile(n)},
		row{name: "shm/download-new/512MiB", cpu: true, prepare: downloadNewFile(512 * mib)},
		row{name: "cached/upload-opaque-reader/256MiB", prepare: uploadFile(cached, 256*mib, opaqueReader)},
		row{name: "on-disk/upload/256MiB", prepare: uploadFromDisk(256 * mib)})
}()

// A fileMethod is a method of reading a file.
type fileMethod int

const (
	readAt       fileMethod = iota // at offsets, by several goroutines
	reader                         // as an io.Reader, which is a file
	opaqueReader                   // as an io.Reader of another type
)

// uploadOf copies n bytes of a file to the first GPU.
func uploadOf(f *fixture, file *os.File, n int, method fileMethod) task {
	dev, dst, c := f.memoryAndCopier()
	op := func() error { _, err := c.UploadFrom(ctx, dst, file, 0, n); return err }
	if method != readAt {
		op = func() error {
			if _, err := file.Seek(0, io.SeekStart); err != nil {
				return err
			}
			var r io.Reader = file
			if method == opaqueReader {
				r = struct{ io.Reader }{file}
			}
			_, err := c.UploadReader(ctx, dst, r, n)
			return err
		}
	}
	return task{bytes: n, op: op, verify: uploaded(dev, dst, n, func() []byte { return f.source()[:n] })}
}

func uploadFile(folder string, n int, method fileMethod) func(*fixture) task {
	return func(f *fixture) task {
		return uploadOf(f, f.sharedFile(folder, "source", nil, 0, f.size(2*gib)), f.size(n), method)
	}
}

// uploadFromDisk copies a file whose pages were removed from the page cache. The file is not that of
// other rows.
func uploadFromDisk(n int) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		file := f.sharedFile(cached, "dropped", nil, 0, n)
		t := uploadOf(f, file, n, readAt)
		t.before = func() error {
			stay, err := dropPages(file, n)
			if err == nil && stay > 0 {
				f.Skipf("the file system of %s keeps %d pages of a file in memory", f.dir(), stay)
			}
			return err
		}
		f.check(t.before())
		return t
	}
}

// dropPages removes a file's pages from the page cache, and returns the number that stay: all, on file
// systems that are in memory.
func dropPages(f *os.File, n int) (stay int, err error) {
	if err := f.Sync(); err != nil {
		return 0, err
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, os.NewSyscallError("fadvise", err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, os.NewSyscallError("mmap", err)
	}
	resident := make([]byte, (n+os.Getpagesize()-1)/os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(n), uintptr(unsafe.Pointer(&resident[0])))
	if errno != 0 {
		err = os.NewSyscallError("mincore", errno)
	}
	for _, b := range resident {
		stay += int(b & 1)
	}
	return stay, errors.Join(err, unmap(mem))
}

func downloadFile(folder string, n int) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		file := f.ownFile(folder, n)
		dev, src, c := f.memoryAndCopier()
		return task{bytes: n, op: func() error { _, err := c.DownloadTo(ctx, file, 0, src, n); return err },
			verify: f.downloaded(dev, src, n, func() ([]byte, error) {
				got := f.target()[:n]
				_, err := file.ReadAt(got, 0)
				return got, err
			})}
	}
}

// downloadNewFile copies into a file in memory that has no pages yet.
func downloadNewFile(n int) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		file := f.ownFile(shm, n)
		dev, src, c := f.memoryAndCopier()
		before := func() error { return file.Truncate(0) }
		verify := f.downloaded(dev, src, n, func() ([]byte, error) {
			got := f.target()[:n]
			_, err := file.ReadAt(got, 0)
			return got, err
		})
		return task{bytes: n, before: before, op: func() error { _, err := c.DownloadTo(ctx, file, 0, src, n); return err },
			verify: func(op func() error) error { return errors.Join(before(), verify(op)) }}
	}
}
