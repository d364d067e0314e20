package report

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestProgressInLines(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	p := NewProgress(&b, noVariables)
	p.Close() // the lines below are not those of its clock
	p.line(5 * time.Second)
	p.Show(At{What: "GPU 0, \x1b[31mpinned\n4097 B", Share: 0.5, Left: 40 * time.Second})
	p.shown.Load().after = 10 * time.Second
	p.line(10 * time.Second)
	p.line(15 * time.Second) // nothing new: the time goes on
	p.line(90 * time.Second)
	p.Show(At{What: "last", Share: 1.7})
	p.line(125 * time.Second)
	assert.Equal(t, "  0%, 5s spent\n"+
		" 50%, 10s spent, about 40s left: GPU 0, ?[31mpinned 4097 B\n"+
		" 50%, 15s spent, about 35s left: GPU 0, ?[31mpinned 4097 B\n"+
		" 50%, 1m30s spent, about 0s left: GPU 0, ?[31mpinned 4097 B\n"+
		"100%, 2m5s spent: last\n", b.String())

	var none *Progress
	none.Show(At{})
	none.Close()
}

// On a terminal there is one line, which is cleared at the end.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	for _, width := range []int{40, 80} {
		var b bytes.Buffer
		p := &Progress{w: &b, began: time.Now(), style: &Style{Width: width}, stop: make(chan struct{})}
		p.draw(time.Second)
		p.Show(At{What: "GPU 0, a name that is longer than the line of any terminal can be", Share: 0.25, Left: 40 * time.Second})
		p.shown.Load().after = 10 * time.Second
		p.draw(12 * time.Second)
		p.Close()
		text := b.String()
		assert.NotContains(t, text, "\n")
		assert.Contains(t, text, "25%")
		assert.Contains(t, text, " 12s, 38s left")
		assert.Equal(t, width == 80, strings.Contains(text, "██ "), "a bar where there is room")
		parts := strings.Split(text, "\r")
		for _, part := range parts {
			assert.Less(t, len([]rune(escape.ReplaceAllString(part, ""))), width, "%q", part)
		}
		assert.Empty(t, strings.TrimSpace(escape.ReplaceAllString(parts[len(parts)-2]+parts[len(parts)-1], "")))
	}
}

// A standard error that is closed does not disturb a run.
func TestProgressThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	p := NewProgress(w, noVariables)
	p.Show(At{What: "x"})
	p.line(time.Second)
	p.Close()
	require.NoError(t, w.Close())
	WriteEstimates(failing{}, []Estimate{{Name: "x"}})
	assert.Error(t, WriteList(failing{}, [][2]string{{"a", "b"}}, Style{}))
	assert.NoError(t, WriteList(io.Discard, nil, Style{}))
}

func TestWriteEstimates(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	WriteEstimates(&b, []Estimate{
		{Name: "bandwidth", Time: 12 * time.Second, Pinned: 4 << 30, Pageable: 1 << 30, Device: 4 << 30, Disk: 1 << 20},
		{Name: "calls", Time: 300 * time.Millisecond},
	})
	WriteEstimates(&b, []Estimate{{Name: "calls", Time: 300 * time.Millisecond}})
	WriteEstimates(&b, nil)
	assert.Equal(t, "2 experiments: about 12.3 s, at most 4 GiB pinned, 1 GiB pageable, 4 GiB on each GPU, 1 MiB on disk\n"+
		"calls: about 300 ms\n", b.String())
}

// noVariables is an empty environment.
func noVariables(string) string { return "" }
