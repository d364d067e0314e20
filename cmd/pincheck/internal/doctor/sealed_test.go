package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Two sets of hosts were composed from threads, kept away while the checks were written, and judged once: first-sight.txt
// has their grades, and what the doctor said. Each may become better, and none worse.
func TestHostsThatWereJudgedOnce(t *testing.T) {
	t.Parallel()
	for _, set := range []string{"sealed", "sealed-2"} {
		dir := filepath.Join(threadsDir, set)
		text, err := os.ReadFile(filepath.Join(dir, "first-sight.txt"))
		require.NoError(t, err)
		first := map[string]grade{}
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); len(fields) >= 2 && fields[0] != "#" {
				require.Contains(t, grades, grade(fields[0]))
				first[strings.TrimSuffix(fields[1], ":")] = grade(fields[0])
			}
		}
		all := judgeThreads(t, dir)
		require.Len(t, first, len(all), "first-sight.txt has each host")
		for _, j := range all {
			require.Contains(t, first, j.name)
			assert.LessOrEqual(t, slices.Index(grades, j.grade), slices.Index(grades, first[j.name]),
				"%s was %s at first sight, and is %s: %s", j.name, first[j.name], j.grade, j.why)
		}
		t.Log("\n" + tableOf(tabulate(all)))
	}
}
