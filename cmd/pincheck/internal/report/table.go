package report

import (
	"slices"
	"strings"
)

// A textTable is a table with its title at the head of the first column.
type textTable struct {
	title   string
	groups  []string // above the columns, the same for neighbours; none without groups
	columns []string
	rows    []textRow
	indent  int
	flush   bool // the names of rows stand below the title
}

type textRow struct {
	name  string
	cells []string
	note  string // behind the cells
}

// newTable returns a table of text from outside, without the columns in which no row has anything.
func newTable(headers []string, rows [][]string) textTable {
	t := textTable{title: headers[0], rows: make([]textRow, len(rows)), flush: true}
	for i, row := range rows {
		t.rows[i].name = plain(row[0])
	}
	for j := 1; j < len(headers); j++ {
		if !slices.ContainsFunc(rows, func(row []string) bool { return row[j] != "" }) {
			continue
		}
		t.columns = append(t.columns, headers[j])
		for i, row := range rows {
			t.rows[i].cells = append(t.rows[i].cells, plain(row[j]))
		}
	}
	return t
}

// inset is before the names of rows.
func (s textTable) inset() string {
	if s.flush {
		return ""
	}
	return "  "
}

// textTable writes a table. Columns that do not fit go below, with the names of the rows again.
func (p *page) textTable(s textTable) {
	room := p.style.width() - s.indent
	first, widths := s.widths(room)
	title := p.heading(s, first)
	for from := 0; from < len(s.columns); {
		to, used := from, first
		for to < len(s.columns) && (to == from || used+2+widths[to] <= room) {
			used += 2 + widths[to]
			to++
		}
		p.textPart(s, title, first, widths, from, to)
		from, title = to, ""
	}
}

// widths returns the widths of the first column, which has the title if all columns fit beside it, and of the others.
func (s textTable) widths(room int) (first int, widths []int) {
	inset := len(s.inset())
	for _, r := range s.rows {
		first = max(first, inset+len([]rune(r.name)))
	}
	first = min(max(first, inset), room/2)
	total := len([]rune(s.title))
	for i, name := range s.columns {
		w := len([]rune(name))
		for _, r := range s.rows {
			w = max(w, len([]rune(r.cells[i])))
		}
		if same := s.neighbours(i); same > 0 {
			w = max(w, len([]rune(s.groups[i]))/same)
		}
		widths = append(widths, min(w, room-first-2))
		total += 2 + widths[i]
	}
	if total <= room {
		first = max(first, len([]rune(s.title)))
	}
	return first, widths
}

// neighbours returns how many columns a group has that begins at column i, 0 if none does.
func (s textTable) neighbours(i int) (n int) {
	if len(s.groups) == 0 || i > 0 && s.groups[i] == s.groups[i-1] {
		return 0
	}
	for i+n < len(s.groups) && s.groups[i+n] == s.groups[i] {
		n++
	}
	return n
}

// textPart writes the columns in [from, to).
func (p *page) textPart(s textTable, title string, first int, widths []int, from, to int) {
	write := func(c ansiColor, name string, cell func(i int) string, note string) {
		var b strings.Builder
		b.WriteString(pad(clip(name, first), first))
		for i := from; i < to; i++ {
			text := clip(cell(i), widths[i])
			b.WriteString("  " + strings.Repeat(" ", widths[i]-len([]rune(text))) + text)
		}
		text := p.style.paint(c, strings.TrimRight(b.String(), " "))
		if note != "" && to == len(s.columns) {
			if s.indent+len([]rune(b.String()))+2+len([]rune(note)) <= p.style.width() {
				text = b.String() + "  " + note
			} else {
				for _, line := range wrap(note, p.style.width()-s.indent-2) {
					text += "\n" + strings.Repeat(" ", s.indent+2) + line
				}
			}
		}
		p.WriteString(strings.Repeat(" ", s.indent) + text + "\n")
	}
	if len(s.groups) > 0 {
		var b strings.Builder
		b.WriteString(strings.Repeat(" ", s.indent) + pad(title, first))
		for i := from; i < to; {
			end, width := i, -2
			for end < to && s.groups[end] == s.groups[i] {
				width += 2 + widths[end]
				end++
			}
			text := clip(s.groups[i], width)
			b.WriteString("  " + strings.Repeat(" ", width-len([]rune(text))) + text)
			i = end
		}
		p.WriteString(p.style.paint(dim, b.String()) + "\n")
		title = ""
	}
	if title != "" || slices.ContainsFunc(s.columns[from:to], func(c string) bool { return c != "" }) {
		write(dim, title, func(i int) string { return s.columns[i] }, "")
	}
	for _, r := range s.rows {
		write("", s.inset()+r.name, func(i int) string { return r.cells[i] }, r.note)
	}
}
