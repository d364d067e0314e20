package supportfile

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
)

// notAvailable is nvidia-smi's word for what it does not know.
const notAvailable = "N/A"

// A smiGPU is a GPU of nvidia-smi -q: values by their paths, in the words of the text and the form of the document.
type smiGPU struct {
	values    map[string]string
	processes []nvml.Process
}

const (
	maxValues    = 600 // of a GPU: nvidia-smi prints some 250
	maxProcesses = 200
	maxDepth     = 12
)

func (g *smiGPU) set(path, value string) {
	if value = strings.TrimSpace(value); len(g.values) < maxValues && g.values[path] == "" && len(path)+len(value) < 600 {
		g.values[path] = value
	}
}

// get returns the first of the values that is known. Versions of nvidia-smi have other words.
func (g *smiGPU) get(paths ...string) string {
	for _, p := range paths {
		if v := g.values[p]; v != "" && v != notAvailable && v != "[N/A]" && v != "Not Supported" {
			return v
		}
	}
	return ""
}

// number returns the number that a value begins with: 210 MHz, 16x, 30 C; nil if it has none.
func (g *smiGPU) number(paths ...string) *int {
	v := g.get(paths...)
	n, err := strconv.Atoi(leading.FindString(v))
	if err != nil {
		return nil
	}
	return &n
}

// whole is number, 0 if unknown.
func (g *smiGPU) whole(path string) int {
	if n := g.number(path); n != nil {
		return *n
	}
	return 0
}

var leading = regexp.MustCompile(`^\d{1,9}\b|^\d{1,2}`)

// sum adds the numbers that are known; nil if none is.
func (g *smiGPU) sum(paths ...string) *int {
	var total *int
	for _, p := range paths {
		if n := g.number(p); n != nil {
			if total == nil {
				total = new(int)
			}
			*total += *n
		}
	}
	return total
}

// flag returns true for the words for yes, false for the words for no, and nil for other words.
func (g *smiGPU) flag(paths ...string) *bool {
	v := g.get(paths...)
	yes := slices.Contains([]string{"Enabled", "Yes", "Active"}, v)
	if !yes && !slices.Contains([]string{"Disabled", "No", "Not Active"}, v) {
		return nil
	}
	return &yes
}

// reasons are the names of package nvml for why clocks are reduced, by the paths of those of nvidia-smi.
var reasons = []struct{ path, name string }{
	{"idle", "gpu_idle"}, {"applications_clocks_setting", "applications_clocks_setting"}, {"sw_power_cap", "sw_power_cap"},
	{"hw_slowdown", "hw_slowdown"}, {"hw_slowdown/hw_thermal_slowdown", "hw_thermal_slowdown"},
	{"hw_slowdown/hw_power_brake_slowdown", "hw_power_brake_slowdown"}, {"sync_boost", "sync_boost"},
	{"sw_thermal_slowdown", "sw_thermal_slowdown"}, {"display_clock_setting", "display_clocks_setting"},
}

// computeModes are NVML's numbers.
var computeModes = map[string]int{"Default": 0, "Prohibited": 2, "Exclusive_Process": 3, "E. Process": 3}

// busID returns the PCI address.
func (g *smiGPU) busID() string { return g.get("pci/bus_id", "id") }

// nvml returns the GPU as NVML has it.
func (g *smiGPU) nvml() nvml.GPU {
	const volatile, aggregate = "ecc_errors/volatile/", "ecc_errors/aggregate/"
	out := nvml.GPU{
		Name: g.get("product_name"), UUID: g.get("gpu_uuid"), PCIBusID: g.busID(),
		MemoryErrors: nvml.MemoryErrors{
			ECC:               g.flag("ecc_mode/current"),
			CorrectedVolatile: g.corrected(volatile), UncorrectedVolatile: g.uncorrected(volatile),
			CorrectedAggregate: g.corrected(aggregate), UncorrectedAggregate: g.uncorrected(aggregate),
			RetiredPages: g.sum("retired_pages/single_bit_ecc", "retired_pages/double_bit_ecc"),
			RemappedRows: g.sum("remapped_rows/correctable_error", "remapped_rows/uncorrectable_error"),
			RemapPending: g.flag("remapped_rows/pending", "retired_pages/pending_page_blacklist", "retired_pages/pending"),
			RemapFailed:  g.flag("remapped_rows/remapping_failure_occurred"),
		},
		Clocks: nvml.Clocks{
			SMClock: g.whole("clocks/sm"), SMClockMax: g.whole("max_clocks/sm"),
			MemoryClock: g.whole("clocks/memory"), MemoryClockMax: g.whole("max_clocks/memory"),
			Temperature: g.whole("temperature/gpu_current_temp"), Utilization: g.number("utilization/gpu"),
		},
		Persistence: g.flag("persistence_mode"), MIG: g.flag("mig_mode/current"),
		Link: nvml.Link{
			PCIeGeneration: g.number(linkInfo + "pcie_generation/current"), PCIeGenerationMax: g.number(linkInfo + "pcie_generation/max"),
			PCIeWidth: g.number(linkInfo + "link_width/current"), PCIeWidthMax: g.number(linkInfo + "link_width/max"),
			PCIeReplays: g.number("pci/replays_since_reset"),
		},
		Processes: g.processes,
	}
	for _, r := range reasons {
		if g.get("clocks_throttle_reasons/"+r.path, "clocks_event_reasons/"+r.path) == "Active" {
			out.Throttle = append(out.Throttle, r.name)
		}
	}
	if mode, ok := computeModes[g.get("compute_mode")]; ok {
		out.ComputeMode = &mode
	}
	if v := g.values["product_name"]; strings.Contains(v, lostWords) || strings.Contains(g.busID(), lostWords) {
		out.Error = lostWords
	}
	return out
}

func (g *smiGPU) corrected(kind string) *int {
	return g.sum(kind+"sram_correctable", kind+"dram_correctable", kind+"single_bit/total")
}

func (g *smiGPU) uncorrected(kind string) *int {
	return g.sum(kind+"sram_uncorrectable", kind+"sram_uncorrectable_parity", kind+"sram_uncorrectable_sec-ded", kind+"dram_uncorrectable", kind+"double_bit/total")
}

const linkInfo = "pci/gpu_link_info/"

// rates are the speeds of generations of PCI Express, as /sys has them.
var rates = []string{"2.5", "5.0", "8.0", "16.0", "32.0", "64.0"}

// put adds to a tree what the kernel and its module have of the GPU.
func (g *smiGPU) put(put func(name, text string)) {
	dir := deviceDir(g.busID())
	if dir == "" {
		return
	}
	address := dir[strings.LastIndexByte(dir, '/')+1:]
	put("proc/driver/nvidia/gpus/"+address+"/information", fmt.Sprintf("Model: \t\t %s\nGPU UUID: \t %s\nDevice Minor: \t %s\n",
		g.get("product_name"), g.get("gpu_uuid"), g.get("minor_number")))
	put(dir+"/vendor", "0x10de\n")
	put(dir+"/class", "0x030000\n")
	if id := strings.TrimPrefix(g.get("pci/device_id"), "0x"); len(id) == len("26B110DE") { // without 0x in XML
		put(dir+"/device", "0x"+strings.ToLower(id[:4])+"\n")
	}
	for _, kind := range []string{"current", "max"} {
		if n := g.number(linkInfo + "pcie_generation/" + kind); n != nil && *n >= 1 && *n <= len(rates) {
			put(dir+"/"+kind+"_link_speed", rates[*n-1]+" GT/s PCIe\n")
		}
		if n := g.number(linkInfo + "link_width/" + kind); n != nil {
			put(dir+"/"+kind+"_link_width", strconv.Itoa(*n)+"\n")
		}
	}
}

// addGPU adds a GPU, unless it is known already or there are too many.
func (c *Collection) addGPU(g *smiGPU) {
	known := slices.ContainsFunc(c.smi, func(o *smiGPU) bool { return strings.EqualFold(o.busID(), g.busID()) })
	if g.busID() != "" && !known && len(c.smi) < maxGPUs {
		c.smi = append(c.smi, g)
	}
}

// What nvidia-smi prints instead of a GPU, or of all.
const (
	lostWords     = "GPU is lost"
	mismatchWords = "Driver/library version mismatch"
)

var lostGPU = regexp.MustCompile(`^Unable to determine the device handle for (?:GPU|gpu)\s?\d*:?\s*([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): (.{1,100})`)

// complaint takes a line in which nvidia-smi says what is wrong.
func complaint(c *Collection, line string) bool {
	if strings.HasPrefix(line, "Failed to initialize NVML: "+mismatchWords) {
		c.Mismatch = strings.TrimSpace(line)
		c.found(SMI)
		return true
	}
	m := lostGPU.FindStringSubmatch(line)
	if m == nil {
		return false
	}
	if len(c.lost) < maxGPUs {
		c.lost = append(c.lost, nvml.GPU{PCIBusID: m[1], Error: strings.TrimSpace(m[2])})
	}
	c.found(SMI)
	return true
}

// A smiParser takes the text of nvidia-smi -q: names and values, nested by indentation.
type smiParser struct {
	on  bool
	gpu *smiGPU
	// at is the path of names, with their indentation.
	at []struct {
		indent int
		name   string
	}
}

const smiTitle = "==NVSMI LOG=="

var gpuHeading = regexp.MustCompile(`^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$`)

func (p *smiParser) take(c *Collection, line string) bool {
	line = strings.TrimRight(line, " \r\n")
	if strings.Contains(line, smiTitle) {
		p.end(c)
		p.on = true
		c.found(SMI)
		return true
	}
	if !p.on || line == "" {
		return p.on
	}
	if m := gpuHeading.FindStringSubmatch(line); m != nil {
		p.next(c)
		p.gpu = &smiGPU{values: map[string]string{"id": m[1]}}
		return true
	}
	indent := len(line) - len(strings.TrimLeft(line, " "))
	name, value, isValue := strings.Cut(line, " : ")
	name = strings.TrimSpace(name)
	if indent == 0 {
		if !isValue {
			p.end(c) // something else follows
			return false
		}
		if name == "Driver Version" {
			c.driver = strings.TrimSpace(value)
		}
		return true
	}
	p.nested(indent, name, value, isValue)
	return true
}

// nested takes a line of a GPU.
func (p *smiParser) nested(indent int, name, value string, isValue bool) {
	for len(p.at) > 0 && p.at[len(p.at)-1].indent >= indent {
		p.at = p.at[:len(p.at)-1]
	}
	if p.gpu == nil || len(p.at) >= maxDepth {
		return
	}
	path := ""
	for _, a := range p.at {
		path += a.name + "/"
	}
	// In the form of the document, whose names have no capitals and no spaces: versions of the text differ in theirs.
	name = strings.ReplaceAll(strings.ToLower(name), " ", "_")
	p.at = append(p.at, struct {
		indent int
		name   string
	}{indent, name})
	if isValue {
		p.gpu.set(path+name, value)
		p.gpu.process(name, value)
	}
}

// process takes a line about a process: that of its number begins it.
func (g *smiGPU) process(name, value string) {
	n, err := strconv.Atoi(leading.FindString(strings.TrimSpace(value)))
	switch {
	case err != nil:
	case name == "process_id" && len(g.processes) < maxProcesses:
		g.processes = append(g.processes, nvml.Process{PID: n})
	case name == "used_gpu_memory" && len(g.processes) > 0:
		g.processes[len(g.processes)-1].Memory = n << 20
	}
}

// next ends a GPU.
func (p *smiParser) next(c *Collection) {
	if p.gpu != nil {
		c.addGPU(p.gpu)
	}
	p.gpu, p.at = nil, nil
}

func (p *smiParser) end(c *Collection) {
	p.next(c)
	p.on = false
}

// A xmlParser takes the document of nvidia-smi -q -x, which it collects.
type xmlParser struct {
	on   bool
	text strings.Builder
}

const (
	xmlBegin = "<nvidia_smi_log"
	xmlEnd   = "</nvidia_smi_log>"
	maxXML   = 4 << 20 // bytes: one of 16 GPUs has 300 KB
)

func (p *xmlParser) take(c *Collection, line string) bool {
	if !p.on && strings.Contains(line, xmlBegin) {
		p.on = true
		c.found(SMIXML)
	}
	if !p.on {
		return false
	}
	if p.text.Len()+len(line) <= maxXML {
		p.text.WriteString(line)
	}
	if strings.Contains(line, xmlEnd) {
		p.end(c)
	}
	return true
}

func (p *xmlParser) end(c *Collection) {
	if !p.on {
		return
	}
	if readXML(c, p.text.String()) != nil {
		c.Cut = true // what came before is read
	}
	p.on = false
	p.text.Reset()
}

// xmlNames are the words of the text for names of the document that are not the same: "" for a level that the text does
// not have.
var xmlNames = map[string]string{
	"uuid": "gpu_uuid", "current_mig": "current", "pci_device_id": "device_id", "pci_bus_id": "bus_id", "pci_gpu_link_info": "gpu_link_info",
	"pcie_gen": "pcie_generation", "max_link_gen": "max", "current_link_gen": "current", "link_widths": "link_width", "max_link_width": "max",
	"current_link_width": "current", "replay_counter": "replays_since_reset", "gpu_util": "gpu", "current_ecc": "current",
	"sram_uncorrectable_secded": "sram_uncorrectable_sec-ded", "multiple_single_bit_retirement": "single_bit_ecc",
	"double_bit_retirement": "double_bit_ecc", "retired_count": "", "pending_blacklist": "pending_page_blacklist",
	"pending_retirement": "pending", "remapped_row_corr": "correctable_error", "remapped_row_unc": "uncorrectable_error",
	"remapped_row_pending": "pending", "remapped_row_failure": "remapping_failure_occurred", "gpu_temp": "gpu_current_temp",
	"sm_clock": "sm", "mem_clock": "memory", "pid": "process_id", "used_memory": "used_gpu_memory", "gpu_idle": "idle",
	"hw_thermal_slowdown": "hw_slowdown/hw_thermal_slowdown", "hw_power_brake_slowdown": "hw_slowdown/hw_power_brake_slowdown",
	"display_clocks_setting": "display_clock_setting",
}

// xmlName translates a name of the document. Those of reasons have a prefix.
func xmlName(name string) string {
	for _, prefix := range []string{"clocks_throttle_reason_", "clocks_event_reason_"} {
		name = strings.TrimPrefix(name, prefix)
	}
	if known, ok := xmlNames[name]; ok {
		return known
	}
	return name
}

// readXML reads the document. It has no entities, and no element is read whole.
func readXML(c *Collection, text string) error {
	d := xml.NewDecoder(strings.NewReader(text))
	d.CharsetReader = func(_ string, r io.Reader) (io.Reader, error) { return r, nil }
	var gpu *smiGPU
	var at []string
	defer func() {
		if gpu != nil {
			c.addGPU(gpu)
		}
	}()
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch t := token.(type) {
		case xml.StartElement:
			if len(at) >= maxDepth {
				return errors.New("nested too deep")
			}
			at = append(at, t.Name.Local)
			if t.Name.Local == "gpu" && len(at) == 2 {
				gpu = &smiGPU{values: map[string]string{}}
				for _, a := range t.Attr {
					gpu.set(a.Name.Local, a.Value)
				}
			}
		case xml.EndElement:
			at = at[:len(at)-1]
			if len(at) == 1 && gpu != nil {
				c.addGPU(gpu)
				gpu = nil
			}
		case xml.CharData:
			c.xmlValue(gpu, at, strings.TrimSpace(string(t)))
		}
	}
}

// xmlValue takes the text of an element.
func (c *Collection) xmlValue(gpu *smiGPU, at []string, value string) {
	switch {
	case value == "" || len(at) < 2:
	case gpu == nil && at[len(at)-1] == "driver_version":
		c.driver = value
	case gpu != nil && len(at) > 2:
		var path []string
		for _, name := range at[2:] {
			if known := xmlName(name); known != "" {
				path = append(path, known)
			}
		}
		gpu.set(strings.Join(path, "/"), value)
		gpu.process(path[len(path)-1], value)
	}
}
