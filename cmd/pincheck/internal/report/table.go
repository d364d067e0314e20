package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A table has the heads of its columns and rows of as many cells. The first column is
// flush left.
type table struct {
	headers []string
	rows    [][]string
	with    map[int]bool // columns that stay beside the one before
	head    int          // width of a head that has several words; 0 means headWidth
}

// withoutEmpty returns the table without columns in which no row has anything.
func (t table) withoutEmpty() table {
	out := table{head: t.head}
	out.rows = make([][]string, len(t.rows))
	for i, header := range t.headers {
		if !slices.ContainsFunc(t.rows, func(row []string) bool { return row[i] != "" }) {
			continue
		}
		out.headers = append(out.headers, header)
		for j, row := range t.rows {
			out.rows[j] = append(out.rows[j], row[i])
		}
	}
	return out
}

const headWidth = 12

// table writes a table below a row. Where it is wider than the page its columns go into
// several tables below each other, each with the first column.
func (p *page) table(t table) {
	if len(t.rows) == 0 {
		return
	}
	widths := make([]int, len(t.headers))
	headers := make([][]string, len(t.headers))
	for i, h := range t.headers {
		headers[i] = wrap(plain(h), cmp.Or(t.head, headWidth))
		for _, line := range headers[i] {
			widths[i] = max(widths[i], len([]rune(line)))
		}
	}
	for _, row := range t.rows {
		for i := range row {
			row[i] = clip(plain(row[i]), p.width()/2-1)
			widths[i] = max(widths[i], len([]rune(row[i])))
		}
	}
	for from := 1; from < len(t.headers) || from == 1; {
		to, width := from, widths[0]
	fill:
		for to < len(t.headers) {
			next, more := to+1, 2+widths[to]
			for next < len(t.headers) && t.with[next] {
				more += 2 + widths[next]
				next++
			}
			switch {
			case width+more <= p.width():
				to, width = next, width+more
				continue
			case to == from: // too wide together
				to++
			}
			break fill
		}
		if from > 1 {
			p.gap()
		}
		p.columns(widths, headers, t.rows, from, to)
		from = max(to, from+1)
	}
}

// columns writes the first column and those in [from, to).
func (p *page) columns(widths []int, headers [][]string, rows [][]string, from, to int) {
	height := len(headers[0])
	for _, h := range headers[from:to] {
		height = max(height, len(h))
	}
	line := func(c ansiColor, cell func(i int) string) {
		var b strings.Builder
		fmt.Fprintf(&b, "%-*s", widths[0], cell(0))
		for i := from; i < to; i++ {
			fmt.Fprintf(&b, "  %*s", widths[i], cell(i))
		}
		text := strings.TrimRight(b.String(), " ")
		if c != "" {
			text = p.style.paint(c, text)
		}
		p.WriteString(strings.TrimRight(strings.Repeat(" ", p.margin)+text, " ") + "\n")
	}
	for n := range height {
		line(dim, func(i int) string { // headers stand on the first row
			if at := n - (height - len(headers[i])); at >= 0 {
				return headers[i][at]
			}
			return ""
		})
	}
	for _, row := range rows {
		line("", func(i int) string { return row[i] })
	}
}

var (
	columnBlocks = []rune("▁▂▃▄▅▆▇█")
	rowBlocks    = []rune("▏▎▍▌▋▊▉█")
)

// columnChart returns a line of one block a value, from zero up to the greatest. Values
// below zero have none.
func columnChart(values []float64, greatest float64) string {
	var b strings.Builder
	for _, v := range values {
		if v <= 0 || greatest <= 0 {
			b.WriteRune(' ')
			continue
		}
		n := int(v / greatest * float64(len(columnBlocks)))
		b.WriteRune(columnBlocks[min(max(n, 0), len(columnBlocks)-1)])
	}
	return b.String()
}

// rowChart returns a bar of at most width blocks.
func rowChart(v, greatest float64, width int) string {
	if v <= 0 || greatest <= 0 {
		return ""
	}
	eighths := min(max(int(v/greatest*float64(8*width)), 1), 8*width)
	bar := strings.Repeat(string(rowBlocks[7]), eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string(rowBlocks[rest-1])
	}
	return bar
}
