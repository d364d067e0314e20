//go:build !linux || android || !(amd64 || arm64)

package shm

import (
	"errors"
	"io/fs"
	"os"
)

// Without Linux no file can be opened, so that nothing else is ever called.

func openTemporary(string, fs.FileMode) (*os.File, error) { return nil, errors.ErrUnsupported }
func openAnonymous(fs.FileMode) (*os.File, error)         { return nil, errors.ErrUnsupported }
func openNamed(string, bool) (*os.File, error)            { return nil, errors.ErrUnsupported }
func reopen(*os.File, bool) (*os.File, error)             { return nil, errors.ErrUnsupported }
func seal(*os.File) error                                 { return errors.ErrUnsupported }
func link(*os.File, string) error                         { return errors.ErrUnsupported }
func closeLocked(f *os.File) error                        { return f.Close() }
func tryLock(*os.File, bool) (bool, error)                { return false, errors.ErrUnsupported }
func lockWriter(*os.File, bool) (bool, error)             { return false, errors.ErrUnsupported }
func reserve(*os.File, int64) error                       { return errors.ErrUnsupported }
func descriptorPath(*os.File) string                      { return "" }

// errNoSpace is in the errors of file systems that are full.
var errNoSpace = errors.New("no space left")

type identity struct{}

func (identity) String() string { return "" }

func identify(fs.FileInfo) (identity, int, int) { return identity{}, -1, 0 }
