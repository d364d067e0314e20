package weights

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	weightsName = regexp.MustCompile(`(?i)\.(safetensors|gguf)$`)
	// partName is the name of part 2 of 3: x-00002-of-00003.gguf. Diffusers has a word before the
	// extension: x-00002-of-00003.fp16.safetensors.
	partName = regexp.MustCompile(`(?i)^(|.*[-_.])(\d{1,5})([-_]of[-_](\d{1,5})(?:\.[^.]+)*\.(?:safetensors|gguf))$`)
	// indexName is the name of an index in a directory: x.safetensors.index.json, of Diffusers'
	// variants also x.safetensors.index.fp16.json.
	indexName = regexp.MustCompile(`(?i)\.index(\.[^.]+)*\.json$`)
)

// isIndex reports whether a file that is opened by its name is an index.
func isIndex(name string) bool { return strings.EqualFold(filepath.Ext(name), ".json") }

// modelFiles are the files of one model in a directory.
type modelFiles struct {
	name    string   // of the file by which it is opened: the index, the first part, or the only file
	parts   []string // the names of the files that are there; without an index by their numbers
	missing []string // the names of parts that are not there
}

// A part is a file as its name describes it. The part of another number has the same key.
type part struct {
	name string
	partKey
	number, count, digits int // digits of the number; all 0 for a file that is no part
}

// A partKey is the name of a part without its number. For a file that is no part, before is the name.
type partKey struct{ before, after string }

func partOf(name string) part {
	m := partName.FindStringSubmatch(name)
	if m == nil {
		return part{name: name, partKey: partKey{before: name}}
	}
	number, _ := strconv.Atoi(m[2]) // of at most five digits
	count, _ := strconv.Atoi(m[4])
	p := part{name, partKey{m[1], m[3]}, number, count, len(m[2])}
	if !p.inRange() {
		p.partKey = partKey{before: name}
	}
	return p
}

// inRange reports whether the number is that of a part.
func (p part) inRange() bool {
	return p.count == 0 && p.digits == 0 || p.number >= 1 && p.number <= p.count
}

// missing returns the names of the parts that are not in a list, which p is in.
func (p part) missing(parts []part) (names []string) {
	there := map[int]bool{}
	for _, p := range parts {
		there[p.number] = true
	}
	for n := 1; n <= p.count && p.inRange(); n++ {
		if !there[n] {
			names = append(names, fmt.Sprintf("%s%0*d%s", p.before, p.digits, n, p.after))
		}
	}
	return names
}

// groupFiles returns the models in a directory by the names of its files and by the files that each
// index names. It sorts them by name. A file is in one model, or in those of several indexes. A part is
// in the model of an index that names another part.
func groupFiles(names []string, indexes map[string][]string) (models []modelFiles) {
	groups, indexed := map[partKey][]part{}, map[partKey][]string{}
	for index, files := range indexes {
		for _, file := range files {
			key := partOf(file).partKey
			indexed[key] = append(indexed[key], index)
		}
	}
	parts := map[string][]string{} // by index
	for _, name := range names {
		p := partOf(name)
		for _, index := range indexed[p.partKey] {
			parts[index] = append(parts[index], name)
		}
		if weightsName.MatchString(name) && len(indexed[p.partKey]) == 0 {
			groups[p.partKey] = append(groups[p.partKey], p)
		}
	}
	for index := range indexes {
		models = append(models, modelFiles{name: index, parts: parts[index]})
	}
	for _, parts := range groups {
		slices.SortFunc(parts, func(p, q part) int {
			return cmp.Or(cmp.Compare(p.number, q.number), strings.Compare(p.name, q.name))
		})
		m := modelFiles{name: parts[0].name, missing: parts[0].missing(parts)}
		for _, p := range parts {
			m.parts = append(m.parts, p.name)
		}
		models = append(models, m)
	}
	slices.SortFunc(models, func(m, n modelFiles) int { return strings.Compare(m.name, n.name) })
	return models
}

// list returns the first of names, for an error.
func list(names []string) string {
	const most = 10
	text := strings.Join(names[:min(len(names), most)], ", ")
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// readIndexes returns the files that each index of a directory names, but for indexes of other files,
// such as pytorch_model.bin.index.json. The error is that of an index by its name that cannot be read.
func readIndexes(in fs.FS, dir string, names []string) (indexes map[string][]string, failed error) {
	indexes = map[string][]string{}
	for _, name := range names {
		if !indexName.MatchString(name) {
			continue
		}
		x, err := readIndex(in, dir+name)
		var files []string
		if err == nil {
			files, err = x.files()
		}
		if err != nil && strings.Contains(strings.ToLower(name), ".safetensors.") {
			failed = cmp.Or(failed, err)
		}
		if err == nil && slices.ContainsFunc(files, weightsName.MatchString) {
			indexes[name] = files
		}
	}
	return indexes, failed
}

// The names that a directory's model has before all others.
const usualIndex, usualFile = "model.safetensors.index.json", "model.safetensors"

// findModel returns the model in a directory, whose path it returns as filepath.Split does.
func findModel(in fs.FS, path string) (dir string, files modelFiles, err error) {
	dir, _ = filepath.Split(filepath.Join(path, "x"))
	names, err := namesIn(in, dir, "")
	if err != nil {
		return dir, files, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, ".") })
	if slices.Contains(names, usualIndex) {
		return dir, modelFiles{name: usualIndex}, nil
	}
	indexes, err := readIndexes(in, dir, names)
	if err != nil {
		return dir, files, err
	}
	models := groupFiles(names, indexes)
	if len(models) == 0 {
		return dir, files, fmt.Errorf("weights: open %s: %w: no safetensors or GGUF model in this directory", path, os.ErrNotExist)
	}
	if usual := slices.IndexFunc(models, func(m modelFiles) bool { return m.name == usualFile }); usual >= 0 {
		models = models[usual:][:1]
	}
	if files, err = onlyModel(path, "the directory has", models); err != nil {
		return dir, files, err
	}
	if real := realPart(in, dir+files.name); real != dir+files.name {
		return modelOf(in, real)
	}
	return dir, files, nil
}

// realPart returns the path of the part that a file of another name is a link to, else the file's path.
func realPart(in fs.FS, path string) string {
	if isSystem(in) && partOf(filepath.Base(path)).count == 0 {
		if real, err := filepath.EvalSymlinks(path); err == nil && partOf(filepath.Base(real)).count > 0 {
			return real
		}
	}
	return path
}

// modelOf returns the model that a file is opened for, and its directory: that of an index, or of a part.
func modelOf(in fs.FS, path string) (dir string, files modelFiles, err error) {
	path = realPart(in, path)
	dir, name := filepath.Split(path)
	alone := modelFiles{name: name, parts: []string{name}}
	if isIndex(name) {
		return dir, alone, nil
	}
	names, err := namesIn(in, dir, name)
	if err != nil {
		return dir, alone, err
	}
	indexes, _ := readIndexes(in, dir, names) // one that cannot be read names no file
	models := slices.DeleteFunc(groupFiles(names, indexes), func(m modelFiles) bool { return !slices.Contains(m.parts, name) })
	if len(models) == 0 { // a name of another kind
		return dir, alone, nil
	}
	files, err = onlyModel(path, "the file is in", models)
	return dir, files, err
}

// onlyModel returns the only one of models.
func onlyModel(path, has string, models []modelFiles) (modelFiles, error) {
	if len(models) == 1 {
		return models[0], nil
	}
	var choices []string
	for _, m := range models {
		if n := len(m.missing); n > 0 {
			m.name += fmt.Sprintf(" (which lacks %d of its %d parts: %s)", n, n+len(m.parts), list(m.missing))
		}
		choices = append(choices, m.name)
	}
	return modelFiles{}, fmt.Errorf("weights: open %s: %s %d models (open one by its path: %s)", path, has, len(models), list(choices))
}
