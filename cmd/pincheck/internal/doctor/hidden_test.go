package doctor

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// hidden are facts that are hidden together: by a sandbox, an unprivileged container, a hardened kernel, a report
// that somebody sent.
var hidden = []struct {
	name  string
	files []string // and what is below
	facts []string // of the object, and of each device
}{
	{name: "no /sys", files: []string{"sys"}},
	{name: "no PCI bus", files: []string{"sys/bus", "sys/devices/pci"}},
	{name: "no firmware", files: []string{"sys/class", "sys/firmware", "sys/hypervisor", "proc/device-tree"}},
	{name: "no control groups", files: []string{"sys/fs/cgroup", "proc/self/cgroup"}},
	{name: "no mounts", files: []string{"proc/self/mountinfo"}},
	{name: "no /proc/driver", files: []string{"proc/driver"}},
	{name: "no modules", files: []string{"proc/modules", "proc/devices", "sys/module", "lib/modules"}},
	{name: "no user", files: []string{"proc/self/status", "proc/self/limits", "proc/self/attr"}},
	{name: "no memory", files: []string{"proc/meminfo", "proc/buddyinfo", "proc/vmstat", "sys/devices/system"}},
	{name: "no attempt to open nodes", facts: []string{"node_errors"}},
	{name: "no NVML", facts: []string{"nvml", "health"}},
	{name: "no measurement", facts: []string{"bandwidth", "verify", "together"}},
	{
		name:  "an unknown sandbox",
		files: []string{"sys", "proc/driver", "proc/modules", "proc/devices", "proc/self/cgroup", "proc/self/mountinfo", "proc/version"},
		facts: []string{"nvml", "health"},
	},
}

// without returns a host that lacks some facts, and reports whether the original has any of these facts.
func without(t *testing.T, c *hosttest.Case, files, facts []string) (left *hosttest.Case, changed bool) {
	t.Helper()
	left = &hosttest.Case{Host: maps.Clone(c.Host), Environ: c.Environ, Facts: c.Facts}
	maps.DeleteFunc(left.Host, func(name string, _ *fstest.MapFile) bool {
		return slices.ContainsFunc(files, func(file string) bool { return strings.HasPrefix(name, file) })
	})
	changed = len(left.Host) < len(c.Host)
	if len(facts) == 0 || len(c.Facts) == 0 {
		return left, changed
	}
	var all map[string]any
	require.NoError(t, json.Unmarshal(c.Facts, &all))
	objects := []map[string]any{all}
	devices, _ := all["devices"].([]any)
	for _, d := range devices {
		objects = append(objects, d.(map[string]any))
	}
	for _, object := range objects {
		n := len(object)
		for _, name := range facts {
			delete(object, name)
		}
		changed = changed || len(object) < n
	}
	var err error
	left.Facts, err = json.Marshal(all)
	require.NoError(t, err)
	return left, changed
}

// irreversible matches remedies that cost a card, or take a machine from others.
var irreversible = regexp.MustCompile(`(?i)drain|cordon|rma|reseat|replace`)

// What is hidden makes a cause unknown, and never another one certain: no finding is certain that is not there when
// everything shows, unless it is right. A healthy host is accused of nothing.
func TestNoHiddenFactsMakeAWrongCauseCertain(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(threadsDir, "*.txtar"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range hosttest.Sample(files) {
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := hosttest.LoadCase(file)
			require.NoError(t, err)
			th := readThread(t, name, c)
			allowed := slices.Concat(th.NamedBy.IDs, th.PartlyBy, th.Also)
			_, found := Evaluate(factsOfCase(t, c))
			for _, one := range found {
				allowed = append(allowed, one.ID)
			}
			for _, h := range hidden {
				left, changed := without(t, c, h.files, h.facts)
				if !changed {
					continue
				}
				_, found := Evaluate(factsOfCase(t, left))
				for _, one := range found {
					if !one.Severity.AtLeast(Warning) || slices.Contains(allowed, one.ID) {
						continue
					}
					assert.False(t, one.Certainty == Certain || th.Kind == "healthy", "%s: %s: %s", h.name, one.ID, one.Summary)
					for _, m := range drastic.FindAllStringSubmatch(one.Remedy, -1) {
						assert.False(t, m[1] == "" && irreversible.MatchString(m[2]), "%s: %s says %s", h.name, one.ID, m[2])
					}
				}
			}
		})
	}
}
