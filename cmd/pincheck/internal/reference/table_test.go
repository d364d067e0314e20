package reference

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/units"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const top = "../../../../"

func schema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	text, err := machines.ReadFile(schemaFile)
	require.NoError(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	require.NoError(t, c.AddResource("schema.json", doc))
	s, err := c.Compile("schema.json")
	require.NoError(t, err)
	return s
}

func valid(t *testing.T, s *jsonschema.Schema, text string) error {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

func content(t *testing.T, name string) string {
	t.Helper()
	text, err := machines.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

func TestFilesAreOfTheSchema(t *testing.T) {
	t.Parallel()
	s := schema(t)
	files := Builtin().files
	assert.GreaterOrEqual(t, len(files), 11)
	for _, f := range files {
		text := content(t, filepath.Base(f.Name))
		require.NoError(t, valid(t, s, text), f.Name)
		again, err := f.JSON()
		require.NoError(t, err)
		assert.Equal(t, text, string(again), "the form of pincheck bench --format reference")
	}
}

const (
	measuredFile = "nvidia-h200-pcie5-x16.json"
	citedFile    = "h100-pcie5-x16.json"
	computedFile = "pcie2-x16.json"
)

// The schema and Read refuse the same, and Read says in one sentence why.
func TestMalformedFilesAreRefused(t *testing.T) {
	t.Parallel()
	s := schema(t)
	for _, c := range []struct{ file, old, new, want string }{
		{measuredFile, `"kind": "measured"`, `"kind": "guessed"`, `kind "guessed": want measured, cited or computed`},
		{measuredFile, `"kind": "measured"`, `"kind": "cited"`, "a cited file has no more than gpu and link"},
		{measuredFile, `"gpu"`, `"hostname": "h", "gpu"`, `unknown field "hostname"`},
		{measuredFile, `"what"`, `"gpu": 0, "what"`, `unknown field "gpu"`},
		{measuredFile, `"gpu": "NVIDIA H200",`, "", "machine: want gpu, cpu"},
		{measuredFile, `"PCIe 5.0 x16"`, `"PCIe 5.0 x17 "`, `link "PCIe 5.0 x17 "`},
		{measuredFile, `"PCIe 5.0 x16"`, `"PCIe 9.0 x16"`, `link "PCIe 9.0 x16"`},
		{measuredFile, `"6.18.44"`, `"6.18.44-built-by-me"`, "kernel (numbers alone)"},
		{measuredFile, `"virtual machine"`, `"cloud"`, "host (bare metal or virtual machine)"},
		{measuredFile, `"n": 9,`, "", "row 1: want size_bytes"},
		{measuredFile, `"date": "2026-11-22",`, `"date": "yesterday",`, "row 1: want size_bytes"},
		{measuredFile, `4194304`, `4096`, "row 1: want size_bytes of 4194304 and more"},
		{measuredFile, `"host_to_device"`, `"up"`, `row 1: direction "up": want host_to_device`},
		{measuredFile, `"unit": "gb_per_s"`, `"unit": "gib_per_s"`, `unit "gib_per_s": want bandwidth in gb_per_s`},
		{measuredFile, `"source"`, `"formula": "x", "source"`, "row 1: it has fields that measured rows have not"},
		{citedFile, `"gpu": "H100",`, "", "machine: want gpu"},
		{citedFile, `"link"`, `"cpu": "EPYC", "link"`, "a cited file has no more than gpu and link"},
		{citedFile, `"max": 57,`, "", "row 1: want min, max"},
		{citedFile, `"min": 55,`, `"min": 55, "median": 56,`, "row 1: it has fields that cited rows have not"},
		{citedFile, `https://github.com/NVIDIA`, `NVIDIA`, "an https address as source"},
		{computedFile, `"link"`, `"gpu": "M2090", "link"`, "and a computed one no gpu"},
		{computedFile, `"formula"`, `"source"`, "row 1: want min and formula"},
		{computedFile, `"min": 6.919`, `"min": 0`, "row 1: want a min above 0"},
		{computedFile, `"min": 6.919`, `"min": "6.9"`, "cannot unmarshal"},
	} {
		text := content(t, c.file)
		require.Contains(t, text, c.old)
		bad := strings.Replace(text, c.old, c.new, 1)
		_, err := Read("x.json", []byte(bad))
		require.ErrorContains(t, err, c.want, "%s: %s", c.file, c.new)
		assert.True(t, strings.HasPrefix(err.Error(), "not a file of the reference table: "), err)
		assert.NotContains(t, err.Error(), "\n")
		require.Error(t, valid(t, s, bad), "%s: %s", c.file, c.new)
	}
	// What a schema cannot say.
	for _, c := range []struct{ file, old, new, want string }{
		{measuredFile, `"median": 53,`, `"median": 63,`, "min, median and max in this order"},
		{citedFile, `"max": 57`, `"max": 77`, "row 1: 77 GB/s are more than PCIe 5.0 x16 carries (63 GB/s)"},
		{measuredFile, `"max": 97.24`, `"max": 127`, "row 3: 127 GB/s are more than PCIe 5.0 x16 carries (126 GB/s)"},
		{citedFile, `"device_to_host"`, `"host_to_device"`, "row 2: another row has its direction and size"},
		{citedFile, "\n}\n", "\n}\n{}\n", "more follows"},
		{citedFile, "\n}\n", "\n", "unexpected EOF"},
	} {
		text := content(t, c.file)
		require.Contains(t, text, c.old)
		_, err := Read("x.json", []byte(strings.Replace(text, c.old, c.new, 1)))
		assert.ErrorContains(t, err, c.want)
	}
	for _, bad := range []string{"", "null", "[]", "7", `{"kind":"cited","machine":{"gpu":"H100","link":"PCIe 5.0 x16"},"rows":[]}`} {
		_, err := Read("x.json", []byte(bad))
		assert.Error(t, err, bad)
		assert.Error(t, valid(t, s, bad), bad)
	}
}

// Each measured row of this repository stands in the file that it names.
func TestMeasuredRowsAreThoseOfTheirSources(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, f := range Builtin().files {
		for _, r := range f.Rows {
			if f.Kind != Measured || !strings.HasPrefix(r.Source, "testdata/") {
				continue
			}
			seen++
			text, err := os.ReadFile(top + r.Source)
			require.NoError(t, err)
			var run struct {
				Host    *hostinfo.Host
				Devices []struct {
					Name string
					Link struct {
						Speed float64 `json:"gt_per_s"`
						Width int
					}
				}
				Benches []result.Bench
			}
			require.NoError(t, json.Unmarshal(text, &run))
			d := run.Devices[0]
			assert.Equal(t, f.Machine, MachineOf(run.Host, d.Name, hostinfo.PCIe{Speed: d.Link.Speed, Width: d.Link.Width}), f.Name)
			made, err := Make(f.Machine, &run.Benches[0], r.Source)
			require.NoError(t, err)
			assert.Contains(t, made.Rows, r)
		}
	}
	assert.Equal(t, 9, seen)
}

// What was published or measured of a link lies where packets of 128 to 512 bytes leave it, and what is computed
// is the arithmetic of packets of 128 bytes. Going to the device the packets are completions of its reads, with a
// header of 12 bytes, and from the device writes, with one of 16. Up to generation 5 each packet also has 8 bytes of
// framing, sequence number and checksum. Acknowledgements and flow control take a few per cent more.
func TestRowsFitTheirLinks(t *testing.T) {
	t.Parallel()
	payloadRate := func(l hostinfo.PCIe, direction string, payload int) float64 {
		overhead := 12
		if direction == result.DeviceToHost {
			overhead = 16
		}
		if l.Speed < 64 { // the flits of generation 6 need no framing a packet
			overhead += 8
		}
		return l.Rate() * float64(payload) / float64(payload+overhead)
	}
	for _, f := range Builtin().files {
		link, err := hostinfo.ParsePCIe(f.Machine.Link)
		if err != nil { // NVLink-C2C
			continue
		}
		for _, r := range f.Rows {
			smallest := payloadRate(link, r.Direction, 128)
			switch {
			case f.Kind == Computed:
				assert.InEpsilon(t, smallest, r.Min, 1e-3, f.Name)
				assert.True(t, strings.HasPrefix(r.Formula, fmt.Sprintf("%g GT/s x %d lanes", link.Speed, link.Width)), f.Name)
			case r.Direction != result.Both && (r.Size == 0 || r.Size >= largeCopy):
				assert.Less(t, r.Max, payloadRate(link, r.Direction, 512), f.Name)
				assert.Greater(t, r.Min, 0.85*smallest, f.Name)
			}
		}
	}
}

// machine is a measured file of one row.
func machine(name string, rate float64, change func(*Machine)) *File {
	f := &File{Name: name, Kind: Measured, Machine: Machine{GPU: "NVIDIA X1", Link: "PCIe 5.0 x16", CPU: "A", Sockets: 2, Host: bareMetal, Driver: "1.0", Kernel: "6.1"},
		Rows: []Row{{What: bandwidth, Direction: result.HostToDevice, Size: 64 << 20, Unit: result.GBPerSecond, N: 1, Median: rate, Min: rate, Max: rate, Date: "2026-11-22", Source: "a test"}}}
	if change != nil {
		change(&f.Machine)
	}
	return f
}

func TestTheNearestMachineCounts(t *testing.T) {
	t.Parallel()
	other := func(cpu string) func(*Machine) { return func(m *Machine) { m.CPU = cpu } }
	table := func(files ...*File) *Table {
		for _, f := range files {
			require.NoError(t, f.check())
		}
		made, err := NewTable(files...)
		require.NoError(t, err)
		return made
	}
	cited := &File{Name: "cited", Kind: Cited, Machine: Machine{GPU: "X1", Link: "PCIe 5.0 x16"},
		Rows: []Row{{What: bandwidth, Direction: result.HostToDevice, Unit: result.GBPerSecond, Min: 40, Max: 41, Source: "https://example.org"}}}
	computed := &File{Name: "computed", Kind: Computed, Machine: Machine{Link: "PCIe 5.0 x16"},
		Rows: []Row{{What: bandwidth, Direction: result.HostToDevice, Unit: result.GBPerSecond, Min: 30, Formula: "f"}}}
	narrow := machine("narrow", 5, func(m *Machine) { m.GPU, m.Link = "NVIDIA X2", "PCIe 5.0 x4" })
	own, b, c := machine("own", 50, nil), machine("b", 48, other("B")), machine("c", 47, other("C"))
	us := own.Machine
	us.Driver, us.Kernel = "2.0", "6.2" // software makes no other machine
	elsewhere, another := us, us
	elsewhere.CPU, another.GPU = "D", "NVIDIA X9"
	for _, tt := range []struct {
		table *Table
		m     Machine
		want  string
	}{
		{table(computed, cited, c, b, own), us, "own: NVIDIA X1"},
		{table(computed, cited, c, b, own), elsewhere, "c: NVIDIA X1"},
		{table(computed, cited), us, "cited: X1"},
		{table(computed, cited, narrow, own), another, "cited: X1"},
		{table(computed, narrow), another, "computed: PCIe 5.0 x16"},
		{table(narrow), another, ""},
	} {
		got := tt.table.Expect(tt.m, copies(result.HostToDevice, 64<<20))
		if tt.want == "" {
			assert.Nil(t, got)
			continue
		}
		require.NotNil(t, got, tt.want)
		assert.True(t, strings.HasPrefix(got.Source, tt.want), "%s: want %s", got.Source, tt.want)
	}
	again := machine("again", 51, func(m *Machine) { m.Driver, m.Kernel = "2.0", "6.2" })
	_, err := NewTable(own, b, again)
	assert.EqualError(t, err, "own and again are both of NVIDIA X1 on PCIe 5.0 x16: only one file may be")
}

// Nothing of a host but its type is in a machine.
func TestMachineOfAHost(t *testing.T) {
	t.Parallel()
	fsys, err := hosttest.Load(top + "testdata/hosts/h200-vm.txtar")
	require.NoError(t, err)
	host := hostinfo.Read(fsys, nil)
	host.Kernel.Release = "6.18.44-built-by-alice"
	m := MachineOf(host, "NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16})
	assert.Equal(t, Machine{GPU: "NVIDIA H200", Link: "PCIe 5.0 x16", CPU: "Intel(R) Xeon(R) Processor", Sockets: 1, Host: "virtual machine", Driver: "580.159.04", Kernel: "6.18.44"}, m)
	host.Virt.VM = false
	assert.Equal(t, "bare metal", MachineOf(host, "X", hostinfo.PCIe{}).Host)
	assert.Equal(t, "X on an unknown link", on("X", hostinfo.PCIe{}).String())
}

func TestMakeTakesTheSamplesOfAllGPUs(t *testing.T) {
	t.Parallel()
	b := &result.Bench{Name: "bandwidth"}
	for i, rates := range [][]float64{{50, 51, 52}, {53, 54.321987}} {
		s := copies(result.HostToDevice, 64<<20)
		s.Labels = s.Labels.With(result.Device, fmt.Sprint(i))
		s.Samples = rates
		small, pageable, unit := *s, *s, *s
		small.Labels = s.Labels.With(result.Size, "4096")
		pageable.Labels = s.Labels.With(result.Memory, "pageable")
		unit.Unit = result.Seconds
		b.Series = append(b.Series, *s, small, pageable, unit)
	}
	m := machine("", 1, nil).Machine
	f, err := Make(m, b, "a test")
	require.NoError(t, err)
	assert.Equal(t, []Row{{What: "bandwidth", Direction: "host_to_device", Size: 64 << 20, Unit: "gb_per_s", N: 5, Median: 52, Min: 50, Max: 54.32, Date: "0001-01-01", Source: "a test"}}, f.Rows)
	text, err := f.JSON()
	require.NoError(t, err)
	back, err := Read("", text)
	require.NoError(t, err)
	assert.Equal(t, f, back)

	_, err = Make(m, &result.Bench{}, "a test")
	assert.ErrorContains(t, err, "no copy of registered memory of 4 MiB or more")
	m.Link = ""
	_, err = Make(m, b, "a test")
	assert.ErrorContains(t, err, `link "": want one such as PCIe 5.0 x16`)
	m.Link = "PCIe 1.0 x16" // read when it slept
	_, err = Make(m, b, "a test")
	assert.ErrorContains(t, err, "more than PCIe 1.0 x16 carries")
}

const (
	tableBegin = "<!-- The tables below are made of the files in cmd/pincheck/internal/reference: make golden -->\n"
	tableEnd   = "<!-- end -->\n"
)

// markdown renders the files of one kind: a row for each size, and a column for each direction.
func markdown(kind Kind) string {
	var b strings.Builder
	for _, f := range Builtin().files {
		if f.Kind != kind {
			continue
		}
		m := f.Machine
		if kind == Measured {
			fmt.Fprintf(&b, "\n%s: %s × %d, %s, driver %s, Linux %s. [%s](../cmd/pincheck/internal/%s)\n\n", m, m.CPU, m.Sockets, m.Host, m.Driver, m.Kernel, filepath.Base(f.Name), f.Name)
			b.WriteString("| size | to GPU | from GPU | both ways | samples | date | source |\n|---|---|---|---|---|---|---|\n")
		}
		for rows := f.Rows; len(rows) > 0; {
			same := rows[0]
			var rates [3]string
			sources := map[string]bool{}
			rows = slices.DeleteFunc(slices.Clone(rows), func(r Row) bool {
				if r.Size != same.Size || r.N != same.N || r.Date != same.Date {
					return false
				}
				at := slices.Index([]string{result.HostToDevice, result.DeviceToHost, result.Both}, r.Direction)
				if rates[at] != "" {
					return false
				}
				rates[at] = rate(r)
				for source := range strings.SplitSeq(r.Source, " ") {
					sources[source] = true
				}
				return true
			})
			var links []string
			for _, source := range slices.Sorted(maps.Keys(sources)) {
				if strings.HasPrefix(source, "testdata/") {
					links = append(links, fmt.Sprintf("[%s](../%s)", filepath.Base(source), source))
				} else {
					links = append(links, "<"+source+">")
				}
			}
			cells := append([]string{m.GPU, m.Link}, rates[:]...)
			switch kind {
			case Measured:
				cells = append(append([]string{units.Bytes(same.Size)}, rates[:]...), fmt.Sprint(same.N), same.Date, strings.Join(links, ", "))
			case Cited:
				cells = append(cells, strings.Join(links, ", "))
			case Computed:
				cells = cells[1:4]
			}
			b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
		}
	}
	return b.String()
}

// rate returns the median with its range, or the range alone.
func rate(r Row) string {
	text := fmt.Sprintf("%g", r.Min)
	if r.Max > r.Min {
		text += fmt.Sprintf(" to %g", r.Max)
	}
	if r.Median > 0 {
		return fmt.Sprintf("%g (%s)", r.Median, text)
	}
	return text
}

func TestDocument(t *testing.T) {
	t.Parallel()
	file := top + "docs/reference.md"
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), tableBegin)
	require.True(t, ok)
	tables, after, ok := strings.Cut(rest, tableEnd)
	require.True(t, ok)
	made := "\n### Measured\n" + markdown(Measured) +
		"\n### Cited\n\n| GPU | link | to GPU | from GPU | both ways | source |\n|---|---|---|---|---|---|\n" + markdown(Cited) +
		"\n### Computed\n\n| link | to GPU | from GPU |\n|---|---|---|\n" + markdown(Computed) + "\n"
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(before+tableBegin+made+tableEnd+after), 0o644))
	} else {
		assert.Equal(t, made, tables, "run the test with -update")
	}
}
