package doctor

import (
	"maps"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

// Containers, sandboxes and hardened kernels hide files. A healthy host of which one file or
// directory does not show stays without a warning: what is not there accuses nothing.
func TestFilesThatDoNotShowAccuseNothing(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"h200-vm", "a100-dual-socket", "gh200", "wsl2", "mig-container", "cgroup-v1-t4", "container-few-cores"} {
		c, err := hosttest.LoadCase(filepath.Join("..", "..", "..", "..", "testdata", "hosts", "healthy-"+host+".txtar"))
		require.NoError(t, err)
		whole := c.Host
		hidden := map[string]bool{}
		for name := range whole {
			for ; name != "."; name = path.Dir(name) {
				hidden[name] = true
			}
		}
		for name := range hidden {
			left := maps.Clone(whole)
			maps.DeleteFunc(left, func(one string, _ *fstest.MapFile) bool {
				return one == name || strings.HasPrefix(one, name+"/")
			})
			c.Host = left
			_, verdict, ids := judgeCase(t, c)
			assert.Contains(t, []Verdict{Healthy, Measured}, verdict, "%s without %s: %v", host, name, ids)
			if name == "dev" || strings.HasPrefix(name, "dev/") {
				continue // a node that is not there is missing
			}
			f := FromHost(hostinfo.Read(left, c.Environ))
			_, found := Evaluate(f)
			for _, one := range found {
				assert.False(t, one.Severity.AtLeast(Warning), "%s without %s, as watch reads it: %s: %s", host, name, one.ID, one.Summary)
			}
		}
	}
}
