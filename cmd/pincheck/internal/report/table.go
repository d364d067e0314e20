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
	note  string    // behind the cells
	color ansiColor // of the note
}

// text returns the sheet as a table of text. The text in its columns and its verdicts are behind the numbers, and what is
// behind a verdict is for pages. Heads have their first word.
func (s sheet) text() textTable {
	spaces := strings.NewReplacer("\u00a0", " ")
	t := textTable{title: spaces.Replace(s.Caption)}
	verdict := slices.Index(s.Head, "Verdict")
	for j := s.Text; j < len(s.Head) && j != verdict; j++ {
		head, _, _ := strings.Cut(s.Head[j], ":")
		t.columns = append(t.columns, head)
	}
	for _, cells := range s.Rows {
		row := textRow{name: spaces.Replace(cells[0].Text)}
		for j, c := range cells[1:] {
			switch text := spaces.Replace(c.Text); {
			case j+1 == verdict:
				row.note, row.color = joined(text, row.note), map[tone]ansiColor{bad: red, okay: green, warn: yellow, unclear: yellow, "": dim}[c.Tone]
			case j+1 < s.Text:
				row.note = prefixed(strings.ToLower(s.Head[j+1])+": ", text)
			case len(row.cells) < len(t.columns):
				row.cells = append(row.cells, text)
			}
		}
		t.rows = append(t.rows, row)
	}
	return t
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
	for from := 0; ; {
		to, used := from, first
		for to < len(s.columns) && (to == from || used+2+widths[to] <= room) {
			used += 2 + widths[to]
			to++
		}
		p.textPart(s, title, first, widths, from, to)
		if from, title = to, ""; from == len(s.columns) {
			return
		}
	}
}

// widths returns the widths of the first column, which has half of the room and what the others leave, and the title if
// all columns fit beside it, and of the others.
func (s textTable) widths(room int) (first int, widths []int) {
	inset, total := len(s.inset()), 0
	for _, r := range s.rows {
		first = max(first, inset+len([]rune(r.name)))
	}
	for i, name := range s.columns {
		w := len([]rune(name))
		for _, r := range s.rows {
			w = max(w, len([]rune(r.cells[i])))
		}
		if same := s.neighbours(i); same > 0 {
			w = max(w, len([]rune(s.groups[i]))/same)
		}
		widths = append(widths, w)
		total += 2 + w
	}
	first = min(max(first, inset), max(room/2, room-total))
	for i := range widths {
		widths[i] = min(widths[i], room-first-2)
	}
	if title := len([]rune(s.title)); title+total <= room {
		first = max(first, title)
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
	indent := strings.Repeat(" ", s.indent)
	write := func(c ansiColor, name string, cell func(i int) string, note string, noteColor ansiColor) {
		var b strings.Builder
		b.WriteString(pad(clip(name, first), first))
		for i := from; i < to; i++ {
			text := clip(cell(i), widths[i])
			b.WriteString("  " + strings.Repeat(" ", widths[i]-len([]rune(text))) + text)
		}
		text := p.style.paint(c, strings.TrimRight(b.String(), " "))
		if note != "" && to == len(s.columns) {
			if s.indent+len([]rune(b.String()))+2+len([]rune(note)) <= p.style.width() {
				text = b.String() + "  " + p.style.paint(noteColor, note)
			} else {
				for _, line := range wrap(note, p.style.width()-s.indent-2-len(s.inset())) {
					text += "\n  " + indent + s.inset() + p.style.paint(noteColor, line)
				}
			}
		}
		p.WriteString(indent + text + "\n")
	}
	if len(s.groups) > 0 {
		var b strings.Builder
		b.WriteString(indent + pad(title, first))
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
		write(dim, title, func(i int) string { return s.columns[i] }, "", "")
	}
	for _, r := range s.rows {
		names := wrap(r.name, first-len(s.inset()))
		for _, line := range names[:len(names)-1] {
			p.WriteString(indent + s.inset() + line + "\n")
		}
		write("", s.inset()+names[len(names)-1], func(i int) string { return r.cells[i] }, r.note, r.color)
	}
}
