// Package findings has a page about each finding of pincheck: its title, severity, causes, costs and
// remedies. pincheck takes these texts from the pages, and pincheck explain prints the pages.
//
// # Form of a page
//
// The file name.md begins with "# name" and a line with the severity and the title. The title is a fact
// in at most 45 characters, without a capital or a period, because it is a line of pincheck explain:
//
//	Warning: the process may use one CPU.
//
// The section "Cause" has what pincheck prints, in sentences:
//
//   - Found: what is wrong, as a clause, where the title does not say it and the check does not
//   - Why: the cause, if it is known
//   - Cost: what it costs, in seconds or as a factor
//   - Do: the remedy, as an imperative. A command on a line of its own follows a colon and ends its sentence.
//     A need in braces, such as {gpu}, stands for the words of the place where the process runs (places.txt).
//     A command for root has its sudo, also dmesg. In a place where the reader is not root, it says who can run it.
//   - Last resort: a remedy that cannot be undone or stops the work of others (a reset, a reboot, a new
//     card). It is printed only if the cause is certain.
//   - Confidence: likely or possible. Without it the cause is certain. A check may set another one.
//   - To confirm: how to tell this cause from others
//
// If there are several causes, the section is called "Causes", and each has a heading of the third level
// with its name. Words in italics (*N*), and words in angle brackets in code (`-i <N>`), are replaced by
// values from the host, or printed as they are if a value is unknown. Commands are in code quotes, which
// Do, Last resort and To confirm keep: terminals and the HTML page show by them what can be copied. All
// other sections are only for readers.
package findings

import (
	"cmp"
	"embed"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
)

//go:embed *.md
var files embed.FS

// A Page is what is known of a finding.
type Page struct {
	ID       string
	Severity string // problem, warning or note
	Title    string // what was found, in a few words
	Causes   []Cause
	Text     string // the page in Markdown
}

// A Cause is one reason for a finding. Texts are empty where nothing is known.
type Cause struct {
	Name  string // among the causes of the page; empty for the only one
	Found string // the title, unless the page has words for this cause
	Why   string
	Cost  string
	Do    string

	LastResort, Confidence, Confirm string
}

// Get returns the page of a finding. ok is false if there is none.
func Get(id string) (page *Page, ok bool) {
	page, ok = pages()[id]
	return page, ok
}

// IDs returns the ids of all pages, sorted.
func IDs() []string { return slices.Sorted(maps.Keys(pages())) }

// A Group is the findings about one subject, by cause and then by severity.
type Group struct {
	Name string
	IDs  []string
}

//go:embed groups.txt
var groupsText string

// Groups returns all findings by subject. Each is in one group.
func Groups() (all []Group) {
	for name, line := range sections(groupsText) {
		if len(all) == 0 || all[len(all)-1].Name != name {
			all = append(all, Group{Name: name})
		}
		g := &all[len(all)-1]
		g.IDs = append(g.IDs, strings.Fields(line)...)
	}
	return all
}

// sections returns the lines of a text with the names of their sections, which are in brackets. Lines that begin with #
// are comments.
func sections(text string) iter.Seq2[string, string] {
	return func(yield func(section, line string) bool) {
		section := ""
		for line := range strings.Lines(text) {
			switch line = strings.TrimSpace(line); {
			case line == "", line[0] == '#':
			case line[0] == '[':
				section = strings.Trim(line, "[]")
			case !yield(section, line):
				return
			}
		}
	}
}

// Cause returns the cause of a name, or the first one for an empty name.
func (p *Page) Cause(name string) (Cause, bool) {
	for _, c := range p.Causes {
		if name == "" || c.Name == name {
			return c, true
		}
	}
	return Cause{}, false
}

// Values are texts for the words in italics of a page.
type Values map[string]string

var (
	variable = regexp.MustCompile("`[^`]*`|\\*[^*]+\\*") // code, and words in italics
	inCode   = regexp.MustCompile(`<[^<>]+>`)            // words that stand for others in code
)

// With returns the cause with values in the place of the words that stand for them, and with the words of the first
// of the places that has some for each need. Of the marks of Markdown only the code quotes of Do, LastResort and
// Confirm remain.
func (c Cause) With(values Values, places ...string) Cause {
	put := func(text string) string {
		if text = at(text, places); !strings.ContainsAny(text, "*`") {
			return text
		}
		return variable.ReplaceAllStringFunc(text, func(marked string) string {
			if marked[0] == '`' {
				return inCode.ReplaceAllStringFunc(marked, func(word string) string {
					return cmp.Or(values[word[1:len(word)-1]], word)
				})
			}
			word := marked[1 : len(marked)-1]
			return cmp.Or(values[word], word)
		})
	}
	c.Found = put(c.Found)
	c.Why, c.Cost = strings.ReplaceAll(put(c.Why), "`", ""), strings.ReplaceAll(put(c.Cost), "`", "")
	c.Do, c.LastResort, c.Confirm = put(c.Do), put(c.LastResort), put(c.Confirm)
	return c
}

// Variables returns the words that stand for values.
func (c Cause) Variables() (words []string) {
	for _, marked := range variable.FindAllString(at(c.Found+"\n"+c.Why+"\n"+c.Cost+"\n"+c.Do+"\n"+c.LastResort+"\n"+c.Confirm, nil), -1) {
		found := []string{marked}
		if marked[0] == '`' {
			found = inCode.FindAllString(marked, -1)
		}
		for _, word := range found {
			if word = word[1 : len(word)-1]; !slices.Contains(words, word) {
				words = append(words, word)
			}
		}
	}
	return words
}

// pages parses all pages once. A page of another form is a mistake in this directory.
var pages = sync.OnceValue(func() map[string]*Page {
	all := map[string]*Page{}
	names, err := fs.Glob(files, "*.md")
	for _, name := range names {
		var text []byte
		if text, err = fs.ReadFile(files, name); err != nil {
			break
		}
		id := strings.TrimSuffix(name, ".md")
		if all[id], err = parse(id, string(text)); err != nil {
			break
		}
	}
	if err != nil {
		panic(err)
	}
	return all
})

var firstLines = regexp.MustCompile(`^# (\w+)\n\n(Problem|Warning|Note): (.+)\.\n\n`)

// parse parses the page of an id.
func parse(id, text string) (*Page, error) {
	malformed := func(format string, args ...any) (*Page, error) {
		return nil, fmt.Errorf("cmd/pincheck/internal/findings/%s.md: %s", id, fmt.Sprintf(format, args...))
	}
	head := firstLines.FindStringSubmatch(text)
	if head == nil || head[1] != id {
		return malformed("it does not begin with # %s and a line such as Warning: title.", id)
	}
	for _, braced := range need.FindAllStringSubmatch(text, -1) {
		if needs()[braced[1]] == nil {
			return malformed("{%s} is no need of places.txt", braced[1])
		}
	}
	p := &Page{ID: id, Severity: strings.ToLower(head[2]), Title: head[3], Text: at(text, nil)}
	section := ""
	var item *string // that is being read
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch name, heading := strings.CutPrefix(line, "## "); {
		case heading:
			section, item = name, nil
			if section == "Cause" {
				p.Causes = append(p.Causes, Cause{})
			}
			continue
		case section != "Cause" && section != "Causes":
			continue
		}
		if name, heading := strings.CutPrefix(line, "### "); heading && section == "Causes" {
			p.Causes, item = append(p.Causes, Cause{Name: name}), nil
			continue
		}
		label, rest, labelled := strings.Cut(strings.TrimPrefix(line, "- "), ": ")
		switch {
		case line == "":
			item = nil
		case item != nil && strings.HasPrefix(line, "  "):
			*item += " " + strings.TrimSpace(line)
		case !strings.HasPrefix(line, "- ") || !labelled || len(p.Causes) == 0:
			return malformed("%q in the section %s is not an item of a cause", line, section)
		default:
			c := &p.Causes[len(p.Causes)-1]
			item = map[string]*string{"Found": &c.Found, "Why": &c.Why, "Cost": &c.Cost, "Do": &c.Do, "Last resort": &c.LastResort, "Confidence": &c.Confidence, "To confirm": &c.Confirm}[label]
			if item == nil || *item != "" {
				return malformed("%q: want Found, Why, Cost, Do, Last resort, Confidence and To confirm, once each", line)
			}
			*item = rest
		}
	}
	for i, c := range p.Causes {
		p.Causes[i].Found = cmp.Or(c.Found, p.Title)
		if c.Do == "" {
			return malformed("the cause %q has no remedy", c.Name)
		}
		if !slices.Contains([]string{"", "likely", "possible"}, c.Confidence) {
			return malformed("the cause %q has confidence %q, want likely or possible", c.Name, c.Confidence)
		}
		if slices.ContainsFunc(p.Causes[:i], func(other Cause) bool { return other.Name == c.Name }) {
			return malformed("duplicate cause %q", c.Name)
		}
	}
	if len(p.Causes) == 0 {
		return malformed("it has no cause")
	}
	return p, nil
}
