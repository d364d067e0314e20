package result

// A Quantity is a number with its unit.
type Quantity struct {
	Value float64 `json:"value"`
	Unit  Unit    `json:"unit"`
}

// A Table has the figures behind an answer. Formats choose how they write it: a table of one row fits a line.
type Table struct {
	Title   string   `json:"title"`   // the conditions that all figures have
	Columns []string `json:"columns"` // names
	Rows    []Row    `json:"rows"`
	// Only is where the table belongs: Summary, Alone, or "" for both.
	Only string `json:"only,omitempty"`
}

// Values of Table.Only.
const (
	Summary = "summary" // of several experiments
	Alone   = "alone"   // a page of this experiment
)

// A Row is a line of a Table. It has a cell for each column: nil if that was not measured.
type Row struct {
	Name  string      `json:"name"`
	Cells []*Quantity `json:"cells"`
	Note  string      `json:"note,omitempty"` // what the figures imply
}

// Quantity returns the median of a series, nil for no series.
func (s *Series) Quantity() *Quantity {
	if s == nil {
		return nil
	}
	return &Quantity{s.Median, s.Unit}
}

// Add adds a row, unless all of its cells are nil.
func (t *Table) Add(name, note string, cells ...*Quantity) {
	for _, c := range cells {
		if c != nil {
			t.Rows = append(t.Rows, Row{name, cells, note})
			return
		}
	}
}

// Unit returns the unit that all cells have, or "" if they differ.
func (t *Table) Unit() Unit {
	var unit Unit
	for _, r := range t.Rows {
		for _, c := range r.Cells {
			switch {
			case c == nil || c.Unit == unit:
			case unit == "":
				unit = c.Unit
			default:
				return ""
			}
		}
	}
	return unit
}

// Trim removes the columns without a cell.
func (t *Table) Trim() {
	for i := len(t.Columns) - 1; i >= 0; i-- {
		empty := true
		for _, r := range t.Rows {
			empty = empty && r.Cells[i] == nil
		}
		if !empty {
			continue
		}
		t.Columns = append(t.Columns[:i:i], t.Columns[i+1:]...)
		for j, r := range t.Rows {
			t.Rows[j].Cells = append(r.Cells[:i:i], r.Cells[i+1:]...)
		}
	}
}
