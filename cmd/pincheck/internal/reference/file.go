package reference

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A Kind is how the rates of a file are known.
type Kind string

// The kinds.
const (
	Measured Kind = "measured" // by pincheck bench, on one machine
	Cited    Kind = "cited"    // published by others
	Computed Kind = "computed" // by arithmetic, of a link whatever the GPU
)

// A File is what one type of machine reaches. reference/schema.json describes its JSON.
type File struct {
	Name    string  `json:"-"`
	Kind    Kind    `json:"kind"`
	Machine Machine `json:"machine"`
	Rows    []Row   `json:"rows"`

	link  hostinfo.PCIe // of the machine; zero for another kind of link
	words []string      // of the name of its GPU
}

// A Machine is a type of machine: nothing in it tells one machine of the type from another.
type Machine struct {
	GPU     string `json:"gpu,omitempty"`  // name of the product; empty in computed files
	Link    string `json:"link,omitempty"` // PCIe 5.0 x16 or NVLink-C2C; empty if unknown
	CPU     string `json:"cpu,omitempty"`
	Sockets int    `json:"sockets,omitempty"`
	Host    string `json:"host,omitempty"` // bare metal or virtual machine
	Driver  string `json:"driver,omitempty"`
	Kernel  string `json:"kernel,omitempty"`
}

// nvlinkC2C is the link of GPUs that share an NVLink-C2C with their processor.
const nvlinkC2C = "NVLink-C2C"

// String returns "NVIDIA H200 on PCIe 5.0 x16".
func (m Machine) String() string {
	if m.GPU == "" {
		return m.Link
	}
	if m.Link == "" {
		return m.GPU + " on an unknown link"
	}
	return m.GPU + " on " + m.Link
}

// A Row is the rate of copies of one direction.
type Row struct {
	What      string      `json:"what"` // bandwidth
	Direction string      `json:"direction"`
	Size      int         `json:"size_bytes,omitempty"` // of one copy; 0 for large ones of no known size
	Unit      result.Unit `json:"unit"`
	N         int         `json:"n,omitempty"` // samples
	Median    float64     `json:"median,omitempty"`
	Min       float64     `json:"min"`
	Max       float64     `json:"max,omitempty"`
	Formula   string      `json:"formula,omitempty"`
	Date      string      `json:"date,omitempty"`
	Source    string      `json:"source,omitempty"`
}

// IsFile reports whether JSON is meant to be a file of the table, well-formed or not.
func IsFile(text []byte) bool {
	var head struct{ Machine, Rows json.RawMessage }
	return json.Unmarshal(text, &head) == nil && head.Machine != nil && head.Rows != nil
}

// Read reads a file from JSON. Fields that the schema does not have, and rates that cannot be, are errors.
func Read(name string, text []byte) (*File, error) {
	f := &File{Name: name}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(f)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more follows the JSON object")
		}
	}
	if err == nil {
		err = f.check()
	}
	if err != nil {
		return nil, fmt.Errorf("not a file of the reference table: %w", err)
	}
	return f, nil
}

// check returns what the schema forbids, and what the link cannot carry.
func (f *File) check() error {
	m := f.Machine
	link, err := hostinfo.ParsePCIe(m.Link)
	if err != nil && m.Link != nvlinkC2C {
		return fmt.Errorf("machine: link %q: want one such as PCIe 5.0 x16, or %s", m.Link, nvlinkC2C)
	}
	f.link, f.words = link, wordsOf(m.GPU)
	known := Machine{Link: m.Link}
	switch f.Kind {
	case Measured:
		known = m
		if m.GPU == "" || m.CPU == "" || m.Driver == "" || m.Kernel != kernelVersion.FindString(m.Kernel) || m.Kernel == "" || m.Sockets < 0 || m.Host != bareMetal && m.Host != virtualMachine {
			return fmt.Errorf("machine: want gpu, cpu, driver, kernel (numbers alone) and host (%s or %s)", bareMetal, virtualMachine)
		}
	case Cited:
		if known.GPU = m.GPU; m.GPU == "" {
			return errors.New("machine: want gpu")
		}
	case Computed:
	default:
		return fmt.Errorf("kind %q: want %s, %s or %s", f.Kind, Measured, Cited, Computed)
	}
	if m != known {
		return fmt.Errorf("machine: a %s file has no more than gpu and link, and a computed one no gpu", f.Kind)
	}
	if len(f.Rows) == 0 {
		return errors.New("rows: there are none")
	}
	for i, r := range f.Rows {
		if err := r.check(f.Kind, link); err != nil {
			return fmt.Errorf("row %d: %w", i+1, err)
		}
		if slices.ContainsFunc(f.Rows[:i], func(o Row) bool { return o.Direction == r.Direction && o.Size == r.Size }) {
			return fmt.Errorf("row %d: another row has its direction and size", i+1)
		}
	}
	return nil
}

func (r *Row) check(kind Kind, link hostinfo.PCIe) error {
	ways := 1.0
	switch r.Direction {
	case result.HostToDevice, result.DeviceToHost:
	case result.Both:
		ways = 2
	default:
		return fmt.Errorf("direction %q: want %s, %s or %s", r.Direction, result.HostToDevice, result.DeviceToHost, result.Both)
	}
	if r.What != bandwidth || r.Unit != result.GBPerSecond {
		return fmt.Errorf("what %q, unit %q: want %s in %s", r.What, r.Unit, bandwidth, result.GBPerSecond)
	}
	_, date := time.Parse(time.DateOnly, r.Date)
	known := Row{What: r.What, Direction: r.Direction, Unit: r.Unit, Min: r.Min}
	switch kind {
	case Measured:
		known = *r
		known.Formula = ""
		if r.Size < smallestCopy || r.N < 1 || r.Median < r.Min || r.Max < r.Median || date != nil || r.Source == "" {
			return fmt.Errorf("want size_bytes of %d and more, n, min, median and max in this order, date and source", smallestCopy)
		}
	case Cited:
		known.Max, known.Source = r.Max, r.Source
		for address := range strings.SplitSeq(r.Source, " ") {
			if len(address) <= len("https://") || !strings.HasPrefix(address, "https://") || r.Max < r.Min {
				return errors.New("want min, max of at least that, and an https address as source")
			}
		}
	case Computed:
		if known.Formula = r.Formula; r.Formula == "" {
			return errors.New("want min and formula")
		}
	}
	if *r != known {
		return fmt.Errorf("it has fields that %s rows have not", kind)
	}
	if !(r.Min > 0) {
		return errors.New("want a min above 0")
	}
	if carries := ways * link.Rate(); carries > 0 && max(r.Min, r.Max) > carries {
		return fmt.Errorf("%g GB/s are more than %v carries (%.3g GB/s)", max(r.Min, r.Max), link, carries)
	}
	return nil
}

// Values of Machine.Host.
const (
	bareMetal      = "bare metal"
	virtualMachine = "virtual machine"
)

// kernelVersion is the part of a release that Linux has given it: what follows may name who built it.
var kernelVersion = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+`)

// MachineOf returns the type of machine of a GPU with its link, which is the zero value if it is unknown. Host is nil
// if nothing is known of it.
func MachineOf(host *hostinfo.Host, gpu string, link hostinfo.PCIe) Machine {
	m := Machine{GPU: gpu}
	switch {
	case Coherent(gpu):
		m.Link = nvlinkC2C
	case link.Rate() > 0:
		m.Link = link.String()
	}
	if host == nil {
		return m
	}
	m.CPU, m.Sockets, m.Host = host.CPU.Model, host.CPU.Sockets, bareMetal
	if host.Virt.VM {
		m.Host = virtualMachine
	}
	m.Driver, m.Kernel = host.NVIDIA.DriverVersion, kernelVersion.FindString(host.Kernel.Release)
	return m
}

// coherent are the GPUs that share an NVLink-C2C with their processor.
var coherent = [][]string{{"GH200"}, {"GB200"}, {"GB300"}, {"GB10"}}

// Coherent reports whether a GPU shares an NVLink-C2C with its processor: its copies do
// not go over the PCI Express link that the host shows.
func Coherent(gpu string) bool {
	has := wordsOf(gpu)
	return slices.ContainsFunc(coherent, func(words []string) bool { return named(words, has) })
}

// wordsOf returns the words of a product's name.
func wordsOf(name string) []string {
	return strings.FieldsFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
}

// named reports whether a product's name has all of these words: NVIDIA A100-SXM4-80GB is an A100,
// NVIDIA RTX A1000 is not.
func named(words, has []string) bool {
	return len(words) > 0 && !slices.ContainsFunc(words, func(w string) bool { return !slices.Contains(has, w) })
}

// Make returns the file of a machine from what the experiment bandwidth measured on its GPUs, which are all of its type:
// the copies of registered memory, with the samples of all GPUs together. Source names the program that measured.
func Make(m Machine, b *result.Bench, source string) (*File, error) {
	f := &File{Kind: Measured, Machine: m}
	samples := map[Row][]float64{}
	for _, s := range b.Series {
		size, err := strconv.Atoi(s.Labels.Get(result.Size))
		if err != nil || size < smallestCopy || !isCopy(&s) || s.Labels.Get(result.Memory) != registered || len(s.Samples) == 0 {
			continue
		}
		r := Row{What: bandwidth, Direction: s.Labels.Get(result.Direction), Size: size, Unit: s.Unit, Date: b.Started.UTC().Format(time.DateOnly), Source: source}
		if samples[r] == nil {
			f.Rows = append(f.Rows, r)
		}
		samples[r] = slices.Concat(samples[r], s.Samples)
	}
	if len(f.Rows) == 0 {
		return nil, errors.New("there is no copy of registered memory of 4 MiB or more")
	}
	for i := range f.Rows {
		r := &f.Rows[i]
		all := samples[*r]
		stats := result.Summarize(all)
		r.N, r.Median, r.Min, r.Max = len(all), result.FourDigits(stats.Median), result.FourDigits(stats.Min), result.FourDigits(stats.Max) // samples have no more
	}
	return f, f.check()
}

// JSON returns the file as [Read] reads it.
func (f *File) JSON() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	err := e.Encode(f)
	return b.Bytes(), err
}
