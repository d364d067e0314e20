package hostinfo

import (
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// maxText bounds what is read of one file: nothing in /proc or /sys that is
// read here comes near it, and a captured host may be anything.
const maxText = 4 << 20

// files reads one host's tree. Its methods answer the zero value for whatever
// cannot be read.
type files struct{ fsys fs.FS }

// text is the whole of a file, at most maxText bytes of it.
func (f files) text(name string) string {
	file, err := f.fsys.Open(name)
	if err != nil {
		return ""
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxText))
	if err != nil {
		return "" // half a file would be read as a whole one
	}
	return string(b)
}

// line is the first line of a file without the space around it.
func (f files) line(name string) string {
	first, _, _ := strings.Cut(f.text(name), "\n")
	return strings.TrimSpace(first)
}

// exists reports whether something has this name. A name that may not be
// looked at exists.
func (f files) exists(name string) bool {
	_, err := fs.Stat(f.fsys, name)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// names lists a folder in natural order: node2 before node10.
func (f files) names(dir string) []string {
	entries, _ := fs.ReadDir(f.fsys, dir)
	out := make([]string, 0, len(entries))
	for _, e := range entries {
		out = append(out, e.Name())
	}
	slices.SortFunc(out, compareNatural)
	return out
}

// realPath follows the symbolic link that name is; a name that is none, or a
// link that leads out of the tree, stays as it is.
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

// numbered splits name into prefix and the number that follows it.
func numbered(name, prefix string) (int, bool) {
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok || rest == "" || rest[0] < '0' || rest[0] > '9' {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil
}

// compareNatural orders names by their text, and by the number at their end
// where the text is the same.
func compareNatural(a, b string) int {
	stemA, numA := cutNumber(a)
	stemB, numB := cutNumber(b)
	if c := strings.Compare(stemA, stemB); c != 0 {
		return c
	}
	if numA != numB {
		if numA < numB {
			return -1
		}
		return 1
	}
	return strings.Compare(a, b)
}

func cutNumber(s string) (stem string, n int) {
	stem = strings.TrimRight(s, "0123456789")
	n, err := strconv.Atoi(s[len(stem):])
	if err != nil {
		return stem, -1
	}
	return stem, n
}
