package hostinfo

import (
	"cmp"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// maxText limits what is read of one file. Files of /proc and /sys are far smaller; a
// captured host can contain anything.
const maxText = 4 << 20

// files reads the files of a host. Its methods return zero values for files that cannot
// be read.
type files struct{ fsys fs.FS }

// text returns the contents of a file, at most maxText bytes.
func (f files) text(name string) string {
	file, err := f.fsys.Open(name)
	if err != nil {
		return ""
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxText))
	if err != nil {
		return "" // part of a file could be taken for all of it
	}
	return string(b)
}

// line returns the first line of a file without the space around it.
func (f files) line(name string) string {
	first, _, _ := strings.Cut(f.text(name), "\n")
	return strings.TrimSpace(first)
}

// flag returns what a file of a switch has, Y or 1 for on and N or 0 for off; nil for anything else.
func (f files) flag(name string) *bool {
	text := f.line(name)
	on := text == "Y" || text == "1"
	if !on && text != "N" && text != "0" {
		return nil
	}
	return &on
}

// exists reports whether a file or directory exists. One that cannot be read for lack of
// permission exists.
func (f files) exists(name string) bool {
	_, err := fs.Stat(f.fsys, name)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// isFile reports whether a regular file can be opened.
func (f files) isFile(name string) bool {
	file, err := f.fsys.Open(name)
	if err != nil {
		return false
	}
	defer file.Close()
	info, err := file.Stat()
	return err == nil && info.Mode().IsRegular()
}

// names returns the names in a directory in natural order: node2 before node10.
func (f files) names(dir string) []string {
	entries, _ := fs.ReadDir(f.fsys, dir)
	out := make([]string, 0, len(entries))
	for _, e := range entries {
		out = append(out, e.Name())
	}
	slices.SortFunc(out, compareNatural)
	return out
}

// realPath returns the target of a symbolic link. It returns a name unchanged that is
// not a link, or a link out of the tree.
func (f files) realPath(name string) string {
	target, err := fs.ReadLink(f.fsys, name)
	if err != nil {
		return name
	}
	if path.IsAbs(target) {
		target = strings.TrimPrefix(path.Clean(target), "/")
	} else {
		target = path.Join(path.Dir(name), target)
	}
	if !fs.ValidPath(target) {
		return name
	}
	return target
}

// numbered returns the number that follows the prefix in a name.
func numbered(name, prefix string) (int, bool) {
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok || rest == "" || rest[0] < '0' || rest[0] > '9' {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil
}

// compareNatural compares names by their text, and then by the number at their end.
func compareNatural(a, b string) int {
	stemA, numA := cutNumber(a)
	stemB, numB := cutNumber(b)
	return cmp.Or(strings.Compare(stemA, stemB), cmp.Compare(numA, numB), strings.Compare(a, b))
}

func cutNumber(s string) (stem string, n int) {
	stem = strings.TrimRight(s, "0123456789")
	n, err := strconv.Atoi(s[len(stem):])
	if err != nil {
		return stem, -1
	}
	return stem, n
}
