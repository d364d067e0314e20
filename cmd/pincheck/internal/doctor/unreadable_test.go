package doctor

import (
	"encoding/json"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

// healthyHosts returns the healthy hosts of both corpora by name, and the findings that each may have.
func healthyHosts(t *testing.T) (hosts map[string]*hosttest.Case, also map[string][]string) {
	t.Helper()
	hosts, also = map[string]*hosttest.Case{}, map[string][]string{}
	for _, dir := range []string{"../../../../testdata/hosts", threadsDir} {
		files, err := filepath.Glob(filepath.Join(dir, "healthy-*.txtar"))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range hosttest.Sample(files) {
			c, err := hosttest.LoadCase(file)
			require.NoError(t, err)
			name := strings.TrimSuffix(filepath.Base(file), ".txtar")
			hosts[name] = c
			if len(c.Thread) > 0 {
				also[name] = readThread(t, name, c).Also
			}
		}
	}
	return hosts, also
}

var (
	pciAddresses = regexp.MustCompile(`(/[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])+`)
	anyNumber    = regexp.MustCompile(`pci[0-9a-f]{4}:[0-9a-f]{2}|[0-9]+`)
)

// kindOf is what a file has in common with those beside it: of eight GPUs one is hidden at a time, and with
// PINNED_SOAK each.
func kindOf(name string) string {
	if _, long := os.LookupEnv("PINNED_SOAK"); long {
		return name
	}
	return anyNumber.ReplaceAllString(pciAddresses.ReplaceAllString(name, "/P"), "N")
}

// withoutOne lists the JSON texts of facts each of which lacks one field of an object, at most three deep.
func withoutOne(t *testing.T, text []byte) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	if len(text) == 0 {
		return out
	}
	var all any
	require.NoError(t, json.Unmarshal(text, &all))
	var walk func(at string, value any, depth int)
	walk = func(at string, value any, depth int) {
		switch v := value.(type) {
		case map[string]any:
			for _, name := range slices.Sorted(maps.Keys(v)) {
				otherFindings := v[name]
				delete(v, name)
				if where := kindOf(at + "." + name); out[where] == nil {
					changed, err := json.Marshal(all)
					require.NoError(t, err)
					out[where] = changed
				}
				v[name] = otherFindings
				if depth < 3 {
					walk(at+"."+name, otherFindings, depth+1)
				}
			}
		case []any:
			for _, one := range v {
				walk(at, one, depth)
			}
		}
	}
	walk("facts", all, 0)
	return out
}

// neededFacts are those without which there is no GPU to judge, and a truth value that facts have or have not
// with all others of its object: its absence is false.
var neededFacts = []string{"facts.devices", "facts.devices.attributes.host_register_supported"}

// knownAccusations are what the doctor does not get right yet: the healthy host, what it lacks, and the finding.
// One that is right is taken out.
var knownAccusations = [][3]string{
	{"healthy-container-of-cached-checkpoint", "sys/fs/cgroup/memory.stat", "little_headroom"},
	{"healthy-slurm-second-job-one-of-four", "environment", "missing_gpus"},
	{"healthy-slurm-second-job-one-of-four", "environment", "far_cpus"},
}

// nodeFindings are right where a device node is not there, unless CUDA shows that it is hidden.
var nodeFindings = []string{"no_device_nodes", "no_uvm", "container_without_gpu"}

// The commands that evaluate a host, from the one that knows most of it. Each has its facts from those of the
// one before. Facts whose names begin with one of ignores change nothing for it.
var commands = []struct {
	name    string
	ignores []string
	facts   func(*Facts) *Facts
}{
	{"check", nil, func(f *Facts) *Facts { return f }},
	{"verify", []string{"facts.together", "facts.processes", "facts.devices.bandwidth", "facts.devices.trials", "facts.devices.other_cpus"}, func(f *Facts) *Facts {
		f.Together, f.Processes = nil, nil
		for i := range f.Devices {
			d := &f.Devices[i]
			d.Bandwidth, d.Slower, d.Trials, d.OtherCPUs = nil, nil, nil, nil
		}
		return f
	}},
	{"watch", []string{"facts."}, func(f *Facts) *Facts {
		for i := range f.Host.NVIDIA.Nodes {
			f.Host.NVIDIA.Nodes[i].OpenError = "" // CUDA opened them
		}
		return FromHost(f.Host)
	}},
}

// Containers, sandboxes and hardened kernels hide files, and hosts lack NVML, variables or parts of a measurement.
// No healthy host of which one fact is missing is accused, by no command.
func TestNoMissingFactAccusesAHealthyHost(t *testing.T) {
	t.Parallel()
	hosts, also := healthyHosts(t)
	for name, c := range hosts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := map[[3]string]bool{} // and whether it was seen
			for _, k := range knownAccusations {
				if k[0] == name {
					known[k] = false
				}
			}
			evaluate := func(without string, f *Facts) {
				expected := false
				for _, c := range commands {
					command := c.name
					if f = c.facts(f); slices.ContainsFunc(c.ignores, func(name string) bool { return strings.HasPrefix(without, name) }) {
						continue
					}
					verdict, found := Evaluate(f)
					for _, one := range found {
						accusation := [3]string{name, without, one.ID}
						if _, ok := known[accusation]; ok {
							known[accusation], expected = true, true
							continue
						}
						missing := command == "watch" && strings.HasPrefix(without, "dev") && slices.Contains(nodeFindings, one.ID)
						if one.Severity.AtLeast(Warning) && !slices.Contains(also[name], one.ID) && !missing {
							assert.Fail(t, "accused", "%s without %s: %s: %s", command, without, one.ID, one.Summary)
						}
					}
					if command != "watch" && !expected { // which shows no verdict
						assert.Contains(t, []Verdict{Healthy, Measured, Unknown, Warnings}, verdict, "%s without %s", command, without)
					}
				}
			}
			read := hostinfo.Read(c.Host, c.Environ)
			// evaluateHost evaluates a host that lacks something, unless it was not read.
			evaluateHost := func(without string, h *hostinfo.Host) {
				if !reflect.DeepEqual(h, read) {
					evaluate(without, factsOfHost(t, h, c.Facts))
				}
			}
			evaluate("nothing", factsOfCase(t, c))
			tried := map[string]bool{}
			for _, file := range slices.Sorted(maps.Keys(c.Host)) {
				for rest := len(c.Host); file != "."; file = path.Dir(file) {
					if kind := kindOf(file); tried[kind] {
						continue
					} else {
						tried[kind] = true
					}
					left := maps.Clone(c.Host)
					maps.DeleteFunc(left, func(one string, _ *fstest.MapFile) bool {
						return one == file || strings.HasPrefix(one, file+"/")
					})
					if len(left) == rest {
						continue // the directory has nothing else
					}
					rest = len(left)
					evaluateHost(file, hostinfo.Read((&capture.Archive{Host: left}).Files(), c.Environ))
				}
			}
			evaluateHost("environment", hostinfo.Read(c.Host, nil))
			for i := range c.Environ {
				environ := slices.Delete(slices.Clone(c.Environ), i, i+1)
				evaluateHost(c.Environ[i], hostinfo.Read(c.Host, environ))
			}
			for where, facts := range withoutOne(t, c.Facts) {
				if !slices.Contains(neededFacts, where) {
					host := *read
					host.NVIDIA.Nodes = slices.Clone(read.NVIDIA.Nodes) // to which facts are added
					evaluate(where, factsOfHost(t, &host, facts))
				}
			}
			for accusation, seen := range known {
				assert.True(t, seen, "%v is right now: take it from knownAccusations", accusation)
			}
		})
	}
}
