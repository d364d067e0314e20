// Package findings has a page about each finding of pincheck: what it means, why it
// happens, what was looked at, what to do, and what others met.
package findings

import (
	"embed"
	"io/fs"
	"slices"
	"strings"
)

//go:embed *.md
var pages embed.FS

// Page returns the page of a finding, in Markdown. ok is false if there is none.
func Page(id string) (text string, ok bool) {
	b, err := fs.ReadFile(pages, id+".md")
	return string(b), err == nil
}

// IDs returns the ids of all pages, sorted.
func IDs() (ids []string) {
	entries, _ := fs.ReadDir(pages, ".") // embedded: it cannot fail
	for _, e := range entries {
		ids = append(ids, strings.TrimSuffix(e.Name(), ".md"))
	}
	slices.Sort(ids)
	return ids
}
