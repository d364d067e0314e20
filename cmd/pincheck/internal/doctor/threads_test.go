package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

// thread is where a host is from, how it ended there, and what the doctor has to find. Ids are
// those of findings.
type thread struct {
	URL        string `json:"url"`
	Title      string `json:"title"`
	Group      string `json:"group"`
	Kind       string `json:"kind"` // fault, or healthy: nothing is at fault, however unusual it looks
	Resolution string `json:"resolution"`
	Cause      string `json:"cause"`
	// NamedBy is a finding that names the cause: one of IDs, or a warning or problem whose
	// summary and cause together contain an alternative of each of Words.
	NamedBy struct {
		IDs   []string   `json:"ids"`
		Words [][]string `json:"words"`
	} `json:"named_by"`
	// Proposes is an id for a cause that has none.
	Proposes string `json:"proposes"`
	// PartlyBy are findings that say what fails and not why.
	PartlyBy []string `json:"partly_by"`
	// Also are findings that may stand beside the cause.
	Also []string `json:"also"`
	// Never are accusations: warnings and problems that are wrong on this host.
	Never []string `json:"never"`
	// MaySay are drastic remedies that are right here: see drastic.
	MaySay []string `json:"may_say"`
	// NeverWords are of causes and remedies that are wrong on this host.
	NeverWords []string `json:"never_words"`
}

// grade is what a judgement is worth.
type grade string

const (
	namedRight grade = "right"
	partly     grade = "partly"
	wrong      grade = "wrong"
	accused    grade = "accused" // it blames what is not at fault, or advises what cannot be undone
)

var grades = []grade{namedRight, partly, wrong, accused}

// drastic matches remedies that cannot be undone, or stop the work of others. A word before
// that denies it is matched with it.
var drastic = regexp.MustCompile(`(?i)(\b(?:no|not|never|without an?|instead of an?) )?\b(reset\b|reboot|drain|cordon|rma\b|reseat|replace (?:the |this |that )?(?:card|gpu|board|hardware|machine|node)|(?:have it|be) replaced)`)

func (th *thread) grade(verdict Verdict, found []Finding) (g grade, why string) {
	text := func(one Finding) string { return strings.ToLower(one.Summary + "\n" + one.Cause) }
	for _, one := range found {
		if !one.Severity.AtLeast(Warning) {
			continue
		}
		if slices.Contains(th.Never, one.ID) || th.Kind == "healthy" && !slices.Contains(th.Also, one.ID) {
			return accused, one.ID + ": " + one.Summary
		}
		for _, m := range drastic.FindAllStringSubmatch(one.Remedy, -1) {
			if m[1] == "" && !slices.ContainsFunc(th.MaySay, func(may string) bool { return strings.Contains(strings.ToLower(m[2]), may) }) {
				return accused, one.ID + " says " + m[2]
			}
		}
		for _, word := range th.NeverWords {
			if strings.Contains(text(one)+strings.ToLower(one.Remedy), word) {
				return accused, one.ID + " says " + word
			}
		}
	}
	ids := []string{}
	named, half := false, false
	stray := ""
	for _, one := range found {
		says := func(text string) bool {
			return len(th.NamedBy.Words) > 0 && !slices.ContainsFunc(th.NamedBy.Words, func(alternatives []string) bool {
				return !slices.ContainsFunc(alternatives, func(word string) bool { return strings.Contains(text, word) })
			})
		}
		grave := one.Severity.AtLeast(Warning)
		names := slices.Contains(th.NamedBy.IDs, one.ID) || grave && says(text(one))
		hints := slices.Contains(th.PartlyBy, one.ID) || grave && says(text(one)+"\n"+strings.ToLower(one.Remedy))
		named, half = named || names, half || hints
		if !names && !hints && one.Severity == Problem && !slices.Contains(th.Also, one.ID) {
			stray = one.ID
		}
		ids = append(ids, one.ID)
	}
	why = strings.Join(ids, " ")
	if why == "" {
		why = "no finding: " + string(verdict)
	}
	switch {
	case th.Kind == "healthy" && (verdict == Healthy || verdict == Measured):
		return namedRight, why
	case th.Kind == "healthy":
		return accused, string(verdict)
	case named && stray == "":
		return namedRight, why
	case named || half:
		return partly, why
	}
	return wrong, why
}

// threadsDir has the hosts that were composed from public threads before the checks were written
// for them. PINNED_THREADS is another directory of such hosts: how they are graded is printed,
// and nothing is asserted of it.
const threadsDir = "../../../../testdata/threads"

// A judgement is what the doctor makes of a host that was composed from a thread.
type judgement struct {
	name, group, place, why string
	grade                   grade
	thread                  *thread
}

// judgeThreads judges the hosts of a directory.
func judgeThreads(t *testing.T, dir string) (all []judgement) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		c, err := hosttest.LoadCase(file)
		require.NoError(t, err)
		j := judgement{name: strings.TrimSuffix(filepath.Base(file), ".txtar")}
		j.thread = readThread(t, j.name, c)
		facts := factsOfCase(t, c)
		j.group, j.place = "group "+j.thread.Group, "place "+placeOf(facts.Host)
		verdict, found := Evaluate(facts)
		j.grade, j.why = j.thread.grade(verdict, found)
		t.Logf("%-8s %s: %s", j.grade, j.name, j.why)
		all = append(all, j)
	}
	return all
}

// placeOf returns where a process runs, in one word.
func placeOf(h *hostinfo.Host) string {
	if places := h.Places(); len(places) > 0 {
		return strings.ReplaceAll(places[0], " ", "-")
	}
	if h.Virt.VM {
		return "guest"
	}
	if h.Virt.Tegra {
		return "jetson"
	}
	return "machine"
}

// tabulate counts the grades of all hosts, and by group and place.
func tabulate(all []judgement) map[string]map[grade]int {
	table := map[string]map[grade]int{}
	for _, j := range all {
		for _, row := range []string{"all hosts", j.group, j.place} {
			if table[row] == nil {
				table[row] = map[grade]int{}
			}
			table[row][j.grade]++
		}
	}
	return table
}

// Each host has its thread and an expectation. What the doctor does not get right yet is in
// known-failures.txt, with its grade. How many of each group and place are right is in right.txt, and never falls.
func TestHostsFromThreadsAreNamedRight(t *testing.T) {
	t.Parallel()
	if dir, elsewhere := os.LookupEnv("PINNED_THREADS"); elsewhere {
		t.Log("\n" + tableOf(tabulate(judgeThreads(t, dir))))
		return
	}
	all := judgeThreads(t, threadsDir)
	known := knownFailures(t, filepath.Join(threadsDir, "known-failures.txt"))
	urls := map[string]string{}
	healthy := 0
	for _, j := range all {
		assert.Empty(t, urls[j.thread.URL], "%s and %s have one thread", j.name, urls[j.thread.URL])
		urls[j.thread.URL] = j.name
		if j.thread.Kind == "healthy" {
			healthy++
		}
		before, listed := known[j.name]
		delete(known, j.name)
		if j.grade == namedRight {
			assert.False(t, listed, "%s is right now: take it from known-failures.txt", j.name)
		} else {
			assert.Equal(t, before, j.grade, "%s: %s", j.name, j.why)
		}
	}
	assert.Empty(t, slices.Sorted(maps.Keys(known)), "no such host: take it from known-failures.txt")
	assert.GreaterOrEqual(t, 10*healthy, 3*len(all), "three hosts of ten are healthy or merely unusual")
	table := tabulate(all)
	t.Log("\n" + tableOf(table))
	floor := rightOnes(t, filepath.Join(threadsDir, "right.txt"))
	for row, grades := range table {
		assert.Contains(t, floor, row, "right.txt has each group and place")
		assert.GreaterOrEqual(t, grades[namedRight], floor[row], "hosts of %s that are right: what was right once stays right", row)
	}
	for row := range floor {
		assert.Contains(t, table, row, "right.txt has a group or place without hosts")
	}
}

// rightOnes reads how many hosts of each group and place are right: none may become wrong, and none may go.
func rightOnes(t *testing.T, file string) map[string]int {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	floor := map[string]int{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		var kind, name string
		var n int
		_, err := fmt.Sscanf(line, "%s %s %d", &kind, &name, &n)
		require.NoError(t, err, line)
		floor[kind+" "+name] = n
	}
	return floor
}

// mostKnownFailures is how many failures there are. Lower it with the list.
const mostKnownFailures = 2

func knownFailures(t *testing.T, file string) map[string]grade {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	known := map[string]grade{}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] != "#" {
			require.Len(t, fields, 2, line)
			require.Contains(t, grades[1:], grade(fields[0]))
			known[fields[1]] = grade(fields[0])
		}
	}
	require.LessOrEqual(t, len(known), mostKnownFailures)
	return known
}

func readThread(t *testing.T, name string, c *hosttest.Case) *thread {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(c.Thread))
	decoder.DisallowUnknownFields()
	th := &thread{}
	require.NoError(t, decoder.Decode(th), name)
	where, err := url.Parse(th.URL)
	require.NoError(t, err, name)
	assert.Equal(t, "https", where.Scheme, name)
	for _, text := range []string{th.Title, th.Group, th.Resolution, th.Cause} {
		assert.NotEmpty(t, text, name)
	}
	assert.NotEmpty(t, th.Never, "%s: what would be an accusation", name)
	switch th.Kind {
	case "fault":
		assert.NotEmpty(t, append(slices.Clone(th.NamedBy.IDs), slices.Concat(th.NamedBy.Words...)...), "%s: what names the cause", name)
	case "healthy":
		assert.True(t, strings.HasPrefix(name, "healthy-"), name)
	default:
		assert.Fail(t, name+": kind "+th.Kind)
	}
	pages, err := filepath.Glob("../findings/*.md")
	require.NoError(t, err)
	for _, id := range slices.Concat(th.NamedBy.IDs, th.PartlyBy, th.Also, th.Never) {
		assert.True(t, slices.ContainsFunc(pages, func(page string) bool { return filepath.Base(page) == id+".md" }), "%s: no finding %s", name, id)
	}
	return th
}

func tableOf(table map[string]map[grade]int) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\thosts\tright\tpartly\twrong\taccused\t")
	for _, row := range slices.Sorted(maps.Keys(table)) {
		sum := 0
		for _, n := range table[row] {
			sum += n
		}
		fmt.Fprintf(w, "%s\t%d\t", row, sum)
		for _, g := range grades {
			fmt.Fprintf(w, "%d\t", table[row][g])
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	return b.String()
}

func TestGradesOfThreads(t *testing.T) {
	t.Parallel()
	fault := thread{Kind: "fault", PartlyBy: []string{"half"}, Never: []string{"blame"}, MaySay: []string{"reboot"}, NeverWords: []string{"dust"}}
	fault.NamedBy.IDs = []string{"cause"}
	fault.NamedBy.Words = [][]string{{"suspend", "resume"}, {"uvm"}}
	one := func(id string, s Severity, texts ...string) Finding {
		texts = append(texts, "", "", "")
		return Finding{ID: id, Severity: s, Summary: texts[0], Cause: texts[1], Remedy: texts[2]}
	}
	for _, c := range []struct {
		want  grade
		found []Finding
	}{
		{namedRight, []Finding{one("cause", Problem)}},
		{namedRight, []Finding{one("cause", Note), one("half", Problem)}},
		{namedRight, []Finding{one("new", Problem, "CUDA fails", "After a RESUME nvidia_uvm is broken")}},
		{partly, []Finding{one("new", Problem, "CUDA fails", "", "after suspend load nvidia_uvm anew")}},
		{partly, []Finding{one("half", Problem)}},
		{partly, []Finding{one("cause", Problem), one("other", Problem)}},
		{wrong, []Finding{one("other", Problem)}},
		{wrong, []Finding{one("new", Note, "After a resume nvidia_uvm is broken")}},
		{wrong, nil},
		{namedRight, []Finding{one("cause", Problem, "", "", "reboot")}},
		{accused, []Finding{one("cause", Problem, "", "", "reboot, or replace the card")}},
		{namedRight, []Finding{one("cause", Problem, "", "", "this needs no reset")}},
		{accused, []Finding{one("cause", Warning, "", "dust")}},
		{accused, []Finding{one("cause", Problem), one("blame", Warning)}},
		{namedRight, []Finding{one("cause", Problem), one("blame", Note)}},
	} {
		g, why := fault.grade(Problems, c.found)
		assert.Equal(t, c.want, g, "%v: %s", c.found, why)
	}
	healthy := thread{Kind: "healthy", Also: []string{"known"}}
	for want, found := range map[grade][]Finding{namedRight: {one("x", Note), one("known", Warning)}, accused: {one("x", Warning)}} {
		g, _ := healthy.grade(Measured, found)
		assert.Equal(t, want, g, "%v", found)
	}
	g, _ := healthy.grade(Unusable, nil)
	assert.Equal(t, accused, g)
}
