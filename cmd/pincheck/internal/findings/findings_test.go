package findings

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

const page = "# slow\n\nWarning: it is slow.\n\n## What it means\n\nText: more.\n\n## Causes\n\n### heat\n\n- Found: it is hot\n- Why: it is\n  too hot\n- Cost: all takes *several times* as long\n- Do: see `a*b*c -i <N>` on *N*\n\n" +
	"### other\n\n- Do: nothing\n\n## More\n\n- Why: of no cause\n"

func TestParse(t *testing.T) {
	t.Parallel()
	p, err := parse("slow", page)
	require.NoError(t, err)
	assert.Equal(t, &Page{ID: "slow", Severity: "warning", Title: "it is slow", Text: page, Causes: []Cause{
		{Name: "heat", Found: "it is hot", Why: "it is too hot", Cost: "all takes *several times* as long", Do: "see `a*b*c -i <N>` on *N*"},
		{Name: "other", Found: "it is slow", Do: "nothing"},
	}}, p)
	heat, ok := p.Cause("")
	require.True(t, ok)
	assert.Equal(t, []string{"several times", "N"}, heat.Variables())
	assert.Equal(t, Cause{Name: "heat", Found: "it is hot", Why: "it is too hot", Cost: "all takes 3 times as long", Do: "see `a*b*c -i 7` on 7"}, heat.With(Values{"several times": "3 times", "b": "x", "N": "7"}))
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
		{"- Why: it is", "- Reason: it is", "want Found, Why, Cost, Do, Last resort"},
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
		for _, c := range p.Causes {
			assert.NotRegexp(t, "`|\\*|\\.$|^[A-Z][a-z]", strings.Replace(c.With(nil).Found, "Windows", "", 1), "%s: a clause without marks", id)
		}
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

// places are all that any need has words for, with the names of containers that none has words for, and without a place.
func places() (all []string) {
	all = []string{"", "container", "containerd", "gvisor"}
	for _, rows := range needs() {
		for _, row := range rows {
			for place := range strings.SplitSeq(row.places, ", ") {
				if place != "*" && !slices.Contains(all, place) {
					all = append(all, place)
				}
			}
		}
	}
	slices.Sort(all)
	return all
}

// tools are words of remedies that only make sense in some places. General words may name each as an example.
var tools = []struct{ words, places string }{
	{`\bdocker\b|Docker`, dockers},
	{`\bpodman\b|Podman`, podmans},
	{`kubelet|Kubernetes|resources\.limits|securityContext|\bpods?\b|device plugin|runtime class`, "kubernetes"},
	{`\bapptainer\b`, "apptainer"},
	{`\benroot\b`, "enroot"},
	{`\bincus\b|Proxmox|\blxc\.`, "lxc"},
	{`\bflatpak\b`, "flatpak"},
	{`\bsnap\b`, "snap"},
	{`\btoolbox\b`, "toolbox"},
	{`\bdistrobox\b`, "distrobox"},
	{`\bsrun\b|\bsbatch\b|Slurm|slurm`, "slurm"},
	{`systemctl (?:edit|set-property)|\bunit\b`, "systemd"},
	{`\.wslconfig|wsl --`, "wsl, docker desktop"},
	{`Runtime >|Accelerator|ml\.g5|machine with`, rented},
	{`--gpus`, "docker, docker desktop"},
}

// only are causes that one place alone has.
var only = map[string]string{
	"systemd_denies_devices": "systemd", "gpus_excluded/job": "slurm", "gpus_excluded/unit": "systemd",
	"sandbox_refuses": "gvisor", "no_device_nodes/wsl": "wsl", "no_gpu/container": "container",
	"wsl_no_driver": "wsl", "wsl_gpu_blocked": "wsl", "wsl_pin_limit": "wsl", "pin_refused/wsl": "wsl",
	"vgpu_unlicensed": "", "no_gpu": "", "no_gpu/vm": "",
}

// Whatever is found, and wherever: the remedy has words, and no command that the place lacks.
func TestEveryRemedyIsOfThePlace(t *testing.T) {
	t.Parallel()
	general := []string{"", "container", "containerd", "gvisor"}
	rules := make([]*regexp.Regexp, len(tools))
	names := map[string][]int{} // tools that a text names: most texts are the same at most places
	for i, tool := range tools {
		rules[i] = regexp.MustCompile(tool.words)
	}
	named := func(text string) []int {
		found, seen := names[text]
		for i := range rules {
			if !seen && rules[i].MatchString(text) {
				found = append(found, i)
			}
		}
		names[text] = found
		return found
	}
	kernelLog := regexp.MustCompile("(.{0,40})`(?:sudo )?dmesg")
	for _, id := range hosttest.Sample(IDs()) {
		p, _ := Get(id)
		for _, c := range p.Causes {
			for _, place := range places() {
				alone, limited := only[id+"/"+c.Name]
				if !limited {
					alone, limited = only[id]
				}
				outside := slices.Contains([]string{"systemd", "wsl"}, place) && (c.Name == "container" || strings.HasPrefix(id, "container_"))
				if limited && alone != place || outside {
					continue
				}
				with := c.With(nil, place)
				text := with.Do + "\n" + with.LastResort + "\n" + with.Confirm
				where := id + "/" + c.Name + " at " + place
				if need.MatchString(text) || with.Do == "" {
					t.Errorf("%s: no words: %s", where, text)
				}
				for _, i := range named(text) {
					if !slices.Contains(general, place) && !slices.Contains(strings.Split(tools[i].places, ", "), place) {
						t.Errorf("%s: %s: %s", where, tools[i].words, text)
					}
				}
				o := ownerOf([]string{place})
				if o == nil || !strings.Contains(text, "dmesg") && !strings.Contains(text, "sudo") {
					continue
				}
				if !o.sudo && strings.Contains(text, "sudo") {
					t.Errorf("%s: sudo: %s", where, text)
				}
				for _, m := range kernelLog.FindAllStringSubmatch(text, -1) {
					assert.Regexp(t, `on the host|\(needs `, m[1], "%s: who can read the kernel log", where)
				}
			}
		}
	}
}

// Where the nodes of a GPU are in the container, it was started with the GPU.
func TestWithNodesNoRemedyStartsTheContainerWithTheGPU(t *testing.T) {
	t.Parallel()
	for _, id := range []string{
		"no_uvm", "no_driver_library", "capabilities_without_compute", "device_cgroup_denies", "node_permission", "lsm_denies",
		"stale_device_node", "compat_library", "driver_mismatch", "hidden_gpu", "visible_devices_unknown",
	} {
		p, ok := Get(id)
		require.True(t, ok, id)
		for _, c := range p.Causes {
			for _, place := range places() {
				with := c.With(nil, place)
				assert.NotContains(t, with.Do+with.Confirm, "--gpus", "%s at %s", id, place)
			}
		}
	}
}

// Each need has its rows once, and general words at the end. Each is used by a page.
func TestNeeds(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for _, id := range IDs() {
		text, err := files.ReadFile(id + ".md")
		require.NoError(t, err)
		all.Write(text)
	}
	for name, rows := range needs() {
		assert.Contains(t, all.String(), "{"+name+"}", "no page has this need")
		assert.Empty(t, rows[len(rows)-1].places, name)
		for i, row := range rows {
			assert.True(t, strings.HasSuffix(row.do, "."), "%s: a sentence: %s", name, row.do)
			if i > 0 {
				assert.NotEqual(t, row.do, rows[i-1].do, name)
			}
		}
	}
	general := needs()["gpu"][len(needs()["gpu"])-1].do
	row := func(need, place string) string { return at("{"+need+"}", []string{place}) }
	assert.Equal(t, "x: "+row("gpu", "docker"), at("x: {gpu}", []string{"unknown", "docker", "slurm"}), "the first place that has words")
	assert.Equal(t, general, at("{gpu}", nil))
	assert.Equal(t, general, row("gpu", "unknown"))
	assert.Equal(t, "Raise the memory limit of the session or job that started the container.", row("memory", "flatpak"), "no words of its own")
	assert.Equal(t, row("gpu", "docker"), at("{gpu}", []string{"docker", "slurm"}))
}

func TestCommandsOfTheHostSayWhoCanRunThem(t *testing.T) {
	t.Parallel()
	const text = "Load it: `sudo modprobe nvidia`. Create it on the host, at each boot: `echo 1 | sudo tee FILE`. See `nvidia-smi`."
	assert.Equal(t, text, at(text, nil))
	assert.Equal(t, text, at(text, []string{"systemd"}))
	assert.Equal(t, "Load it (on the host): `sudo modprobe nvidia`. Create it on the host, at each boot: `echo 1 | sudo tee FILE`. See `nvidia-smi`.", at(text, []string{"docker"}))
	assert.Equal(t, "Load it (needs an administrator of the node): `modprobe nvidia`. Create it on the host, at each boot (needs an administrator of the node): `echo 1 | tee FILE`. See `nvidia-smi`.",
		at(text, []string{"docker", "slurm"}))
	assert.Equal(t, "Load it (needs the operator of the service): `modprobe nvidia`.", at("Load it: `sudo modprobe nvidia`.", []string{"colab", "docker"}))
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
			slices.Sort(texts)
			for _, text := range slices.Compact(texts) {
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

// A host exists for each place that has words: the names here and those of hostinfo are the same.
func TestEachPlaceHasAHost(t *testing.T) {
	t.Parallel()
	var found []string
	add := func(v hostinfo.Virt, env map[string]string) {
		h := hostinfo.Host{Virt: v, Env: env}
		found = append(found, h.Places()...)
	}
	for _, c := range []string{"apptainer", "container", "containerd", "distrobox", "enroot", "flatpak", "gvisor", "kubernetes", "lxc", "podman", "snap", "toolbox"} {
		add(hostinfo.Virt{Container: c}, nil)
	}
	for service := range strings.SplitSeq(rented, ", ") {
		add(hostinfo.Virt{Service: service}, nil)
	}
	add(hostinfo.Virt{Container: "docker", DockerDesktop: true, WSL: true}, nil)
	add(hostinfo.Virt{Container: "docker", Tegra: true}, nil)
	add(hostinfo.Virt{Container: "podman", Mapped: true}, nil)
	add(hostinfo.Virt{Unit: "train.service"}, nil)
	add(hostinfo.Virt{WSL: true}, nil)
	add(hostinfo.Virt{}, map[string]string{"SLURM_JOB_ID": "7"})
	found = append(found, "") // a machine of one's own
	slices.Sort(found)
	assert.Equal(t, places(), slices.Compact(found))
}
