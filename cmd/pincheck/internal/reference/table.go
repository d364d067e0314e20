package reference

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"sync"
)

// machines are the files, one for each type of machine, and their schema. docs/reference.md has them as tables, and how
// to add one.
//
//go:embed *.json
var machines embed.FS

// schemaFile is the JSON Schema of the others.
const schemaFile = "schema.json"

// A Table has what machines reach: one file for each type of machine.
type Table struct{ files []*File }

// NewTable returns a table of files. Two files of one type of machine are an error, whatever driver and kernel they
// have: which of them counts would be unknown.
func NewTable(files ...*File) (*Table, error) {
	for i, f := range files {
		for _, other := range files[:i] {
			if f.Machine.sameType(other.Machine) {
				return nil, fmt.Errorf("%s and %s are both of %v: only one file may be", other.Name, f.Name, f.Machine)
			}
		}
	}
	return &Table{files}, nil
}

// sameType reports whether two machines are of one type, whatever their software.
func (m Machine) sameType(other Machine) bool {
	return m.GPU == other.GPU && m.Link == other.Link && m.sameHost(other)
}

// sameHost reports whether two machines are alike beside their GPUs.
func (m Machine) sameHost(other Machine) bool {
	return m.CPU == other.CPU && m.Sockets == other.Sockets && m.Host == other.Host
}

// Builtin returns the table of this program: the files in its directory.
func Builtin() *Table { return builtin() }

// A file that cannot be read is a mistake in that directory.
var builtin = sync.OnceValue(func() *Table {
	names, err := fs.Glob(machines, "*.json")
	var files []*File
	for _, name := range names {
		if name == schemaFile {
			continue
		}
		text, readErr := machines.ReadFile(name)
		f, malformed := Read("reference/"+name, text)
		if readErr != nil || malformed != nil {
			err = errors.Join(err, fmt.Errorf("reference/%s: %w", name, errors.Join(readErr, malformed)))
			continue
		}
		files = append(files, f)
	}
	t, twice := NewTable(files...)
	if err = errors.Join(err, twice); err != nil {
		panic(err)
	}
	return t
})
