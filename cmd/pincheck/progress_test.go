package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

func TestProgressInLines(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	p := newProgress(&b, noVariables)
	p.close() // the lines below are not those of its clock
	p.write(5 * time.Second)
	p.show(report.At{What: "GPU 0, \x1b[31mpinned\n4097 B", Share: 0.5, Left: 40 * time.Second})
	p.shown.Load().after = 10 * time.Second
	p.write(10 * time.Second)
	p.write(15 * time.Second) // nothing new: the time goes on
	p.write(90 * time.Second)
	p.show(report.At{What: "last", Share: 1.7})
	p.write(125 * time.Second)
	assert.Equal(t, "  0%, 5s spent\n"+
		" 50%, 10s spent, about 40s left: GPU 0, ?[31mpinned 4097 B\n"+
		" 50%, 15s spent, about 35s left: GPU 0, ?[31mpinned 4097 B\n"+
		" 50%, 1m30s spent, about 0s left: GPU 0, ?[31mpinned 4097 B\n"+
		"100%, 2m5s spent: last\n", b.String())

	var none *progress
	none.close()
}

// On a terminal there is one line, which is cleared at the end.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	for _, width := range []int{40, 80} {
		var b bytes.Buffer
		p := &progress{w: &b, began: time.Now(), style: &report.Style{Width: width}, stop: make(chan struct{})}
		p.write(time.Second)
		p.show(report.At{What: "GPU 0, a name that is longer than the line of any terminal can be", Share: 0.25, Left: 40 * time.Second})
		p.shown.Load().after = 10 * time.Second
		p.write(12 * time.Second)
		p.close()
		text := b.String()
		assert.NotContains(t, text, "\n")
		assert.Contains(t, text, "25%")
		assert.Contains(t, text, " 12s, 38s left")
		assert.Equal(t, width == 80, strings.Contains(text, "██ "), "a bar where there is room")
		parts := strings.Split(text, "\r")
		for _, part := range parts {
			assert.Less(t, len([]rune(part)), width, "%q", part)
		}
		assert.Empty(t, strings.TrimSpace(parts[len(parts)-2]+parts[len(parts)-1]))
	}
}

// Terminals that cannot go back in a line get lines.
func TestProgressOnADumbTerminal(t *testing.T) {
	t.Parallel()
	device, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no terminal to test with: %v", err)
	}
	defer device.Close()
	for kind, redraws := range map[string]bool{"xterm": true, "dumb": false} {
		p := newProgress(device, func(string) string { return kind })
		assert.Equal(t, redraws, p.style != nil, kind)
		p.close()
	}
}

// A standard error that is closed does not disturb a run.
func TestProgressThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	p := newProgress(w, noVariables)
	p.show(report.At{What: "x"})
	p.write(time.Second)
	p.close()
	require.NoError(t, w.Close())
}

// noVariables is an empty environment.
func noVariables(string) string { return "" }
