package findings

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const page = "# slow\n\nWarning: it is slow.\n\n## What it means\n\nText: more.\n\n## Causes\n\n### heat\n\n- Why: it is\n  too hot\n- Cost: all takes *several times* as long\n- Do: see `a*b*c -i <N>` on *N*\n\n" +
	"### other\n\n- Do: nothing\n\n## More\n\n- Why: of no cause\n"

func TestParse(t *testing.T) {
	t.Parallel()
	p, err := parse("slow", page)
	require.NoError(t, err)
	assert.Equal(t, &Page{ID: "slow", Severity: "warning", Title: "it is slow", Text: page, Causes: []Cause{
		{Name: "heat", Why: "it is too hot", Cost: "all takes *several times* as long", Do: "see `a*b*c -i <N>` on *N*"},
		{Name: "other", Do: "nothing"},
	}}, p)
	heat, ok := p.Cause("")
	require.True(t, ok)
	assert.Equal(t, []string{"several times", "N"}, heat.Variables())
	assert.Equal(t, Cause{Name: "heat", Why: "it is too hot", Cost: "all takes 3 times as long", Do: "see `a*b*c -i 7` on 7"}, heat.With(Values{"several times": "3 times", "b": "x", "N": "7"}))
	assert.Equal(t, "see `a*b*c -i <N>` on N", heat.With(nil).Do, "what is not known stays")
	other, ok := p.Cause("other")
	assert.True(t, ok)
	assert.Equal(t, "nothing", other.Do)
	_, ok = p.Cause("none")
	assert.False(t, ok)
}

func TestPagesOfAnotherFormAreErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ old, new, want string }{
		{"# slow", "# fast", "does not begin"},
		{"Warning: it", "Grave: it", "does not begin"},
		{"- Why: it is", "Why: it is", "not an item of a cause"},
		{"- Why: it is", "- Reason: it is", "want Why, Cost, Do, Last resort"},
		{"- Cost: all", "- Why: all", "once each"},
		{"- Do: nothing", "- Cost: nothing", `"other" has no remedy`},
		{"### other", "### heat", `duplicate cause "heat"`},
		{"## Causes", "## Reasons", "it has no cause"},
		{"- Do: nothing", "- Do: {luck}", "{luck} is no need"},
	} {
		require.Contains(t, page, c.old)
		_, err := parse("slow", strings.Replace(page, c.old, c.new, 1))
		assert.ErrorContains(t, err, c.want, c.new)
	}
}

func TestAllPagesAreRead(t *testing.T) {
	t.Parallel()
	assert.Greater(t, len(IDs()), 100)
	for _, id := range IDs() {
		p, ok := Get(id)
		require.True(t, ok)
		assert.NotEmpty(t, p.Causes, id)
	}
	_, ok := Get("no_such_page")
	assert.False(t, ok)
}

func TestEachFindingIsInOneGroup(t *testing.T) {
	t.Parallel()
	var grouped []string
	for _, g := range Groups() {
		grouped = append(grouped, g.IDs...)
	}
	assert.ElementsMatch(t, IDs(), grouped)
}

// places are all that any need has words for.
func places() (all []string) {
	for _, rows := range needs {
		for _, row := range rows {
			if !slices.Contains(all, row.place) {
				all = append(all, row.place)
			}
		}
	}
	slices.Sort(all)
	return all
}

// Words for a place name no tool of another. Each need has general words, at the end.
func TestWordsForAPlaceAreOfThatPlace(t *testing.T) {
	t.Parallel()
	tools := map[string]string{
		"kubernetes": `kubelet|Kubernetes|resources\.|the resources of|securityContext`, "docker": `\bdocker\b|Docker`, "podman": `\bpodman\b`, "apptainer": `\bapptainer\b`,
		"enroot": `\benroot\b`, "lxc": `\bincus\b|Proxmox`, "flatpak": `\bflatpak\b`, "slurm": `\bsrun\b|\bsbatch\b|Slurm`, "systemd": `\bsystemctl\b`,
	}
	assert.ElementsMatch(t, append(slices.Collect(maps.Keys(tools)), ""), places())
	for name, rows := range needs {
		assert.Empty(t, rows[len(rows)-1].place, name)
		for i, row := range rows {
			assert.False(t, slices.ContainsFunc(rows[:i], func(r struct{ place, do string }) bool { return r.place == row.place }), "%s: duplicate %q", name, row.place)
			assert.True(t, strings.HasSuffix(row.do, "."), "%s: a sentence: %s", name, row.do)
			for place, tool := range tools {
				if row.place != "" {
					assert.Equal(t, place == row.place, regexp.MustCompile(tool).MatchString(row.do), "%s at %s: tools of %s: %s", name, row.place, place, row.do)
				}
			}
		}
	}
	assert.Equal(t, "x: "+needs["gpu"][1].do, at("x: {gpu}", []string{"unknown", "docker", "slurm"}), "the first place that has words")
	assert.Equal(t, needs["gpu"][len(needs["gpu"])-1].do, at("{gpu}", nil))
}

// Terminals and the HTML page show by the code quotes what can be copied: a command has them, and is whole.
func TestCommandsOfRemediesAreInCodeQuotes(t *testing.T) {
	t.Parallel()
	command := regexp.MustCompile(`\b(?:sudo|systemctl|numactl|modprobe|numastat|taskset|lspci|mokutil|ipmitool|cpupower|pip|wsl) -?-?\w` +
		`|\b(?:docker|podman) (?:run -|run \w+ -|update)|\bnvidia-(?:smi|ctk|modprobe) (?:-|\w+ -|cdi|mig)|\bulimit -|\bexport \w+=|\becho [^ ]+ \||\bdmesg \|`)
	commands := 0
	for _, id := range IDs() {
		p, _ := Get(id)
		for _, c := range p.Causes {
			texts := []string{c.LastResort, c.Confirm}
			for _, place := range places() {
				texts = append(texts, at(c.Do, []string{place}))
			}
			for _, text := range texts {
				parts := strings.Split(text, "`")
				assert.Equal(t, 1, len(parts)%2, "%s: code quotes come in pairs: %s", id, text)
				for i, part := range parts {
					if i%2 == 0 {
						assert.NotRegexp(t, command, part, id)
						continue
					}
					commands++
					assert.Equal(t, strings.TrimSpace(part), part, id)
					if strings.Contains(part, " ") { // it gets a line of its own
						assert.True(t, strings.HasSuffix(parts[i-1], ": "), "%s: %s: a command follows a colon", id, part)
						assert.Regexp(t, `^($|\.$|\. )`, parts[i+1], "%s: %s: a command ends its sentence", id, part)
					}
				}
			}
		}
	}
	assert.Greater(t, commands, 100)
}
