package findings

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const page = "# slow\n\nWarning: it is slow.\n\n## What it means\n\nText: more.\n\n## Causes\n\n### heat\n\n- Why: it is\n  too hot\n- Cost: all takes *several times* as long\n- Do: see `a*b*c` on *N*\n\n" +
	"### other\n\n- Do: nothing\n\n## More\n\n- Why: of no cause\n"

func TestParse(t *testing.T) {
	t.Parallel()
	p, err := parse("slow", page)
	require.NoError(t, err)
	assert.Equal(t, &Page{ID: "slow", Severity: "warning", Title: "it is slow", Text: page, Causes: []Cause{
		{Name: "heat", Why: "it is too hot", Cost: "all takes *several times* as long", Do: "see `a*b*c` on *N*"},
		{Name: "other", Do: "nothing"},
	}}, p)
	heat, ok := p.Cause("")
	require.True(t, ok)
	assert.Equal(t, []string{"several times", "N"}, heat.Variables())
	assert.Equal(t, Cause{Name: "heat", Why: "it is too hot", Cost: "all takes 3 times as long", Do: "see a*b*c on N"}, heat.With(Values{"several times": "3 times", "b": "x"}))
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
		{"- Why: it is", "Why: it is", "no item of a cause"},
		{"- Why: it is", "- Reason: it is", "want Why, Cost, Do, Last"},
		{"- Cost: all", "- Why: all", "once each"},
		{"- Do: nothing", "- Cost: nothing", `"other" has no remedy`},
		{"### other", "### heat", `two causes "heat"`},
		{"## Causes", "## Reasons", "it has no cause"},
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
