package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
)

// watched runs watch on a host whose transparent huge pages are off at the looks that off reports, and calls
// looked after each.
func watched(t *testing.T, looks int, off func(look int) bool, looked func(look int, stdout, stderr string), args ...string) (stdout, stderr string) {
	t.Helper()
	sys := on(t, "h200-vm")
	host := sys.root.(fstest.MapFS)
	set := func(look int) {
		text := "always [madvise] never\n"
		if off(look) {
			text = "always madvise [never]\n"
		}
		host["sys/kernel/mm/transparent_hugepage/enabled"] = &fstest.MapFile{Data: []byte(text)}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs bytes.Buffer
	look := 0
	set(look)
	sys.after = func(time.Duration) <-chan time.Time {
		looked(look, out.String(), errs.String())
		if look++; look == looks {
			cancel()
			return nil
		}
		set(look)
		now := make(chan time.Time, 1)
		now <- time.Now()
		return now
	}
	assert.Equal(t, exitOK, run(ctx, append([]string{"watch"}, args...), &out, &errs, sys), errs.String())
	return out.String(), errs.String()
}

// What comes and goes is in no stream, and neither is a look that differs from those around it.
func TestWatchReportsNothingThatComesAndGoes(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]func(look int) bool{
		"each other look":     func(look int) bool { return look%2 == 1 },
		"two and two":         func(look int) bool { return look%4 > 1 },
		"one of five":         func(look int) bool { return look%5 == 4 },
		"all but one of five": func(look int) bool { return look%5 != 4 },
		"two of three":        func(look int) bool { return look%3 != 2 },
	} {
		for _, format := range []string{"text", "jsonl"} {
			file := filepath.Join(t.TempDir(), "pincheck.prom")
			stdout, _ := watched(t, 60, off, func(int, string, string) {
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				assert.Equal(t, off(0), strings.Contains(string(text), `pincheck_watch_finding_info{id="thp_off",severity="note"} 1`), name)
			}, "--format", format, "--textfile", file)
			want := 0
			if off(0) || format == "text" { // what the first look finds
				want = 1
			}
			assert.Equal(t, want, strings.Count(stdout, "\n"), "%s: %s", name, stdout)
			_, err := os.Stat(file)
			assert.ErrorIs(t, err, os.ErrNotExist, "it is removed at the end")
		}
	}
}

// A change that lasts is reported at the third look that sees it, once.
func TestWatchReportsChangesThatLast(t *testing.T) {
	t.Parallel()
	var at []int // looks after which there was more output
	lines := 0
	stdout, _ := watched(t, 30, func(look int) bool { return look >= 10 && look < 20 }, func(look int, stdout, _ string) {
		if n := strings.Count(stdout, "\n"); n > lines {
			at, lines = append(at, look), n
		}
	}, "--format", "jsonl")
	assert.Equal(t, []int{12, 22}, at)
	var changes []string
	for line := range strings.Lines(stdout) {
		var c change
		require.NoError(t, json.Unmarshal([]byte(line), &c))
		assert.Equal(t, "thp_off", c.Finding.ID)
		changes = append(changes, c.Change)
	}
	assert.Equal(t, []string{"appeared", "ended"}, changes)
}

// An error of the textfile is printed once for as long as it lasts, and does not end the watch.
func TestWatchSaysOnceThatItCannotWriteTheTextfile(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "later")
	file := filepath.Join(dir, "pincheck.prom")
	_, stderr := watched(t, 12, func(int) bool { return false }, func(look int, _, stderr string) {
		switch look {
		case 4:
			assert.Equal(t, 1, strings.Count(stderr, "--textfile"), stderr)
			require.NoError(t, os.Mkdir(dir, 0o755))
		case 6:
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			assert.Contains(t, string(text), "pincheck_watch_last_look_timestamp_seconds ")
			assert.Contains(t, string(text), `pincheck_watch_findings{severity="problem"} 0`)
			entries, err := os.ReadDir(dir)
			require.NoError(t, err)
			assert.Len(t, entries, 1, "nothing else is left beside it")
			require.NoError(t, os.RemoveAll(dir))
		}
	}, "--textfile", file)
	assert.Equal(t, 2, strings.Count(stderr, "--textfile"), stderr)
	if runtime.GOOS != "windows" {
		assert.NotContains(t, stderr, ".tmp")
	}
}

// A condition whose severity changes is not reported anew until the other severity was seen often enough.
func TestDampingOfSeverities(t *testing.T) {
	t.Parallel()
	gpu := 1
	at := func(s doctor.Severity) []doctor.Finding {
		if s == "" {
			return nil
		}
		return []doctor.Finding{{ID: "slow_link", Severity: s, Device: &gpu}}
	}
	c := conditions{damping: damping{3, 4}}
	ended, appeared := c.look(at(doctor.Warning))
	assert.Len(t, appeared, 1)
	assert.Empty(t, ended)
	for range 20 {
		for _, s := range []doctor.Severity{doctor.Problem, doctor.Warning} {
			ended, appeared = c.look(at(s))
			assert.Empty(t, append(ended, appeared...))
		}
	}
	for look := range 2 { // with the problem of two looks ago the third of four
		ended, appeared = c.look(at(doctor.Problem))
		assert.Equal(t, look == 1, len(ended) == 1 && len(appeared) == 1 && appeared[0].Severity == doctor.Problem, "look %d", look)
	}
	assert.Equal(t, at(doctor.Problem), c.now())
	for range 4 {
		c.look(nil)
	}
	assert.Empty(t, c.known, "nothing is kept of what is gone")
	assert.Empty(t, c.order)
}

// For any looks, what appears was seen in k of the last n, what ends was not, and both alternate.
func TestDampingOfRandomLooks(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for _, d := range []damping{{1, 1}, {2, 2}, {3, 4}, {4, 5}, {6, 10}} {
		require.NoError(t, (&damping{}).Set(d.String()), "%v", d)
		c := conditions{damping: d}
		var seen []bool
		reported := false
		for range 5000 {
			one := random.IntN(2) == 0
			seen = append(seen, one)
			var found []doctor.Finding
			if one {
				found = []doctor.Finding{{ID: "x", Severity: doctor.Note}}
			}
			ended, appeared := c.look(found)
			n := 0
			for i := range d.n {
				if seen[max(0, len(seen)-1-i)] {
					n++
				}
			}
			want := n >= d.k || reported && d.n-n < d.k
			require.Equal(t, want && !reported, len(appeared) == 1, "%v", d)
			require.Equal(t, !want && reported, len(ended) == 1, "%v", d)
			reported = want
		}
	}
}
