package transfer

import (
	"bytes"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
)

// A readSeekerAt can be read at any offset, and has a position of its own.
type readSeekerAt interface {
	io.ReaderAt
	io.Seeker
}

// positioned returns a reader whose Read is ReadAt at its position, so that several
// goroutines can read it. Only these types are known to be so: another one that has
// ReadAt and Seek may have them from a file that it embeds, and a Read of its own. Pipes
// and devices, which are files too, have no position.
func positioned(r io.Reader) (readSeekerAt, bool) {
	if f, ok := fileOf(r); ok {
		info, err := f.Stat()
		return f, err == nil && info.Mode().IsRegular()
	}
	switch r := r.(type) {
	case *bytes.Reader:
		return r, true
	case *strings.Reader:
		return r, true
	case *io.SectionReader:
		return r, true
	}
	return nil, false
}

// fileOf returns the file that r is. io.Copy does not pass a file itself to a
// [Writer]: it calls the file's WriteTo first, which passes the file in a struct of
// package os.
func fileOf(r io.Reader) (*os.File, bool) {
	if f, ok := r.(*os.File); ok {
		return f, true
	}
	if t := reflect.TypeOf(r); t.Kind() != reflect.Struct || t.PkgPath() != "os" {
		return nil, false
	}
	field := reflect.ValueOf(r).FieldByName("File")
	if !field.IsValid() || !field.CanInterface() {
		return nil, false
	}
	f, ok := field.Interface().(*os.File)
	return f, ok
}

// atPosition calls copies with the position of s, and moves it by what they return.
func atPosition(s io.Seeker, n int, copies func(off int64) (int, error)) (int, error) {
	off, err := s.Seek(0, io.SeekCurrent)
	if err == nil {
		err = checkOffset(off, n)
	}
	if err != nil {
		return 0, err
	}
	done, err := copies(off)
	if done > 0 {
		if _, failed := s.Seek(off+int64(done), io.SeekStart); failed != nil {
			err = errors.Join(err, failed)
		}
	}
	return done, err
}
